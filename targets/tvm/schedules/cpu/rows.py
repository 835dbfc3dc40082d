"""Kernels that see whole rows: normalisation and softmax. A row is held in memory of the thread's own.

Vectors run along a row, or, where neighbours in memory belong to different rows, across several rows side by side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    across,
    along,
    each,
    evaluate,
    function,
    scratch,
    steps,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Expression, loads, ordered
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, unravel

NEGLIGIBLE = -80.0  # softmax: less than e^-80 of the largest is nothing, and no number near the denormal ones either
MOST_AT_ONCE = 4  # registers of sums side by side

Turn = Callable[[Value], Value]
Place = Callable[[list[Position]], Sequence[Position]]


@dataclass(frozen=True)
class Ends:
    """Where elements come from and where they go: `value`, `out` and `epilogue` over one index space."""

    value: Expression
    out: Layout
    epilogue: Expression
    buffers: Sequence[Any]

    def read(self, place: Sequence[Position], lanes: int) -> Value:
        return evaluate(self.value, self.buffers, place, lanes)

    def write(self, place: Sequence[Position], value: Value, lanes: int) -> None:
        write(self.epilogue, self.buffers, self.out, place, lanes, vectors.name(value))


class Line:
    """A row, or `wide` of them side by side; `place` gives the index of an element from its index in the row.

    What is one number a row (a mean, the largest) is a scalar where vectors run along the row, else a vector.
    """

    def __init__(
        self, ends: Ends, inner: Shape, place: Callable[[list[Position]], Sequence[Position]], wide: int
    ) -> None:
        self.ends, self.inner, self.place, self.wide = ends, inner, place, wide
        self.count = math.prod(inner)
        self.held = scratch(self.count * wide)

    def number(self, value: float) -> Value:
        """A number that is the same for every row."""
        return vectors.splat(value, self.wide)

    def like(self, number: Value, element: Value) -> Value:
        """A row's number in as many lanes as a vector of its elements has."""
        return vectors.splat(number, vectors.lanes_of(element)) if self.wide == 1 else number

    def fold(
        self, turn: Turn, start: float, combine: Callable[[Value, Value], Value], measure: Turn, *, first: bool = False
    ) -> Value:
        """Keep `turn` of each element in its place, and combine `measure` of that to a number for each row.

        The elements are read from the ends where this is the `first` time.
        """
        raise NotImplementedError

    def total(self, turn: Turn, measure: Turn = lambda x: x, *, first: bool = False) -> Value:
        """The sum of `measure`."""
        return self.fold(turn, 0.0, lambda one, other: one + other, measure, first=first)

    def write(self, turn: Turn) -> None:
        """Write `turn` of each element."""
        raise NotImplementedError

    def _element(self, index: list[Position], at: Position, lanes: int, first: bool) -> Value:
        found = self.ends.read(self.place(index), lanes) if first else vectors.load(self.held, at, lanes)
        return vectors.name(found)


class Along(Line):
    """One row: vectors of neighbours in it, `lanes` each."""

    def __init__(self, ends: Ends, inner: Shape, place: Place, lanes: int) -> None:
        super().__init__(ends, inner, place, 1)
        self.lanes = lanes

    def fold(
        self, turn: Turn, start: float, combine: Callable[[Value, Value], Value], measure: Turn, *, first: bool = False
    ) -> Value:
        def value(index: list[Position], at: Position, lanes: int) -> Value:
            turned = vectors.name(turn(self._element(index, at, lanes, first)))
            vectors.store(self.held, at, turned, lanes)
            return measure(turned)

        return fold(self.inner, self.lanes, value, start, combine)

    def write(self, turn: Turn) -> None:
        def visit(index: list[Position], at: Position, lanes: int) -> None:
            self.ends.write(self.place(index), turn(self._element(index, at, lanes, False)), lanes)

        along(self.inner, self.lanes, visit)


