"""Programs into TVM: what its importer lacks or reads wrongly is written out in what it reads, or refused by name.

It hides tvm.relax.frontend.torch, whose ExportedProgramImporter translates node by node.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.fx.decompositions import Decompose, own_decompositions
from attnrewrite.targets.prepare import canonical

aten = torch.ops.aten

# Decompositions are in operators that may have to be written out in turn: so often at most.
DEEPEST = 8


class _Untranslated(Exception):
    """A node that TVM's importer does not translate, and what it says."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(node, reason)
        self.node, self.reason = node, reason


def import_program(program: ExportedProgram) -> Any:
    """The exported program as a Relax module with its weights inside.

    Operators that TVM's importer lacks, fails at or reads wrongly are written out as torch itself does it.

    Raises:
        InputError: there is one that torch does not write out; it is named with its node.
    """
    program = canonical(program)
    for _ in range(DEEPEST):
        program = _written_out(program, {node.target for node in program.graph.nodes if _is_misread(node)})
        try:
            return _translated(program)
        except _Untranslated as failure:
            simpler = _written_out(program, {failure.node.target, *_unknown(program)})
            if simpler is program:
                raise _refused(failure) from failure
            program = simpler
    raise InputError(f"TVM cannot import the module: its operators are written out more than {DEEPEST} times over")


def _refused(failure: _Untranslated) -> InputError:
    return InputError(
        f"TVM's importer has no operator {failure.node.target} (node {failure.node.name!r}){failure.reason}: "
        "rewrite that part of the model, or lower for another target"
    )


def _written_out(program: ExportedProgram, operators: set[Any]) -> ExportedProgram:
    """The program without those of the operators that can be written out; itself where that is none."""
    table = own_decompositions(operators) | {each: _WRITTEN_OUT[each] for each in operators & _WRITTEN_OUT.keys()}
    if not table:
        return program
    simpler = Decompose(table).apply(program)
    return canonical(simpler.graph) if simpler.modified else program


def _translated(program: ExportedProgram) -> Any:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    importer = ExportedProgramImporter()
    known = importer.convert_map | {name: partial(ours, importer) for name, ours in _CONVERTERS.items()}

    def translate(node: Node) -> Any:
        assert callable(node.target)
        convert = known.get(node.target.__name__)
        if convert is None:
            raise _Untranslated(node, "")
        try:
            return convert(node)
        except Exception as error:
            raise _Untranslated(node, f" for these operands ({first_line(error, 120)})") from error

    called = [node for node in program.graph.nodes if node.op == "call_function"]
    importer.convert_map = {node.target.__name__: translate for node in called}
    try:
        return importer.from_exported_program(program, False, False, False, None)
    except _Untranslated:
        raise
    except Exception as error:
        raise InputError(f"TVM cannot import the module: {first_line(error)}") from error


