"""A model's weights taken out of it, to lie in the pages of its library, where they are mapped and never copied.

TVM's runtime reads constants out of a library into memory of its own, by way of two more copies. Here the kernels take
their large constants from a function of the library instead, which hands out views of its read-only pages.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from attnrewrite.targets.tvm.schedules.graph import is_constant

FUNCTION = "attnrewrite_weight"  # of library_weights.cc
LARGE = 1 << 16  # bytes from which a constant is worth a call
MOST_AXES = 8
KINDS = {"i": "kDLInt", "u": "kDLUInt", "f": "kDLFloat"}  # numpy's letters for types, and DLPack's names


@dataclass(frozen=True)
class Apart:
    """A scheduled module whose kernels take `weights` from FUNCTION, by their number."""

    module: Any
    weights: tuple[np.ndarray, ...]


def apart(module: Any) -> Apart:
    """The large constants that kernels read, each once, out of the module; what TVM has yet to lower keeps its own."""
    main = module["main"]
    blocks: Any = getattr(main.body, "blocks", ())
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return Apart(module, ())
    builder, taken = relax.BlockBuilder(module), _Taken()
    bindings: list[Any] = []
    for binding in blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir"):
            kernel, arguments, *rest = value.args
            read = relax.Tuple([taken.read(each, bindings, builder) for each in arguments])
            call = relax.Call(value.op, [kernel, read, *rest], value.attrs, value.ty_args, value.span)
            binding = relax.VarBinding(binding.var, builder.normalize(call))
        bindings.append(binding)
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    builder.update_func(module.get_global_var("main"), function)
    return Apart(builder.get(), tuple(taken.weights))


class _Taken:
    """The constants that were taken out so far, and the variables that hold them instead."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []
        self.variables: dict[tuple[Any, ...], Any] = {}

    def read(self, argument: Any, bindings: list[Any], builder: Any) -> Any:
        """What a kernel reads in the place of `argument`: itself, or a variable that `bindings` gives by now."""
        if not is_constant(argument):
            return argument
        array = argument.value.numpy()
        if array.nbytes < LARGE or array.dtype.kind not in KINDS or array.ndim > MOST_AXES:
            return argument
        # What several kernels read, each has packed for itself.
        known = (array.dtype.str, array.shape, hashlib.sha256(array.data).digest())
        if known not in self.variables:
            number = len(self.weights)
            call = relax.call_pure_packed(FUNCTION, relax.prim_value(number), ty_args=[argument.ty])
            self.variables[known] = relax.DataflowVar(f"weight{number}", argument.ty)
            self.weights.append(array)
            bindings.append(relax.VarBinding(self.variables[known], builder.normalize(call)))
        return self.variables[known]
