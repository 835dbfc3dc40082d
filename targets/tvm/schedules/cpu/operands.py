"""Operands of products as kernels read them: packed in panels, as they lie, or gathered, a panel by each task before
the rows go by: windows of an image, which are multiplied so without ever being written out whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import FIRST_CACHE, address, prefetch, scratch, steps
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Load
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, contiguous, unravel

ROWS_AHEAD = 8  # of a panel: so long before their turn are they asked for
READ_WEIGHT = 20  # multiply-adds that take as long as to read a weight from beyond the second cache (fitted by hand to
# channels of 16 to 512 and images of 7 to 112 on a Xeon with AVX-512)
FEWEST_LANES = 4  # that lie side by side in all rows of an image, so that copying is little beside multiplying
Row = Callable[[Position, int, int], Value]  # of a panel: its number, the first column, and how many


@dataclass(frozen=True)
class Panel:
    """Columns of a right operand that a tile goes over: their number, the first and how many, at `z` of the batch."""

    z: Sequence[Position]
    number: Position
    column: Position
    wide: int


class Right(Protocol):
    """A right operand [outer..., depth, columns]. Its last panel is `filled` up, or begins before its turn."""

    filled: ClassVar[bool]

    @property
    def argument(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def wide(self, tile: int, columns: int) -> int:
        """How many columns a panel has, for a tile of so many and a product of so many."""
        ...

    def rows(self, buffer: Any, panel: Panel, profile: Profile) -> Row:
        """How the rows of a panel are read."""
        ...


@dataclass(frozen=True)
class Panels:
    """An operand packed for tiles: [..., panels, depth, width], the last panel filled up.

    `layout` says where in the argument; its first axes are those of the batch.
    """

    filled: ClassVar[bool] = True
    argument: int
    layout: Layout

    @property
    def width(self) -> int:
        return self.layout.shape[-1]

    def wide(self, tile: int, columns: int) -> int:
        return self.width

    def rows(self, buffer: Any, panel: Panel, profile: Profile) -> Row:
        def row(k: Position, begin: int, lanes: int) -> Value:
            at = address(self.layout, (*panel.z, panel.number, k, begin))
            return vectors.load(buffer, at, lanes, dtype=profile.stored)

        return row


@dataclass(frozen=True)
class Lying:
    """A tensor [outer..., depth, columns] whose columns are neighbours."""

    filled: ClassVar[bool] = False
    argument: int
    layout: Layout

    def wide(self, tile: int, columns: int) -> int:
        return min(tile, columns)

    def rows(self, buffer: Any, panel: Panel, profile: Profile) -> Row:
        """Asked for before their turn: they lie so far apart that no processor looks ahead by itself."""

        def row(k: Position, begin: int, lanes: int) -> Value:
            at = address(self.layout, (*panel.z, k, panel.column + begin))
            if lanes > 1 and not profile.by_lane:
                prefetch(buffer, at + ROWS_AHEAD * self.layout.strides[-2], FIRST_CACHE)
            return vectors.load(buffer, at, lanes, dtype=profile.stored)

        return row


@dataclass(frozen=True)
class Gathered:
    """A tensor [outer..., depth..., columns...], where several axes may make the depth and the columns."""

    filled: ClassVar[bool] = False
    argument: int
    layout: Layout
    depth: Shape
    columns: Shape

    def wide(self, tile: int, columns: int) -> int:
        return min(tile, columns)

    def rows(self, buffer: Any, panel: Panel, profile: Profile) -> Row:
        """Those of a copy [depth, wide], made here, in vectors of a multiple of what lies side by side."""
        held = scratch(math.prod(self.depth) * panel.wide, profile.stored)
        with steps(math.prod(self.depth)) as step:
            for begin, lanes in pieces(panel.wide, min(profile.lanes, side_by_side(self.columns))):
                index = (*panel.z, *spread(step, self.depth), *spread(panel.column + begin, self.columns))
                at = address(self.layout, index)
                vector = vectors.load(buffer, at, lanes, self.layout.strides[-1], profile.stored)
                vectors.store(held, step * panel.wide + begin, vector, lanes)

        def row(k: Position, begin: int, lanes: int) -> Value:
            return vectors.load(held, k * panel.wide + begin, lanes, dtype=profile.stored)

        return row


def panel_shape(outer: Sequence[int], depth: int, columns: int, width: int) -> Shape:
    return (*outer, -(-columns // width), depth, width)


def panels(argument: int, outer: Sequence[int], depth: int, columns: int, width: int) -> Panels:
    return Panels(argument, contiguous(panel_shape(outer, depth, columns, width)))


def gathered(load: Load, lead: int, depth: int) -> Gathered:
    """A load over [outer..., depth..., columns...], of which `lead` axes are outer ones."""
    axes = load.layout.shape[lead:]
    cut = next(cut for cut in range(1, len(axes)) if math.prod(axes[:cut]) == depth)
    return Gathered(load.argument, load.layout, axes[:cut], axes[cut:])


def side_by_side(columns: Shape) -> int:
    """How many neighbours of the last axis, a power of two, are whole wherever so many columns begin."""
    return columns[-1] & -columns[-1] if len(columns) > 1 else 1 << columns[-1].bit_length()


def spread(flat: Position, shape: Shape) -> list[Position]:
    """The index on each axis."""
    return [flat] if len(shape) == 1 else [flat // step % size if size > 1 else 0 for step, size in unravel(shape)]
