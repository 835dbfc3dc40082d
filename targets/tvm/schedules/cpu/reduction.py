"""Sums, means and extremes along axes, and pooling, which is one along the axes of a window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from tvm import tirx

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly, scaled
from attnrewrite.targets.tvm.schedules.cpu.elementwise import Fill, Part
from attnrewrite.targets.tvm.schedules.cpu.function import along, each, evaluate, function, scratch, steps, write
from attnrewrite.targets.tvm.schedules.cpu.rows import fold
from attnrewrite.targets.tvm.schedules.cpu.vectors import OPERATIONS, Position, Value
from attnrewrite.targets.tvm.schedules.cpu.windows import Windows, pair, sides
from attnrewrite.targets.tvm.schedules.expression import (
    Apply,
    Arguments,
    Expression,
    Leaf,
    Result,
    loads,
    moved,
    ordered,
    substituted,
)
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument, Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import operand, trace
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous, unravel

STARTS = {"add": 0.0, "maximum": -math.inf, "minimum": math.inf}
KINDS = {"relax.sum": "add", "relax.mean": "add", "relax.max": "maximum", "relax.min": "minimum"}
POOLS = {"relax.nn.max_pool2d": "maximum", "relax.nn.avg_pool2d": "add"}
SIDE_BY_SIDE = 8  # vectors of sums, so that a loop over what is reduced has much to do in a turn
MOST_TAPS = 49  # elements of a pooling window that are written out one after the other


@dataclass(frozen=True)
class Reduce:
    """out = epilogue(value combined along its last `rank` axes); `out` and the epilogue have the axes before those."""

    rank: int
    operation: str
    value: Expression
    space: Shape
    out: Layout
    epilogue: Expression
    name: str = "reduce"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        along_rows = self._short_rows if self._is_square(profile.lanes) else self._rows
        reader = along_rows if self._has_rows() else self._columns
        return function(arguments, lambda *buffers: reader(buffers, profile.lanes))

    def _has_rows(self) -> bool:
        """Whether neighbours are combined: not where only some of what is read lies so, and all of it the other way."""
        strides = {load.layout.strides[-1] for load in loads(self.value)}
        kept = {load.layout.strides[-1 - self.rank] for load in loads(self.value)}
        return 1 in strides and (strides <= {0, 1} or not kept <= {0, 1})

    def _is_square(self, lanes: int) -> bool:
        """Whether there are as many rows as one has elements, which are few enough for a vector, and can be halved."""
        count, beside = self.space[-1], self.out.shape[-1]
        return self.rank == 1 and 1 < count <= min(lanes, beside) and count.bit_count() == 1

    def _short_rows(self, buffers: Sequence[Any], lanes: int) -> None:
        """As many rows as one has elements, a vector each, are transposed: elements are combined side by side."""
        *outer, length = self.out.shape
        count = self.space[-1]
        with each((*outer, -(-length // count)), math.prod(self.space)) as (*z, block):
            first = vectors.name(tirx.min(block * count, length - count))
            rows = [evaluate(self.value, buffers, (*z, first + at, 0), count) for at in range(count)]
            self._put(buffers, (*z, first), count, reduce(OPERATIONS[self.operation], vectors.transposed(rows)))

    def _rows(self, buffers: Sequence[Any], lanes: int) -> None:
        """Neighbours are combined with each other: vectors run along the reduced axes."""
        with each(self.out.shape, math.prod(self.space)) as z:

            def read(index: list[Position], _: Position, count: int) -> Value:
                return evaluate(self.value, buffers, (*z, *index), count)

            start, combine = STARTS[self.operation], OPERATIONS[self.operation]
            self._put(buffers, z, 1, fold(self.space[-self.rank :], lanes, read, start, combine))

    def _columns(self, buffers: Sequence[Any], lanes: int) -> None:
        """Neighbours go side by side: vectors run along the last axis that stays."""
        *outer, length = self.out.shape
        inner = self.space[-self.rank :]
        read = moved(self.value, self._kept_last)
        assert read is not None

        with each(outer, math.prod(self.space)) as z:

            def visit(index: list[Position], _: Position, count: int) -> None:
                sums = scratch(count)
                vectors.store(sums, 0, vectors.splat(STARTS[self.operation], count), count)
                with steps(math.prod(inner)) as flat:
                    at = [flat // step % size if size > 1 else 0 for step, size in unravel(inner)]
                    value = evaluate(read, buffers, (*z, *at, *index), count)
                    combined = OPERATIONS[self.operation](vectors.load(sums, 0, count), value)
                    vectors.store(sums, 0, combined, count)
                self._put(buffers, (*z, *index), count, vectors.name(vectors.load(sums, 0, count)))

            along((length,), lanes, visit, SIDE_BY_SIDE)

    def _kept_last(self, layout: Layout) -> Layout:
        """The reduced axes before the last one that stays."""
        rank = len(layout.shape)
        kept = rank - self.rank - 1
        return layout.permute((*range(kept), *range(kept + 1, rank), kept))

    def _put(self, buffers: Sequence[Any], index: Sequence[Position], lanes: int, value: Value) -> None:
        write(self.epilogue, buffers, self.out, index, lanes, value)


def _reduce(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, tuple(KINDS))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    space = shape(node.args[0])
    given = node.attrs.axis
    axes = sorted(range(len(space)) if given is None else {axis % len(space) for axis in relax_graph.integers(given)})
    kept = [axis for axis in range(len(space)) if axis not in axes]
    if not axes or not kept:
        return Refusal("axes", "reduces all axes or none")
    found = operand(call.graph, node.args[0])
    arguments = Arguments()
    order = (*kept, *axes)
    value = ordered(arguments.loading(found.expression), order)
    lengths = tuple(space[axis] for axis in order)

    def without_reduced(layout: Layout) -> Layout | None:
        return layout.reshape(lengths[: len(kept)])

    out, epilogue = without_reduced(traced.out), moved(traced.epilogue, without_reduced)
    if out is None or epilogue is None:
        return Refusal("layout", "writes or reads beside a reduction what no strides describe")
    if node.op.name == "relax.mean":
        epilogue = scaled(epilogue, 1 / math.prod(space[axis] for axis in axes))
    after = arguments.loading(epilogue)
    assembly = Assembly((*traced.covers, *found.covers))
    kernel = Reduce(len(axes), KINDS[node.op.name], value, lengths, out, after)
    assembly.add(kernel, arguments.bases, shape(call.var))
    return assembly.kernel()


def _pool(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, tuple(POOLS))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    attributes, operation = node.attrs, POOLS[node.op.name]
    padding = sides(attributes.padding)
    if str(attributes.layout) != "NCHW":
        return Refusal("layout", f"pools in the layout {attributes.layout}")
    windows = Windows(pair(attributes.pool_size), pair(attributes.strides), pair(attributes.dilation), padding)
    *_, height, width = out = shape(traced.anchor)
    space = shape(node.args[0])
    found = operand(call.graph, node.args[0])
    assembly = Assembly((*traced.covers, *found.covers))
    border = -math.inf if operation == "maximum" else 0.0
    image = windows.image(assembly, found.expression, space, (height, width), border)
    seen = windows.over(image.layout, (height, width)).permute((0, 1, 4, 5, 2, 3))
    epilogue = traced.epilogue
    if operation == "add":
        counts = windows.counts((space[2], space[3]), (height, width), bool(attributes.count_include_pad))
        epilogue = _shared(epilogue, counts, out)
    arguments = Arguments()
    kernel: Reduce | Fill
    if math.prod(windows.size) > MOST_TAPS:
        value = arguments.load(View(image.base, seen))
        kernel = Reduce(2, operation, value, seen.shape, traced.out, arguments.loading(epilogue), name="pool")
    else:
        taps: list[Expression] = [
            Leaf(View(image.base, Layout(out, at.strides[:4], at.offset)))
            for row, column in np.ndindex(*windows.size)
            for at in (seen.narrow(4, row, 1).narrow(5, column, 1),)
        ]
        together = reduce(lambda one, other: Apply(operation, (one, other)), taps)
        kernel = Fill((Part(traced.out, arguments.loading(substituted(epilogue, together))),), name="pool")
    assembly.add(kernel, arguments.bases, shape(call.var))
    return assembly.kernel()


def _shared(epilogue: Expression, counts: np.ndarray, out: Shape) -> Expression:
    """An epilogue whose result is divided first by a number that may differ by place, over the last axes of `out`."""
    if counts.min() == counts.max():
        return scaled(epilogue, 1 / float(counts.flat[0]))
    share = Leaf(View((1 / np.maximum(counts, 1)).astype(np.float32), contiguous(counts.shape).expand(out)))
    return substituted(epilogue, Apply("multiply", (Result(), share)))


REDUCTION = Rule("reduction", _reduce)
POOL = Rule("pool", _pool)
