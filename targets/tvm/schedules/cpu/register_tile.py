"""A block of sums in registers, which all products are made of: rows of one operand times columns of another.

Step by step through the depth, a column of the left operand is multiplied with a row of vectors of the right one.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import scratch, steps
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile, Tile
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, contiguous

TURNS = 2  # loads of multipliers in a turn of the loop
IN_A_ROW = 64  # products summed in float16 before the sum is added to one in float32
LOADS_HIDDEN = 16  # of so many loads beside multiply-adds, one is reckoned to cost a cycle
LATENCY = 8  # multiply-adds that a core has in flight: fewer sums leave it waiting


@dataclass(frozen=True)
class Panels:
    """A right operand packed for tiles: [..., panels, depth, width], the last panel filled up.

    `layout` says where in the argument; its first axes are those of the batch.
    """

    argument: int
    layout: Layout

    @property
    def width(self) -> int:
        return self.layout.shape[-1]


@dataclass(frozen=True)
class Band:
    """Neighbouring columns of a product that tiles of one kind go over."""

    first: int
    columns: int
    tile: Tile


def panel_shape(outer: Sequence[int], depth: int, columns: int, width: int) -> Shape:
    return (*outer, -(-columns // width), depth, width)


def panels(argument: int, outer: Sequence[int], depth: int, columns: int, width: int) -> Panels:
    return Panels(argument, contiguous(panel_shape(outer, depth, columns, width)))


class RegisterTile:
    """Sums of `rows` x the columns of `pieces`, vectors (first column, lanes) that may share columns.

    Products are of the profile's stored type. Where that is float16, so are the sums in registers, of so many products
    at a time that rounding them costs little (IN_A_ROW), and the sums of those sums are of float32.
    """

    def __init__(self, rows: int, pieces: Sequence[tuple[int, int]], profile: Profile) -> None:
        self.rows, self.pieces, self.lanes, self.dtype = rows, pieces, profile.stored_lanes, profile.stored
        ends = list(itertools.accumulate(lanes for _, lanes in pieces))
        self.columns = ends[-1]  # of sums, where shared ones count twice
        self.vectors = [(end - lanes, lanes) for end, (_, lanes) in zip(ends, pieces, strict=True)]
        self.sums = scratch(rows * self.columns, self.dtype)
        self.total = self.sums

    def value(self, row: int, begin: int, lanes: int) -> Value:
        return vectors.load(self.total, row * self.columns + begin, lanes)

    def spilled(self) -> Any:
        """The sums in memory: a loop over rows can read them there, where registers have no number."""
        wide = sum(self.pieces[-1])
        memory = scratch(self.rows * wide)
        for row in range(self.rows):
            for (column, lanes), (begin, _) in zip(self.pieces, self.vectors, strict=True):
                vectors.store(memory, row * wide + column, self.value(row, begin, lanes), lanes)
        return memory

    def _clear(self, sums: Any) -> None:
        for row in range(self.rows):
            for begin, lanes in self.vectors:
                vectors.store(sums, row * self.columns + begin, vectors.splat(0.0, lanes), lanes)

    def add(self, multipliers: Sequence[Value], multiplicands: Callable[[int, int], Value]) -> None:
        """One step: `multipliers` are a number for each row, `multiplicands(begin, lanes)` a vector of the row."""
        loaded = [vectors.name(multiplicands(column, lanes)) for column, lanes in self.pieces]
        for row, multiplier in enumerate(multipliers):
            for (begin, lanes), vector in zip(self.vectors, loaded, strict=True):
                product = vectors.splat(multiplier, lanes) * vector
                at = row * self.columns + begin
                vectors.store(self.sums, at, vectors.load(self.sums, at, lanes, dtype=self.dtype) + product, lanes)

    def multiply(
        self,
        depth: int,
        left: Callable[[int, Position, int], Value],
        right: Callable[[Position, int, int], Value],
        by_lane: bool,
    ) -> None:
        """Sum the products of all steps. `left(row, step, n)` gives n neighbouring multipliers of a row as a vector,
        `right(step, begin, lanes)` multiplicands. `by_lane`: several steps' multipliers are loaded at once.
        """
        parts = 1 if self.dtype == FLOAT32 else -(-depth // IN_A_ROW)
        if parts == 1:
            self._part(0, depth, left, right, by_lane)
            return
        self.total = scratch(self.rows * self.columns)
        self._clear(self.total)
        whole = TURNS * self.lanes
        length = -(-depth // (parts * whole)) * whole
        with steps(depth // length) as part:
            self._part(part * length, length, left, right, by_lane)
            self._add_up()
        if depth % length:
            self._part(depth - depth % length, depth % length, left, right, by_lane)
            self._add_up()

    def _add_up(self) -> None:
        for row in range(self.rows):
            for begin, lanes in self.vectors:
                at = row * self.columns + begin
                vectors.store(self.total, at, self.value(row, begin, lanes) + vectors.load(self.sums, at, lanes), lanes)

    def _part(
        self,
        first: Position,
        depth: int,
        left: Callable[[int, Position, int], Value],
        right: Callable[[Position, int, int], Value],
        by_lane: bool,
    ) -> None:
        """The sums of `depth` products from the `first` on, in registers."""
        self._clear(self.sums)
        at_once = self.lanes if by_lane else 1
        turns = TURNS if by_lane and depth % (TURNS * at_once) == 0 else 1
        with steps(depth // (turns * at_once)) as chunk:
            for turn in range(turns):
                self._several(at_once, first + (chunk * turns + turn) * at_once, left, right)
        if depth % at_once:
            for step in range(depth - depth % at_once, depth):
                self._several(1, first + step, left, right)

    def _several(
        self,
        count: int,
        first: Position,
        left: Callable[[int, Position, int], Value],
        right: Callable[[Position, int, int], Value],
    ) -> None:
        if count == 1:
            self.add([left(row, first, 1) for row in range(self.rows)], lambda *at: right(first, *at))
            return
        held = [vectors.name(left(row, first, count)) for row in range(self.rows)]
        for step in range(count):
            self.add([vectors.lane(each, step) for each in held], lambda *at, step=step: right(first + step, *at))  # type: ignore[misc]


def best_tile(profile: Profile, rows: int, columns: int) -> Tile:
    """The tile of a profile that does a product of so many rows and columns in the fewest cycles."""
    return best_tiles(profile, rows, (columns, 1))[0]


def best_bands(profile: Profile, rows: int, columns: int) -> tuple[Band, ...]:
    """The columns of a product as what full tiles take and, where that is done in fewer cycles, a rest with its own."""

    def cut(first: int) -> tuple[Band, ...]:
        # Less than a vector costs as much as one: a rest that is less shares columns with what is before it.
        rest = max(columns - first, min(columns, profile.stored_lanes)) if first < columns else 0
        parts = ((0, first), (columns - rest, rest))
        return tuple(Band(begin, count, best_tile(profile, rows, count)) for begin, count in parts if count)

    def cycles(bands: Sequence[Band]) -> float:
        return sum(_cycles(profile, band.tile, rows, band.columns) for band in bands)

    return min(map(cut, {0} | {columns - columns % tile.columns for tile in profile.tiles}), key=cycles)


def best_tiles(profile: Profile, rows: int, *products: tuple[int, int]) -> tuple[Tile, ...]:
    """The tiles, all of as many rows, that do products of so many (columns, depth) in the fewest cycles together."""

    def cycles(tile: Tile, columns: int, depth: int) -> float:
        return depth * _cycles(profile, tile, rows, columns)

    def choice(high: int) -> tuple[float, tuple[Tile, ...]]:
        cut = [Tile(high, tile.columns) for tile in profile.tiles if tile.rows >= high]
        best = [min(cut, key=lambda tile, of=product: cycles(tile, *of)) for product in products]  # type: ignore[misc]
        return sum(cycles(tile, *product) for tile, product in zip(best, products, strict=True)), tuple(best)

    highest = min(rows, max(tile.rows for tile in profile.tiles))
    return min(map(choice, range(highest, 0, -1)), key=lambda found: found[0])[1]


def _cycles(profile: Profile, tile: Tile, rows: int, columns: int) -> float:
    """Cycles of a product of depth 1."""
    return math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) * _step(profile, tile)


def _step(profile: Profile, tile: Tile) -> float:
    """Cycles of a tile's step, by what limits it: multiply-adds, loads, or the time until a sum is ready for the next.

    Where multipliers are lanes, loads are few, and what counts is how many instructions there are. Elsewhere loads take
    their turns beside multiply-adds: of tiles that do the same, that with fewer of them is the better.
    """
    wide = -(-tile.columns // profile.stored_lanes)
    if profile.by_lane:
        return max(tile.rows * (wide + 1 / profile.stored_lanes) + wide / 2, LATENCY)
    loads = tile.rows + wide
    return max(tile.rows * wide, loads, LATENCY) + loads / LOADS_HIDDEN
