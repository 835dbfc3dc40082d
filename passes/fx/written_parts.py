"""What code writes into the parts of a tensor, one assignment after another, as these parts laid side by side.

`out[:, :, :8] = a; out[:, :, 8:] = b` is exported as a copy over a slice of a slice of zeros. It is a concatenation,
which the matcher and every backend read, and which has a derivative: `aten.copy` has none. `out[..., ::2] = a` and its
other half are a stack, and `scores[..., 1:] += b` is the sum of the scores and b with zeros before it (with a step,
between its elements, too), also where the part is laid out otherwise while that is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.pieces import put, traced
from attnrewrite.patterns.fx.operators import FACTORIES, operator_name

aten = torch.ops.aten

_READS = {"slice_scatter": "slice", "select_scatter": "select"}  # writes, and what reads where they write
_LAYS = frozenset({"view", "_unsafe_view", "reshape"})  # the same elements in the same order
_MADE = (FACTORIES - {"sym_size"}) | {"zeros", "ones", "full", "empty", "pad", "constant_pad_nd"}


@dataclass(frozen=True)
class JoinWrittenParts(Pass[GraphModule]):
    """Every write into a part of what was made to be written into, as a concatenation along the axis whose part it is;
    what is added to a part of anything, as added to all of it; and a copy over a whole tensor as what is copied. Other
    writes into what was computed stay, and those into an axis of no known length. What was written over is left for
    what drops unread nodes.
    """

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        edits = []
        written = _Written({}, {})
        for node in list(graph.graph.nodes):
            made = _instead(node, written)
            if made is not None:
                edits.append(Edit(node.name, made.name))
                node.replace_all_uses_with(made)
                graph.graph.erase_node(node)
        if edits:
            for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default  # what was written into lay in memory as what it was like
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


@dataclass(frozen=True)
class _Written:
    """What stands in tensors that were made to be written into: side by side, or a part at each `start` of a step."""

    parts: dict[Node, _Parts]
    steps: dict[Node, dict[int, Node]]

    def is_made(self, base: Node) -> bool:
        """Whether a tensor, or what it is a part of, was made to be written into."""
        while operator_name(base) in _READS.values():
            base = base.args[0]  # type: ignore[assignment]
        return base in self.parts or base in self.steps or operator_name(base) in _MADE


def _instead(node: Node, written: _Written) -> Node | None:
    """What stands for a write; None where it is none, or stays."""
    name = operator_name(node)
    if name == "slice" and _takes_all(node):
        return node.args[0]  # type: ignore[return-value]
    if name == "copy":
        return _copied(node)
    if name not in _READS:
        return None
    base, source = node.args[:2]
    assert isinstance(base, Node), "what is written to is a tensor"
    assert isinstance(source, Node), "and what is written is one, of its type"
    if name == "slice_scatter" and _takes_all(node):
        return source
    if _reads_there(source, node):
        return base
    return _added(node, base, source) or (_joined(node, base, source, written) if written.is_made(base) else None)


def _joined(node: Node, base: Node, source: Node, written: _Written) -> Node | None:
    """The concatenation, or where all parts of a step are written the stack, that a write completes."""
    axis, place = _axis(node), _place(node)
    length = _value(base).shape[axis]
    if not isinstance(length, int):
        return None
    if place is None:
        return _stacked(node, base, source, written, length)
    standing = written.parts.get(base)
    if standing is None or standing.axis != axis:
        standing = _Parts(axis, (_Part(base, 0, length),))
    found = standing.with_part(*place, _Part(source, 0, place[1] - place[0], operator_name(node) == "select_scatter"))
    made = _laid(found, node)
    written.parts[made] = found
    return made


def _stacked(node: Node, base: Node, source: Node, written: _Written, length: int) -> Node | None:
    axis, (start, end, step) = _axis(node), _bounds(node)
    if end is not None or not isinstance(step, int) or length % step or start not in range(step):
        return None
    of_this_step = base in written.steps and (_axis(base), _bounds(base)[2]) == (axis, step)
    parts = {**(written.steps[base] if of_this_step else {}), start: source}
    written.steps[node] = parts
    if len(parts) < step:
        return None
    return _put(
        lambda *each: torch.stack(each, axis + 1).flatten(axis, axis + 1), [parts[n] for n in range(step)], node
    )


def _added(node: Node, base: Node, source: Node) -> Node | None:
    """The sum of all of `base` and what is added to the part of it that is written back, with zeros around that."""
    positions, axis = _positions(node), _axis(node) - _value(base).dim()
    length, addends = _value(base).shape[axis], _addends(source, node)
    if not addends or not positions or not isinstance(length, int):
        return None
    single, wanted = operator_name(node) == "select_scatter", _value(source).shape

    def compute(whole: Tensor, *added: Tensor) -> Tensor:
        laid = [addend.laid_out(tensor, wanted) for addend, tensor in zip(addends, added, strict=True)]
        part = sum(laid[1:], laid[0])
        part = part.reshape((*[1] * (-axis - single - part.dim()), *part.shape))
        part = part.unsqueeze(axis) if single else part
        sizes = [-1] * part.dim()
        sizes[axis] = len(positions)
        around = [0] * (2 * (-axis - 1)) + [positions[0], length - 1 - positions[-1]]
        return whole + aten.constant_pad_nd.default(_spaced(part.expand(sizes), axis, positions.step), around)

    return _put(compute, [base, *(addend.node for addend in addends)], node)


def _spaced(part: Tensor, axis: int, step: int) -> Tensor:
    """`part` with zeros between its elements along an axis, counted from behind, so that they stand `step` apart."""
    if step == 1:
        return part
    behind = [0] * (2 * (-axis - 1))
    filled = aten.constant_pad_nd.default(part.unsqueeze(axis), [*behind, 0, step - 1]).flatten(axis - 1, axis)
    return filled.narrow(axis, 0, filled.shape[axis] - step + 1)


@dataclass(frozen=True)
class _Addend:
    """What is added to a part while that is laid out as `size`: scores with the rows and columns of both pictures."""

    node: Node
    size: Sequence[Any]

    def fits(self, size: Sequence[Any]) -> bool:
        """Whether it can be laid out as a part of `size` is: no length but the first, which both have, is unknown."""
        known = all(isinstance(each, int) for each in (*self.size[1:], *size[1:]))
        return _same(self.size, size) or (known and _same(self.size[:1], size[:1]))

    def laid_out(self, tensor: Tensor, size: Sequence[Any]) -> Tensor:
        if _same(self.size, size):
            return tensor
        tensor = tensor.reshape((*[1] * (len(self.size) - tensor.dim()), *tensor.shape))
        return tensor.expand((-1, *self.size[1:])).reshape((-1, *size[1:]))


def _is_the_same(value: Node) -> bool:
    """Whether a value is its operand: a copy, or spread to the size that it has."""
    name = operator_name(value)
    return name == "clone" or (name == "expand" and _same(_value(value).shape, _value(value.args[0]).shape))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sizes are written alike: to ask whether unknown lengths are equal would settle them."""
    return list(map(str, one)) == list(map(str, other))


