"""What code writes into the parts of a tensor, one assignment after another, as these parts laid side by side.

`out[:, :, :8] = a; out[:, :, 8:] = b` is exported as a copy over a slice of a slice of zeros. It is a concatenation,
which the matcher and every backend read, and which has a derivative: `aten.copy` has none.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.pieces import put, traced
from attnrewrite.patterns.fx.operators import FACTORIES, operator_name

_WRITES = ("slice_scatter", "select_scatter")
_MADE = (FACTORIES - {"sym_size"}) | {"zeros", "ones", "full", "empty"}


@dataclass(frozen=True)
class JoinWrittenParts(Pass[GraphModule]):
    """Every write into a part of what was made to be written into, as a concatenation along the axis whose part it is;
    and a copy over a whole tensor as what is copied. Writes into what was computed stay, and those at a step or into
    an axis of no known length. What was written over is left for what drops unread nodes.
    """

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        edits = []
        parts: dict[Node, _Parts] = {}
        for node in list(graph.graph.nodes):
            made = _instead(node, parts)
            if made is not None:
                edits.append(Edit(node.name, made.name))
                node.replace_all_uses_with(made)
                graph.graph.erase_node(node)
        if edits:
            graph.recompile()
        return PassResult(graph, tuple(edits))


@dataclass(frozen=True)
class _Part:
    """Positions `first` to `last` of an axis of a tensor; `single`: that axis is to be made, of one position."""

    node: Node
    first: int
    last: int
    single: bool = False

    def within(self, first: int, last: int) -> "_Part":
        return _Part(self.node, self.first + first, self.first + last, self.single)

    def read(self, tensor: Tensor, axis: int) -> Tensor:
        if self.single:
            return tensor.unsqueeze(axis)
        return tensor if self.last - self.first == tensor.shape[axis] else tensor[_range(self, axis)]


def _range(part: _Part, axis: int) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, slice(part.first, part.last))


@dataclass(frozen=True)
class _Parts:
    """What stands along an axis, side by side."""

    axis: int
    parts: tuple[_Part, ...]

    def with_part(self, first: int, last: int, written: _Part) -> "_Parts":
        """The same with `written` at `first` to `last`."""
        before, after, start = [], [], 0
        for part in self.parts:
            end = start + part.last - part.first
            if start < first:
                before.append(part.within(0, min(end, first) - start))
            if end > last:
                after.append(part.within(max(start, last) - start, end - start))
            start = end
        return _Parts(self.axis, (*before, written, *after))


def _instead(node: Node, parts: dict[Node, _Parts]) -> Node | None:
    """What stands for a write, told of in `parts` where it is a concatenation; None where it is none or stays."""
    name = operator_name(node)
    if name == "slice" and _takes_all(node, node.args[0]):
        return node.args[0]  # type: ignore[return-value]
    if name == "copy":
        return _copied(node)
    if name not in _WRITES:
        return None
    base, source = node.args[:2]
    assert isinstance(base, Node), "what is written to is a tensor"
    assert isinstance(source, Node), "and what is written is one, of its type"
    if name == "slice_scatter" and _takes_all(node, base):
        return source
    axis, place = _axis(node), _place(node)
    length = _value(base).shape[axis]
    if place is None or not isinstance(length, int):
        return None
    standing = parts.get(base)
    if not _is_made(base, parts):
        return None
    if standing is None or standing.axis != axis:
        standing = _Parts(axis, (_Part(base, 0, length),))
    written = _Part(source, 0, place[1] - place[0], name == "select_scatter")
    found = standing.with_part(*place, written)
    made = _laid(found, node)
    parts[made] = found
    return made


def _is_made(base: Node, parts: Container[Node]) -> bool:
    """Whether a tensor, or what it is a part of, was made to be written into, as that in `parts` was."""
    while operator_name(base) in ("slice", "select"):
        base = base.args[0]  # type: ignore[assignment]
    return base in parts or operator_name(base) in _MADE


def _laid(found: _Parts, node: Node) -> Node:
    operands = list(dict.fromkeys(part.node for part in found.parts))

    def compute(*tensors: Tensor) -> Tensor:
        given = dict(zip(operands, tensors, strict=True))
        return torch.cat([part.read(given[part.node], found.axis) for part in found.parts], found.axis)

    return _put(compute, operands, node)


def _copied(node: Node) -> Node | None:
    over, source = node.args[:2]
    assert isinstance(over, Node), "what is written to is a tensor"
    assert isinstance(source, Node), "and what is written is one"
    wanted, given = _value(over), _value(source)
    if tuple(wanted.shape) != tuple(given.shape):
        return _put(lambda one, other: one.to(other.dtype).expand_as(other), (source, over), node)
    return source if wanted.dtype == given.dtype else _put(lambda one: one.to(wanted.dtype), (source,), node)


def _put(compute: Any, operands: Sequence[Node], node: Node) -> Node:
    piece = traced(compute, operands)
    return put(piece, operands, node, node.meta)[piece.output_node().args[0]]  # type: ignore[index]


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _axis(node: Node) -> int:
    """The axis that a slice, or a write into one, is along."""
    place = 2 if operator_name(node) in _WRITES else 1
    axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(axis) % _value(node).dim()  # type: ignore[arg-type]


def _place(node: Node) -> tuple[int, int] | None:
    """Where along its axis a write goes; None where its bounds are no numbers, or it leaves positions out."""
    length = _value(node).shape[_axis(node)]
    if operator_name(node) == "select_scatter":
        index = node.args[3]
        return (index % length, index % length + 1) if isinstance(index, int) and isinstance(length, int) else None
    start, end, step = _bounds(node, 3)
    if step != 1 or not all(each is None or isinstance(each, int) for each in (start, end, length)):
        return None
    first, last, _ = slice(start, end).indices(length)
    return (first, last) if first < last else None


def _bounds(node: Node, place: int) -> tuple[Any, Any, Any]:
    given = [*node.args[place:], *[None] * 3][:3]
    start, end, step = (
        node.kwargs.get(name, own) if own is None else own
        for name, own in zip(("start", "end", "step"), given, strict=True)
    )
    return start, end, 1 if step is None else step


def _takes_all(node: Node, base: Any) -> bool:
    """Whether a slice, or a write into one, takes its whole axis."""
    start, end, step = _bounds(node, 2 if operator_name(node) == "slice" else 3)
    length = _value(base).shape[_axis(node)]
    ends = end is None or (isinstance(end, int) and (end == 2**63 - 1 or (isinstance(length, int) and end >= length)))
    return start in (None, 0) and step == 1 and ends