class Across(Line):
    """Rows side by side: a vector from each place in them."""

    def fold(
        self, turn: Turn, start: float, combine: Callable[[Value, Value], Value], measure: Turn, *, first: bool = False
    ) -> Value:
        sums = scratch(self.wide)
        vectors.store(sums, 0, self.number(start), self.wide)
        with steps(self.count) as flat:
            turned = vectors.name(turn(self._element(self._index(flat), flat * self.wide, self.wide, first)))
            vectors.store(self.held, flat * self.wide, turned, self.wide)
            vectors.store(sums, 0, combine(vectors.load(sums, 0, self.wide), measure(turned)), self.wide)
        return vectors.name(vectors.load(sums, 0, self.wide))

    def write(self, turn: Turn) -> None:
        with steps(self.count) as flat:
            index = self._index(flat)
            element = self._element(index, flat * self.wide, self.wide, False)
            self.ends.write(self.place(index), turn(element), self.wide)

    def _index(self, flat: Position) -> list[Position]:
        return [flat // step % size if size > 1 else 0 for step, size in unravel(self.inner)]


def on_rows(
    kernel: "Normalise | Softmax", rank: int, arguments: Sequence[Argument], lanes: int, work: Callable[[Line], Turn]
) -> Any:
    """The function of a kernel on rows, which are the last `rank` axes: it writes what `work` makes of each element.

    `work` sees a line, folds it, and gives what becomes of its elements.
    """
    axes = len(kernel.out.shape)
    aside = _neighbours(kernel.value, rank)
    order = list(range(axes))
    if aside is not None:
        order.append(order.pop(aside))
    value, epilogue = ordered(kernel.value, order), ordered(kernel.epilogue, order)
    out = kernel.out.permute(order)
    inner = kernel.out.shape[axes - rank :]

    def body(*buffers: Any) -> None:
        ends = Ends(value, out, epilogue, buffers)
        if aside is None:
            with each(out.shape[: axes - rank], out.size) as z:
                row = Along(ends, inner, lambda index: (*z, *index), lanes)
                row.write(work(row))
            return
        lead = out.shape[: axes - rank - 1]
        for begin, wide, count in _blocks(out.shape[-1], lanes):
            with each((*lead, count), out.size) as (*z, block):
                beside = begin + block * wide
                rows = Across(ends, inner, lambda index, z=z, beside=beside: (*z, *index, beside), wide)  # type: ignore[misc]
                rows.write(work(rows))

    return function(arguments, body)


def _neighbours(value: Expression, rank: int) -> int | None:
    """The axis before the row on which a value's neighbours lie, where it is not one of the row's own."""
    read = [load.layout for load in loads(value)]
    rows = len(read[0].shape) - rank if read else 0
    if not read or any(layout.strides[axis] == 1 for layout in read for axis in range(rows, len(layout.shape))):
        return None
    beside = [axis for axis in range(rows) if read[0].shape[axis] > 1 and read[0].strides[axis] == 1]
    return beside[0] if beside else None


def _blocks(length: int, lanes: int) -> list[tuple[int, int, int]]:
    """`length` rows as blocks (begin, rows of each, how many): of two vectors first, then narrower ones."""
    wide = 2 * lanes
    found = [(0, wide, length // wide)] if length >= wide else []
    done = length // wide * wide
    return found + [(done + begin, narrower, 1) for begin, narrower in pieces(length - done, lanes)]


@dataclass(frozen=True)
class Normalise:
    """out = epilogue(x / sqrt(mean(x^2) + epsilon)) over the last `rank` axes, x less its mean first where `centred`.

    `value` is x; it, `out` and the epilogue's loads have the same shape.
    """

    rank: int
    centred: bool
    epsilon: float
    value: Expression
    out: Layout
    epilogue: Expression
    name: str = "normalise"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return on_rows(self, self.rank, arguments, profile.lanes, self.work)

    def work(self, line: Line) -> Turn:
        count = line.number(float(line.count))
        if self.centred:
            mean = vectors.name(line.total(lambda x: x, first=True) / count)
            squares = line.total(lambda x: x - line.like(mean, x), lambda x: x * x)
        else:
            squares = line.total(lambda x: x, lambda x: x * x, first=True)
        variance = vectors.name(squares / count + line.number(self.epsilon))
        factor = vectors.name(vectors.OPERATIONS["rsqrt"](variance))
        return lambda x: x * line.like(factor, x)


@dataclass(frozen=True)
class Softmax:
    """out = epilogue(softmax of value along the last axis); all of the same shape."""

    value: Expression
    out: Layout
    epilogue: Expression
    name: str = "softmax"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return on_rows(self, 1, arguments, profile.lanes, self.work)

    def work(self, line: Line) -> Turn:
        largest = line.fold(lambda x: x, -math.inf, vectors.maximum, lambda x: x, first=True)
        total = line.total(lambda x: vectors.falling_exp(vectors.name(x - line.like(largest, x)), NEGLIGIBLE))
        share = vectors.name(line.number(1.0) / total)
        return lambda power: power * line.like(share, power)


def total(shape: Sequence[int], lanes: int, value: Callable[[list[Position], Position, int], Value]) -> Value:
    """The sum of `value` along a row."""
    return fold(shape, lanes, value, 0.0, lambda one, other: one + other)


def fold(
    shape: Sequence[int],
    lanes: int,
    value: Callable[[list[Position], Position, int], Value],
    start: float,
    combine: Callable[[Value, Value], Value],
) -> Value:
    """`value` at each place of a row, visited by vectors, combined to one number."""
    wide = MOST_AT_ONCE
    while wide > 1 and shape[-1] < lanes * wide:
        wide //= 2
    held = scratch(lanes * wide)
    vectors.store(held, 0, vectors.splat(start, lanes * wide), lanes * wide)

    def visit(index: list[Position], at: Position, count: int) -> None:
        found = vectors.name(value(index, at, count))
        vectors.store(held, 0, combine(vectors.load(held, 0, count), found), count)

    along(shape, lanes, visit, wide)
    return across(vectors.load(held, 0, lanes * wide), lanes * wide, combine)
