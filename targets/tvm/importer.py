"""Programs into TVM: what its importer lacks or reads wrongly is written out in what it reads, or refused by name.

It hides tvm.relax.frontend.torch, whose ExportedProgramImporter translates node by node.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.fx.decompositions import either, in_others
from attnrewrite.targets.limits import described, require_compilable
from attnrewrite.targets.prepare import canonical, tensors_alone
from attnrewrite.targets.tvm.written_out import ARITHMETIC, MISREAD, WRITTEN_OUT

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

    Operators that TVM's importer lacks, fails at or reads wrongly are written out in others first.

    Raises:
        InputError: there is one that nothing writes out, or whose result has no fixed size or a type that processors
            lack; it is named with its node.
    """
    return readable(program)[1]


def readable(program: ExportedProgram) -> tuple[ExportedProgram, Any]:
    """The program in operators that TVM's importer reads rightly, and the Relax module that it makes of them.

    Raises:
        InputError: as `import_program`.
    """
    require_compilable(program, "TVM")
    program, tried = tensors_alone(program), _misread(program)
    table, failure = _in_others(tried), None
    for _ in range(DEEPEST):
        try:
            program = canonical(program, table)
        except Exception as error:  # torch's decompositions raise what their parts raise
            raise error if failure is None else _refused(failure) from error
        if misread := _misread(program) - tried:
            tried |= misread
            table = either(_in_others(misread), table)
            continue
        try:
            return program, _translated(program)
        except _Untranslated as found:
            failure, operators = found, {found.node.target, *_unknown(program)}
            written = either(_ours(operators), in_others(operators))
            if failure.node.target not in written:
                raise _refused(failure) from failure
            table = either(written, table)
    raise InputError(
        f"TVM cannot import the module: its operators are written out more than {DEEPEST} times over; "
        "lower for another target"
    )


def _refused(failure: _Untranslated) -> InputError:
    node = failure.node
    wide = getattr(node.meta.get("val"), "dtype", None) == torch.float64
    way_out = "compute there in float32" if wide else "rewrite that part of the model"
    return InputError(
        f"TVM's importer has no operator {described(node)}{failure.reason}: {way_out}, or lower for another target"
    )


def _in_others(operators: set[Any]) -> dict[Any, Callable[..., Any]]:
    """What operators are written out in; ours go before torch's own, which may be in more, or in none that we know."""
    return in_others(operators) | _ours(operators)


def _ours(operators: set[Any]) -> dict[Any, Callable[..., Any]]:
    return {each: WRITTEN_OUT[each] for each in operators & WRITTEN_OUT.keys()}


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
            made = convert(node)
        except Exception as error:
            raise _Untranslated(node, f" for these operands ({first_line(error, 120)})") from error
        _require_same(node, made)
        return made

    called = [node for node in program.graph.nodes if node.op == "call_function"]
    importer.convert_map = {node.target.__name__: translate for node in called}
    try:
        return importer.from_exported_program(program, False, False, False, None)
    except _Untranslated:
        raise
    except Exception as error:
        raise InputError(f"TVM cannot import the module ({first_line(error)}): lower for another target") from error


def _require_same(node: Node, made: Any) -> None:
    """That a translation has the shape and the kind of numbers that its node has, where both are single tensors."""
    value = node.meta.get("val")
    ty: Any = getattr(made, "ty", None)
    if not isinstance(value, Tensor) or not hasattr(ty, "dtype") or getattr(ty, "shape", None) is None:
        return
    sizes = [getattr(size, "value", None) for size in getattr(ty.shape, "values", ())]
    dtype = str(value.dtype).removeprefix("torch.")
    kinds = [each.rstrip("0123456789") for each in (dtype, str(ty.dtype))]
    if None not in sizes and (tuple(sizes) != tuple(value.shape) or kinds[0] != kinds[1]):
        found = f"{ty.dtype} of {tuple(sizes)}, not {dtype} of {tuple(value.shape)}"
        raise _Untranslated(node, f" as torch means it: it makes {found}")


def _unknown(program: ExportedProgram) -> set[Any]:
    """The operators that the importer lacks."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().convert_map.keys() | _CONVERTERS.keys()
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return {target for target in called if target.__name__ not in known}


def _misread(program: ExportedProgram) -> set[Any]:
    """The operators of which the importer misreads a node."""
    return {node.target for node in program.graph.nodes if node.op == "call_function" and _is_misread(node)}


def _is_misread(node: Node) -> bool:
    """Whether the importer translates a node into something else than it means, or into what nothing computes well."""
    if node.target is aten.index.Tensor:
        indices = node.args[1]
        assert isinstance(indices, Sequence)
        return sum(index is not None for index in indices) > 1
    if node.target in ARITHMETIC:
        given = [argument.meta["val"] for argument in node.args if isinstance(argument, Node)]
        dtype = node.meta["val"].dtype
        scaled = len(node.args) > 2 or "alpha" in node.kwargs
        return scaled or dtype == torch.bool or any(x.dtype != dtype for x in given)
    return node.target in MISREAD


def _index(importer: Any, node: Node) -> Any:
    """Indexing along one axis. The importer's own reads out of bounds where an index is negative."""
    from tvm import relax

    values, indices = importer.retrieve_args(node)[:2]
    ((axis, index),) = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    return importer.block_builder.emit(relax.op.take(values, index, axis=axis, mode="wrap"))


def _extreme(importer: Any, node: Node, kind: str) -> Any:
    """The largest ("max") or smallest ("min") along some axes, which the importer does not know."""
    from tvm import relax

    given = importer.retrieve_args(node)
    axes = list(given[1]) if len(given) > 1 else []
    return importer.block_builder.emit(getattr(relax.op, kind)(given[0], axes or None, len(given) > 2 and given[2]))


def _scattered_sum(importer: Any, node: Node) -> Any:
    """Values added at places along an axis, which the importer does not know."""
    from tvm import relax

    values, axis, places, added = importer.retrieve_args(node)[:4]
    return importer.block_builder.emit(relax.op.scatter_elements(values, places, added, axis, "add"))


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
    "amax.default": partial(_extreme, kind="max"),
    "amin.default": partial(_extreme, kind="min"),
    "div.Tensor_mode": _division,
    "index.Tensor": _index,
    "scatter_add.default": _scattered_sum,
}
