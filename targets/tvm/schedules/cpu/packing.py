"""Operands of products rearranged so that a tile reads its columns one row of vectors after the other."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import address, by_pairs, each, evaluate, function, steps, when
from attnrewrite.targets.tvm.schedules.cpu.operands import panel_shape
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Expression, loads, ordered
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, contiguous


@dataclass(frozen=True)
class Pack:
    """Panels [outer..., panels, depth, width] of a computed operand, `value` over [outer..., depth, columns].

    Where `shared`, the last panel ends with the last column, and has some of those before it, too; else it is filled up
    with that column.
    """

    outer: Shape
    depth: int
    columns: int
    width: int
    value: Expression
    shared: bool = False
    name: str = "pack"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        out = contiguous(panel_shape(self.outer, self.depth, self.columns, self.width))
        count = out.shape[-3]
        rest = 0 if self.shared else self.columns % self.width

        def body(*buffers: Any) -> None:
            write = _Writer(self, buffers, profile, out)
            # In the order of what is read: by the thread that wrote it, then.
            with each((*self.outer, count), out.size, self._strides()) as (*z, panel):
                write.z, write.panel = z, panel
                if self.shared:
                    write.first = vectors.name(tirx.min(panel * self.width, self.columns - self.width))
                else:
                    write.first = panel * self.width
                full = write.turned if _along_depth(self.value) else write.straight
                when(
                    panel < count - 1, full, write.filled
                ) if rest and count > 1 else write.filled() if rest else full()

        return function(arguments, body)

    def _strides(self) -> Sequence[int] | None:
        """How far apart the first tensor that is read lies from one panel to the next on each axis, if one is."""
        read = next(loads(self.value), None)
        return None if read is None else (*read.layout.strides[:-2], read.layout.strides[-1] * self.width)


def _along_depth(value: Expression) -> bool:
    """Whether the numbers that are neighbours in memory are of one column."""
    strides = [load.layout.strides for load in loads(value)]
    return any(each[-2] == 1 for each in strides) and not any(each[-1] == 1 for each in strides)


class _Writer:
    """The statements for a panel, from its `first` column on."""

    z: Sequence[Position]
    panel: Position
    first: Position

    def __init__(self, pack: Pack, buffers: Sequence[Any], profile: Profile, out: Layout) -> None:
        self.pack, self.buffers, self.profile, self.out = pack, buffers, profile, out
        axes = len(pack.outer)
        self.columnwise = ordered(pack.value, (*range(axes), axes + 1, axes))

    def straight(self) -> None:
        """Vectors of a row's neighbours."""

        def line(row: Position) -> None:
            for begin, lanes in pieces(self.pack.width, self.profile.lanes):
                vector = self.evaluate(self.pack.value, row, self.first + begin, lanes)
                self.store(row, begin, vector, lanes)

        by_pairs(self.pack.depth, line)

    def turned(self, filled: bool = False) -> None:
        """Vectors of a column's neighbours, as many as they have lanes, transposed; the last column again beyond it."""

        def column(at: int) -> Position:
            return tirx.min(self.first + at, self.pack.columns - 1) if filled else self.first + at

        for lanes, group in itertools.groupby(pieces(self.pack.width, self.profile.lanes), lambda piece: piece[1]):
            begins = [begin for begin, _ in group]
            whole = self.pack.depth - self.pack.depth % lanes
            if whole:
                with steps(whole // lanes) as block:
                    for begin in begins:
                        self.square(block * lanes, begin, lanes, column)
            for row, begin, at in itertools.product(range(whole, self.pack.depth), begins, range(lanes)):
                number = self.evaluate(self.pack.value, row, column(begin + at), 1)
                self.store(row, begin + at, number, 1)

    def square(self, row: Position, begin: int, lanes: int, column: Callable[[int], Position]) -> None:
        columns = [self.evaluate(self.columnwise, column(begin + at), row, lanes) for at in range(lanes)]
        for number, vector in enumerate(vectors.transposed(columns)):
            self.store(row + number, begin, vector, lanes)

    def filled(self) -> None:
        """Number by number, the last column again and again beyond it."""
        with steps(self.pack.depth) as row, steps(self.pack.width) as column:
            at = tirx.min(self.first + column, self.pack.columns - 1)
            self.store(row, column, self.evaluate(self.pack.value, row, at, 1), 1)

    def evaluate(self, value: Expression, row: Position, column: Position, lanes: int) -> Value:
        written = str(self.buffers[-1].dtype)
        return evaluate(value, self.buffers, (*self.z, row, column), lanes, dtype=written)

    def store(self, row: Position, begin: Position, value: Value, lanes: int) -> None:
        at = address(self.out, (*self.z, self.panel, row, begin))
        vectors.store(self.buffers[-1], at, value, lanes)


def rounded(constant: np.ndarray, dtype: str) -> np.ndarray:
    """A constant operand in the type of products; infinite beyond that, which the check of the result finds."""
    with np.errstate(over="ignore"):
        return constant.astype(dtype)


def packed(weight: np.ndarray, width: int, shared: bool = False) -> np.ndarray:
    """A constant operand [..., depth, columns] as panels of its type, filled up with zeros, or `shared` as in Pack."""
    *outer, depth, columns = weight.shape
    count = -(-columns // width)
    if shared:
        begins = np.minimum(np.arange(count) * width, columns - width)
        parts = weight[..., begins[:, None] + np.arange(width)]
    else:
        filled = np.zeros((*outer, depth, count * width), weight.dtype)
        filled[..., :columns] = weight
        parts = filled.reshape(*outer, depth, count, width)
    return np.ascontiguousarray(np.moveaxis(parts, -2, -3))
