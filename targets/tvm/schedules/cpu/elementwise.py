"""Arithmetic element by element, and data that has to move: copies, concatenations, padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.cpu.function import along, each, function, write
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position
from attnrewrite.targets.tvm.schedules.expression import (
    Arguments,
    Expression,
    Number,
    joined,
    leaves,
    ordered,
)
from attnrewrite.targets.tvm.schedules.graph import is_float, same, shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument, Call, Kernel, Rule, Step
from attnrewrite.targets.tvm.schedules.trace import destination, destinations, elementwise, operand
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, contiguous

LEAST_ROW = 64  # shorter last axes share a task with others


@dataclass(frozen=True)
class Part:
    """A part of a result: where it lies, and its value over the same index space."""

    out: Layout
    value: Expression


@dataclass(frozen=True)
class Fill:
    """out = value, part by part."""

    parts: tuple[Part, ...]
    name: str = "elementwise"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        def body(*buffers: Any) -> None:
            for part in self.parts:
                _fill(_simplified(part), buffers, profile)

        return function(arguments, body)


def _fill(part: Part, buffers: Sequence[Any], profile: Profile) -> None:
    space = part.out.shape
    # As many of the last axes make a row as are needed to keep a task busy.
    cut = len(space) - 1
    while cut > 0 and math.prod(space[cut:]) < LEAST_ROW:
        cut -= 1
    with each(space[:cut], part.out.size) as outer:

        def visit(index: list[Position], _: Position, lanes: int) -> None:
            write(part.value, buffers, part.out, (*outer, *index), lanes)

        along(space[cut:], profile.lanes, visit, wide=2)


def _simplified(part: Part) -> Part:
    """The part with neighbouring axes joined, its fastest one last."""
    order = sorted(range(len(part.out.shape)), key=lambda axis: -part.out.strides[axis])
    (out,), value = joined([part.out.permute(order)], ordered(part.value, order), len(order))
    return Part(out, value)


def copying(value: Expression, into: Shape) -> Fill:
    """The function that writes a value, in its index space, as a contiguous tensor."""
    return Fill((Part(contiguous(into), value),), name="copy")


def _arithmetic(call: Call, profile: Profile) -> Kernel | Refusal:
    if not shape(call.var):
        return Refusal("one-number", "is one number without axes: TVM's own rules compute it")
    # The furthest back that there is arithmetic to do, or something to copy from.
    for source, out, passed in reversed(destinations(call.graph, call.var)):
        found = elementwise(call.graph, source)
        if not any(same(leaf.view.base, source) for leaf in leaves(found.expression)):
            arguments = Arguments()
            value = arguments.loading(found.expression)
            covers = (*passed, *found.covers) or (call.var,)
            function_ = Fill((Part(out, value),), name="elementwise" if found.covers else "copy")
            return Kernel((Step(function_, tuple(arguments.bases), shape(call.var)),), covers)
    return Refusal("no-arithmetic", f"is no arithmetic that there are kernels for: {call.operator}")


def _joined(call: Call, profile: Profile) -> Kernel | Refusal:
    source, out, passed = destination(call.graph, call.var)
    joined = call.graph.call(source, "relax.concat")
    if joined is None:
        return Refusal("other-operator", "joins no tensors")
    fields = call.graph.value(joined.args[0]).fields
    if not all(map(is_float, fields)):
        return Refusal("dtype", "joins tensors that are not float32")
    arguments, parts, covers, begin = Arguments(), [], [*passed, source], 0
    axis = int(joined.attrs.axis) % len(shape(source))
    for tensor in fields:
        length = shape(tensor)[axis]
        if not length:  # a slice before the first token, where a model has no class token
            continue
        found = operand(call.graph, tensor)
        covers += found.covers
        parts.append(Part(out.narrow(axis, begin, length), arguments.loading(found.expression)))
        begin += length
    function_ = Fill(tuple(parts), name="concat")
    return Kernel((Step(function_, tuple(arguments.bases), shape(call.var)),), tuple(covers))


def padded(space: Shape, pads: Sequence[tuple[int, int]], value: Expression, border: float) -> tuple[Fill, Shape]:
    """The function that writes `value` (over `space`) with `border` around it, and the shape of what it writes."""
    whole = tuple(size + before + after for size, (before, after) in zip(space, pads, strict=True))
    inside, parts = contiguous(whole), []
    for axis, (before, after) in enumerate(pads):
        for begin, length in ((0, before), (inside.shape[axis] - after, after)):
            if length:
                parts.append(Part(inside.narrow(axis, begin, length), Number(border)))
        inside = inside.narrow(axis, before, space[axis])
    return Fill((*parts, Part(inside, value)), name="pad"), whole


def _padding(call: Call, profile: Profile) -> Kernel | Refusal:
    pad = call.graph.call(call.var, "relax.nn.pad")
    if pad is None or str(pad.attrs.pad_mode) != "constant":
        return Refusal("other-operator", "pads with no constant")
    widths = relax_graph.integers(pad.attrs.pad_width)
    pads = list(zip(widths[::2], widths[1::2], strict=True))
    if any(width < 0 for width in widths):
        return Refusal("padding", "pads by less than nothing")
    arguments = Arguments()
    found = operand(call.graph, pad.args[0])
    value = arguments.loading(found.expression)
    function_, _ = padded(shape(pad.args[0]), pads, value, float(pad.attrs.pad_value))
    step = Step(function_, tuple(arguments.bases), shape(call.var))
    return Kernel((step,), (call.var, *found.covers))


ARITHMETIC = Rule("elementwise", _arithmetic)
JOIN = Rule("concat", _joined)
PAD = Rule("pad", _padding)
