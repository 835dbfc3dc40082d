"""What is written into a part of a tensor: ScatterND, as exporters spell assignments to slices.

`scores[..., 1:, 1:] += b` becomes a ScatterND of what was read there, with b added, at the positions that it was read
from. It is the sum of the scores and b with zeros before it (with a step, between its elements, too), which the matcher
reads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import InputError
from attnrewrite.patterns.onnx.sizes import Size, computed
from attnrewrite.patterns.onnx.writer import Setting, Writer

Box = Mapping[int, range]  # the positions along each axis that is not whole

_LAYS = frozenset({"Reshape", "Expand", "Identity", "Unsqueeze", "Squeeze", "Flatten"})
_FIRST_WITH_PADS = 11  # the opset from which Pad takes what it adds as an operand


def box_of(places: np.ndarray, size: Size) -> Box | None:
    """The part of a tensor of `size` that the positions [..., axes] of a ScatterND fill; None where they are no box."""
    *lengths, axes = places.shape
    if len(lengths) != axes or not places.size:
        return None
    places = places % np.array(size[:axes])
    ends = np.stack([places.reshape(-1, axes)[place] for place in (0, -1)]).T.tolist()
    steps = [max(1, (last - first) // max(1, length - 1)) for (first, last), length in zip(ends, lengths, strict=True)]
    ranges = [range(first, last + 1, step) for (first, last), step in zip(ends, steps, strict=True)]
    if [len(each) for each in ranges] != lengths:
        return None
    if not np.array_equal(places, np.stack(np.meshgrid(*ranges, indexing="ij"), -1)):
        return None
    return {axis: each for axis, each in enumerate(ranges) if each != range(size[axis])}


@dataclass(frozen=True)
class _Addend:
    """What is added to a part of a tensor while that is laid out as `size`."""

    value: ir.Value
    size: Size

    def fits(self, part: Size) -> bool:
        """Whether it can be laid out as a part of that size is, whatever the batch."""
        return self.size == part or self.size[:1] == part[:1]

    def laid_out(self, writer: Writer, part: Size, own: Size, name: str) -> tuple[ir.Value, Size]:
        """The value, of the size `own`, as it is added to the part itself, and its size then; lengths may be one."""
        if self.size == part:
            return self.value, own
        images = own[:1] if len(own) == len(self.size) else (1,)
        spread, laid = (np.array([first, *size[1:]]) for first, size in ((1, self.size), (0, part)))
        value = writer.one("Expand", [self.value, writer.constant(spread, f"{name}.lengths")], f"{name}.spread")
        return writer.one("Reshape", [value, writer.constant(laid, f"{name}.size")], f"{name}.laid"), images + part[1:]


@dataclass(frozen=True)
class _Sum:
    """`base`, and what is added to its part `box`."""

    base: ir.Value
    box: Box
    addends: tuple[_Addend, ...]


def write_sum(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | None:
    """A ScatterND as the sum that it is, or as what it writes to where it changes nothing of that; None where it is
    neither, or the opset's Pad takes no operands.
    """
    found = _sum(node, setting)
    if found is None or setting.version < _FIRST_WITH_PADS:
        return None
    if not found.addends:
        return writer.one("Identity", [node.inputs[0]], "same")
    whole = writer.one("Add", [found.base, _padded(writer, found, setting)], "sum")
    return writer.transpose(whole, _turned(node.inputs[0], setting)[1], "turned")


def _sum(node: ir.Node, setting: Setting) -> _Sum | None:
    """The sum that a ScatterND is, but for the order of its axes; None where it writes something else."""
    data, indices, updates = node.inputs
    if data is None or indices is None or updates is None or node.attributes.get_string("reduction", "none") != "none":
        return None
    box = _written(indices, setting.size(data), setting)
    if box is None:
        return None
    earlier = _same_before(node, box, setting)
    data = earlier[-1].inputs[0] if earlier else data
    (base, order), (source, moved) = _turned(data, setting), _turned(updates, setting)
    found = _added(source, base, setting, 1 + len(earlier)) if order == moved else None
    if found is None or {order[axis]: positions for axis, positions in box.items()} != found.box:
        return None
    part = _part(found, setting)
    return found if all(addend.fits(part) for addend in found.addends) else None


def _same_before(node: ir.Node, box: Box, setting: Setting) -> list[ir.Node]:
    """The writes right before `node` of the same to the same positions: `part += b` writes to it as it adds, and once
    more as Python assigns it.
    """
    found: list[ir.Node] = []
    data, _, updates = node.inputs
    source = _laid(updates, setting)
    while data is not None and (before := data.producer()) is not None and before.op_type == "ScatterND":
        inner, indices, updates = before.inputs
        if inner is None or indices is None or _laid(updates, setting) is not source:
            break
        if _written(indices, setting.size(inner), setting) != box:
            break
        found.append(before)
        data = inner
    return found


def _written(indices: ir.Value, size: Size, setting: Setting) -> Box | None:
    """The part that a ScatterND into a tensor of `size` writes to; None where that is no box, or not known."""
    try:
        places = computed(indices, setting.sizes.known, setting.sizes, setting.opsets)
    except InputError:  # as of a file that calls its batch open, and holds it as a number
        return None
    return None if places is None else box_of(places, size)


def _added(value: ir.Value, base: ir.Value, setting: Setting, uses: int) -> _Sum | None:
    """`value` as a part of `base` and what is added to that, nothing perhaps; None where it is made otherwise, or more
    than as many `uses` read a step of the sum.
    """
    box = _read(value, base, setting)
    if box is not None:
        return _Sum(base, box, ())
    node = value.producer()
    operands = [operand for operand in (node.inputs if node else ()) if operand is not None]
    sized = operands and all(str(each.name) in setting.sizes.size for each in (value, *operands))
    if node is None or not sized or len(value.uses()) > uses:  # no step of this sum alone
        return None
    if _lays(node, setting):
        return _added(operands[0], base, setting, uses)
    if node.op_type != "Add":
        return None
    for own, more in (operands, operands[::-1]):
        found = _added(own, base, setting, uses)
        if found is not None:
            return replace(found, addends=(*found.addends, _Addend(more, setting.size(value))))
    return None


def _lays(node: ir.Node, setting: Setting) -> bool:
    """Whether it gives the elements of its operand in the same order."""
    if node.op_type not in _LAYS or node.inputs[0] is None:
        return False
    before, after = (setting.sizes.size.get(str(value.name)) for value in (node.inputs[0], node.outputs[0]))
    return before is not None and after is not None and math.prod(before) == math.prod(after)


def _laid(value: ir.Value | None, setting: Setting) -> ir.Value | None:
    """What a value is, laid out as it may be."""
    while value is not None and (node := value.producer()) is not None and _lays(node, setting):
        value = node.inputs[0]
    return value


def _turned(value: ir.Value | None, setting: Setting) -> tuple[ir.Value, tuple[int, ...]]:
    """What a value is with its axes in another order, and that order, as Transpose takes it."""
    assert value is not None
    order = tuple(range(len(setting.size(value))))
    while (node := value.producer()) is not None and node.op_type in ("Transpose", "Identity") and node.inputs[0]:
        value = node.inputs[0]
        if node.op_type == "Transpose":
            perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else sorted(order, reverse=True)
            order = tuple(perm[axis] for axis in order)
    return value, order


def _read(value: ir.Value, base: ir.Value, setting: Setting) -> Box | None:
    """Which part of `base` a value reads by slices; None where it is something else."""
    ranges: dict[int, range] = {}
    while str(value.name) in setting.sizes.size:
        source, order = _turned(value, setting)
        straight = list(order) == sorted(order)
        value = source if straight else value
        if value is base:
            size = setting.size(base)
            return {axis: positions for axis, positions in ranges.items() if positions != range(size[axis])}
        node = value.producer()
        cut = None if node is None or node.op_type != "Slice" else _cut(node, setting)
        if node is None or cut is None or node.inputs[0] is None:
            return None
        for axis, positions in cut.items():  # what was found until here lies inside of it
            inner = ranges.get(axis, range(len(positions)))
            ranges[axis] = positions[inner.start : inner.stop : inner.step]
        value = node.inputs[0]
    return None


def _cut(node: ir.Node, setting: Setting) -> Box | None:
    """The part of its operand that a Slice reads; None where that is not known, or runs backwards."""
    data, *bounds = node.inputs
    given = [None if bound is None else setting.sizes.known.get(str(bound.name)) for bound in bounds]
    known = [array.reshape(-1).tolist() for array in given if array is not None]
    if data is None or len(given) < 2 or len(known) < len(given):
        return None
    starts, ends = known[:2]
    axes = known[2] if len(known) > 2 else range(len(starts))
    steps = known[3] if len(known) > 3 else [1] * len(starts)
    if min(steps) < 1:
        return None
    size = setting.size(data)
    cuts = zip(axes, map(slice, starts, ends, steps), strict=True)
    return {axis % len(size): range(*cut.indices(size[axis])) for axis, cut in cuts}


def _part(found: _Sum, setting: Setting) -> Size:
    """The size of the part that is added to."""
    size = list(setting.size(found.base))
    for axis, positions in found.box.items():
        size[axis] = len(positions)
    return tuple(size)


def _padded(writer: Writer, found: _Sum, setting: Setting) -> ir.Value:
    """All that is added to the part of a sum's base, with zeros around it."""
    part, whole = _part(found, setting), setting.size(found.base)
    laid = [
        addend.laid_out(writer, part, setting.size(addend.value), f"part.{place}")
        for place, addend in enumerate(found.addends)
    ]
    total, size = laid[0][0], np.broadcast_shapes(*(size for _, size in laid))
    for place, (more, _) in enumerate(laid[1:], 1):
        total = writer.one("Add", [total, more], f"parts.{place}")
    lengths = [part[axis] if axis in found.box else 1 for axis in range(len(part))]
    if np.broadcast_shapes(size, lengths) != size:
        total = writer.one("Expand", [total, writer.constant(np.array(lengths), "lengths")], "spread")
        size = np.broadcast_shapes(size, lengths)
    for axis, positions in found.box.items():
        if positions.step > 1:
            total = _spaced(writer, total, size, axis, positions)
    ends = [found.box.get(axis, range(length)) for axis, length in enumerate(whole)]
    around = [each[0] for each in ends] + [length - 1 - each[-1] for each, length in zip(ends, whole, strict=True)]
    return writer.one("Pad", [total, writer.constant(np.array(around), "around")], "padded")


def _spaced(writer: Writer, value: ir.Value, size: Size, axis: int, positions: range) -> ir.Value:
    """`value` with zeros between its elements along an axis, so that these stand as far apart as `positions`."""
    span = range(positions[0], positions[-1] + 1)
    kept, behind, name = [0] * axis, size[axis + 1 :], f"spaced.{axis}"
    apart = writer.reshape(value, [*kept, len(positions), 1, *behind], f"{name}.apart")
    zeros = np.zeros(2 * len(size) + 2, np.int64)
    zeros[len(size) + 1 + axis + 1] = positions.step - 1
    filled = writer.one("Pad", [apart, writer.constant(zeros, f"{name}.zeros")], f"{name}.filled")
    laid = writer.reshape(filled, [*kept, len(positions) * positions.step, *behind], f"{name}.laid")
    cut = [writer.constant(np.array([each]), f"{name}.{place}") for place, each in enumerate((0, len(span), axis))]
    return writer.one("Slice", [laid, *cut], name)