def _addends(value: Any, write: Node) -> list[_Addend] | None:
    """What is added to the part that `write` goes to, where `value` is that part and nothing else; None otherwise."""
    if not isinstance(value, Node):
        return None
    if _reads_there(value, write):
        return []
    if value is not write.args[1] and len(value.users) > 1:  # no step of this sum alone
        return None
    if operator_name(value) in _LAYS or _is_the_same(value):
        return _addends(value.args[0], write)
    if value.target is not aten.add.Tensor or value.kwargs:
        return None
    for own, more in (value.args, value.args[::-1]):
        found = _addends(own, write)
        if found is not None and isinstance(more, Node):
            addend = _Addend(more, _value(value).shape)
            return [*found, addend] if addend.fits(_value(write.args[1]).shape) else None
    return None


def _reads_there(value: Any, write: Node) -> bool:
    """Whether a value is what stands, in what is written to, where the write goes."""
    if not isinstance(value, Node) or operator_name(value) != _READS[operator_name(write)]:
        return False
    return _where(value) == _where(write) and _alike(value.args[0], write.args[0])


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, or the same reading of the same."""
    if one is other:
        return True
    names = {operator_name(each) if isinstance(each, Node) else None for each in (one, other)}
    reads = len(names) == 1 and names <= set(_READS.values())
    return reads and _where(one) == _where(other) and _alike(one.args[0], other.args[0])


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


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _axis(node: Node) -> int:
    """The axis that a part of it, or a write into that, is along."""
    place = 2 if operator_name(node) in _READS else 1
    axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(axis) % _value(node.args[0]).dim()  # type: ignore[arg-type]


def _where(node: Node) -> tuple[Any, ...]:
    """The axis, and what along it, a part of a tensor is of, or a write into that goes to."""
    if operator_name(node) in ("slice", "slice_scatter"):
        return _axis(node), *_bounds(node)
    return _axis(node), node.args[3 if operator_name(node) in _READS else 2]


def _place(node: Node) -> tuple[int, int] | None:
    """Where along its axis a write goes; None where its bounds are no numbers, or it leaves positions out."""
    positions = _positions(node)
    return (positions.start, positions.stop) if positions and positions.step == 1 else None


def _positions(node: Node) -> range | None:
    """The positions along its axis that a write goes to; None where its bounds are no numbers."""
    length = _value(node).shape[_axis(node)]
    if operator_name(node) == "select_scatter":
        index = node.args[3]
        return range(length)[index:][:1] if isinstance(index, int) and isinstance(length, int) else None
    bounds = _bounds(node)
    if not all(each is None or isinstance(each, int) for each in (*bounds, length)):
        return None
    return range(length)[slice(*bounds)]


def _bounds(node: Node) -> tuple[Any, Any, Any]:
    """Start, end and step of a slice, or of a write into one; None for an end that is the whole axis' own."""
    given = [*node.args[3 if operator_name(node) in _READS else 2 :], *[None] * 3][:3]
    start, end, step = (
        node.kwargs.get(name, own) if own is None else own
        for name, own in zip(("start", "end", "step"), given, strict=True)
    )
    length = _value(node.args[0]).shape[_axis(node)]
    behind = isinstance(end, int) and (end == 2**63 - 1 or (isinstance(length, int) and end >= length))
    return start or 0, None if behind else end, 1 if step is None else step


def _takes_all(node: Node) -> bool:
    """Whether a slice, or a write into one, takes its whole axis."""
    return _bounds(node) == (0, None, 1)