def _unknown(program: ExportedProgram) -> set[Any]:
    """The operators that the importer lacks."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().convert_map.keys() | _CONVERTERS.keys()
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return {target for target in called if target.__name__ not in known}


def _is_misread(node: Node) -> bool:
    """Whether the importer translates a node into something else than it means."""
    if node.target is aten.index.Tensor:
        indices = node.args[1]
        assert isinstance(indices, Sequence)
        return sum(index is not None for index in indices) > 1
    if node.target in _ARITHMETIC:
        return "alpha" in node.kwargs or any(each.dtype != node.meta["val"].dtype for each in _tensors(node))
    return node.target is aten.std.correction


def _tensors(node: Node) -> list[Tensor]:
    return [argument.meta["val"] for argument in node.args if isinstance(argument, Node)]


def _many_indices(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Indexing along several axes as indexing along one that joins them."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if len(axes) < 2 or any(index.dtype == torch.bool for index in given):
        return NotImplemented
    others = [axis for axis in range(x.dim()) if axis not in axes]
    sizes = [x.shape[axis] for axis in axes]
    place = torch.where(given[0] < 0, given[0] + sizes[0], given[0])
    for index, size in zip(given[1:], sizes[1:], strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    joined = x.permute(*axes, *others).reshape(math.prod(sizes), *(x.shape[axis] for axis in others))
    found = joined.index_select(0, place.flatten()).reshape(*place.shape, *joined.shape[1:])
    # The new axes stand where the indexed ones did, or first where those are no neighbours.
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    new, kept = list(range(place.dim())), list(range(place.dim(), found.dim()))
    return found.permute(*kept[:first], *new, *kept[first:])


def _in_one_type(operation: Callable[[Any, Any], Tensor], turned: bool = False) -> Callable[..., Tensor]:
    """Arithmetic whose operands have the type of its result, as the importer takes the operands' for it."""

    def compute(one: Tensor, other: Tensor | float, *, alpha: float = 1) -> Tensor:
        dtype = torch.result_type(one, other)
        if operation is operator.truediv and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        typed = [x.to(dtype) if isinstance(x, Tensor) else x for x in (one, other)]
        if alpha != 1:
            scaled = 0 if turned else 1
            typed[scaled] = typed[scaled] * alpha
        elif all(x.dtype == dtype for x in (one, other) if isinstance(x, Tensor)):
            return NotImplemented
        return operation(*reversed(typed)) if turned else operation(*typed)

    return compute


_ARITHMETIC: dict[Any, Callable[..., Tensor]] = {
    aten.add.Tensor: _in_one_type(operator.add),
    aten.add.Scalar: _in_one_type(operator.add),
    aten.sub.Tensor: _in_one_type(operator.sub),
    aten.sub.Scalar: _in_one_type(operator.sub),
    aten.mul.Tensor: _in_one_type(operator.mul),
    aten.mul.Scalar: _in_one_type(operator.mul),
    aten.div.Tensor: _in_one_type(operator.truediv),
    aten.div.Scalar: _in_one_type(operator.truediv),
    aten.rsub.Scalar: _in_one_type(operator.sub, turned=True),
}
# Ours go before torch's own, which are in more operators, or in none that the importer knows.
_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {aten.index.Tensor: _many_indices, **_ARITHMETIC}


def _index(importer: Any, node: Node) -> Any:
    """Indexing along one axis. The importer's own reads out of bounds where an index is negative."""
    from tvm import relax

    values, indices = importer.retrieve_args(node)[:2]
    ((axis, index),) = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    return importer.block_builder.emit(relax.op.take(values, index, axis=axis, mode="wrap"))


def _largest(importer: Any, node: Node) -> Any:
    """The largest along some axes, which the importer does not know."""
    from tvm import relax

    given = importer.retrieve_args(node)
    axes = list(given[1]) if len(given) > 1 else []
    return importer.block_builder.emit(relax.op.max(given[0], axes or None, len(given) > 2 and given[2]))


def _division(importer: Any, node: Node) -> Any:
    """Division, rounded or not. The importer's own takes a number for an integer, whatever it is divided."""
    from tvm import relax

    left, right = importer.retrieve_args(node)[:2]
    if not isinstance(right, relax.Expr):
        right = relax.const(right, left.ty.dtype)
    rounding = node.kwargs.get("rounding_mode")
    if rounding == "floor":
        return importer.block_builder.emit(relax.op.floor_divide(left, right))
    quotient = importer.block_builder.emit(relax.op.divide(left, right))
    return quotient if rounding is None else importer.block_builder.emit(relax.op.trunc(quotient))


# Operators that torch.export leaves in the graph and TVM's importer lacks, in terms of those it has.
_CONVERTERS: dict[str, Callable[[Any, Node], Any]] = {
    "_unsafe_view.default": lambda importer, node: importer.create_convert_map()["view.default"](node),
    "amax.default": _largest,
    "div.Tensor_mode": _division,
    "index.Tensor": _index,
}
