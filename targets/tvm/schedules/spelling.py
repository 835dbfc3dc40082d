"""Operators of Relax that are several in one, written out in those that rules know: fused kernels reach them so."""

import math
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from attnrewrite.targets.tvm.schedules.graph import is_float, shape

ATTENTION = ("relax.nn.attention", "relax.nn.attention_bias")


def written_out(module: Any) -> Any:
    """The module with every plain `nn.attention` as products around a softmax, and every product of a value with the
    weights turned as one of the weights with the value turned. A causal `nn.attention` stays as it is.
    """
    writer = _Writer(module)
    main = module.get_global_var("main")
    writer.builder_.update_func(main, writer.visit_expr(module[main]))
    return writer.builder_.get()


@mutator
class _Writer(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if not isinstance(call.op, tvm.ir.Op):
            return call
        if call.op.name in ATTENTION:
            plain = call.attrs.causal_mask is None and all(map(is_float, (call, *call.args)))
            return self.attention(call) if plain else call
        return self.value_last(call) if call.op.name == "relax.matmul" else call

    def value_last(self, call: Any) -> Any:
        """value softmax^T as (softmax value^T)^T, where images have the channels of a value before its places."""
        value, turned = call.args
        last = list(range(len(shape(call))))
        if len(last) < 2:  # a vector's
            return call
        move = self.call(turned, "relax.permute_dims")
        swapped = [*last[:-2], last[-1], last[-2]]
        if move is None or [int(axis) for axis in move.attrs.axes or last[::-1]] != swapped:
            return call
        if self.call(move.args[0], "relax.nn.softmax") is None or len(shape(value)) != len(shape(call)):
            return call
        emit, op = self.builder_.emit, relax.op
        return op.permute_dims(emit(op.matmul(move.args[0], emit(op.permute_dims(value, swapped)))), swapped)

    def call(self, value: Any, name: str) -> Any:
        """The call of an operator that gives a value, or None."""
        found = self.builder_.lookup_binding(value) if isinstance(value, relax.Var) else None
        named = isinstance(found, relax.Call) and isinstance(found.op, tvm.ir.Op) and found.op.name == name
        return found if named else None

    def attention(self, call: Any) -> Any:
        """[batch, tokens, heads, channels], as Relax has query, key and value, with a bias on the scores or without."""
        emit, op = self.builder_.emit, relax.op
        query, key, value = (emit(op.permute_dims(each, [0, 2, 1, 3])) for each in call.args[:3])
        scale = call.attrs.scale
        factor = 1 / math.sqrt(shape(query)[-1]) if scale is None else float(scale.value)
        scores = emit(op.matmul(query, emit(op.permute_dims(key, [0, 1, 3, 2]))))
        scores = emit(op.multiply(scores, relax.const(factor, "float32")))
        if len(call.args) > 3:
            scores = emit(op.add(scores, call.args[3]))
        return op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores, -1)), value)), [0, 2, 1, 3])
