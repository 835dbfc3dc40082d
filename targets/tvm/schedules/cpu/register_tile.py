"""A block of sums in registers, which all products are made of: rows of one operand times columns of another.

Step by step through the depth, a column of the left operand is multiplied with a row of vectors of the right one.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import scratch, steps, when
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile, Tile

TURNS = 2  # loads of multipliers in a turn of the loop
UNROLLED = 16  # steps in a turn of the loop, where multipliers are packed
IN_A_ROW = 96  # products summed in float16 before the sum is added to one in float32
LOADS_HIDDEN = 16  # of so many loads beside multiply-adds, one is reckoned to cost a cycle
LOOP = 0.5  # cycles that a step takes for the loop around it
PACKING = 1  # cycles for a number of a left operand
LATENCY = 8  # multiply-adds that a core has in flight: fewer sums leave it waiting
Column = Callable[[int, int], Value]  # of multipliers: those of n rows from one on
Start = Callable[[int, int, int], Value]  # of a vector of sums, by its row, first column and lanes


@dataclass(frozen=True)
class Band:
    """Neighbouring columns of a product that tiles of one kind go over.

    The last `beside` of them, which would fill no vector, are summed in vectors of a packed left operand's rows, beside
    a single tile that takes all others.
    """

    first: int
    columns: int
    tile: Tile
    beside: int = 0


class RegisterTile:
    """Sums of `rows` x the columns of `pieces`, vectors (first column, lanes) that may share columns; and of `beside`
    columns more, in vectors of rows.

    Products are of the profile's stored type. Where that is float16, so are the sums in registers, of so many products
    at a time that rounding them costs little (IN_A_ROW), and the sums of those sums are of float32.
    """

    def __init__(self, rows: int, pieces: Sequence[tuple[int, int]], profile: Profile, beside: int = 0) -> None:
        self.rows, self.pieces, self.lanes, self.dtype = rows, pieces, profile.stored_lanes, profile.stored
        ends = list(itertools.accumulate(lanes for _, lanes in pieces))
        self.columns = ends[-1]  # of sums, where shared ones count twice
        self.vectors = [(end - lanes, lanes) for end, (_, lanes) in zip(ends, pieces, strict=True)]
        self.sums = scratch(rows * self.columns, self.dtype)
        self.total = self.sums
        self.wide = sum(pieces[-1])
        self.upright = [(at, *piece) for at in range(beside) for piece in vectors.pieces(rows, self.lanes)]
        self.beside = scratch(rows * beside) if beside else None

    def value(self, row: int, begin: int, lanes: int, dtype: str = FLOAT32) -> Value:
        return vectors.load(self.total, row * self.columns + begin, lanes, dtype=dtype)

    def spilled(self) -> Any:
        """The sums in memory: a loop over rows can read them there, where registers have no number."""
        if self.total is not self.sums and self.columns == self.wide:
            return self.total  # too many for registers
        wide = self.wide + len({at for at, *_ in self.upright})
        memory = scratch(self.rows * wide)
        for row in range(self.rows):
            for (column, lanes), (begin, _) in zip(self.pieces, self.vectors, strict=True):
                vectors.store(memory, row * wide + column, self.value(row, begin, lanes), lanes)
        for at, row, lanes in self.upright:
            sums = vectors.load(self.beside, at * self.rows + row, lanes)
            vectors.store(memory, row * wide + self.wide + at, sums, lanes, wide)
        return memory

    def begin(self, start: Start) -> None:
        """Let sums of float32 begin with what `start` gives."""
        for row in range(self.rows):
            for begin, lanes in self.vectors:
                vectors.store(self.sums, row * self.columns + begin, start(row, begin, lanes), lanes)

    def plus(self, other: Start) -> None:
        """Add what `other` gives to sums of float32."""
        self.begin(lambda row, begin, lanes: self.value(row, begin, lanes) + other(row, begin, lanes))

    def _clear(self) -> None:
        for row in range(self.rows):
            for begin, lanes in self.vectors:
                vectors.store(self.sums, row * self.columns + begin, vectors.splat(0.0, lanes), lanes)

    def add(
        self, multipliers: Sequence[Value], multiplicands: Callable[[int, int], Value], column: "Column | None" = None
    ) -> None:
        """One step: `multipliers` are a number for each row, `multiplicands(begin, lanes)` a vector of the row.

        `column(begin, lanes)` has the multipliers as vectors, for columns that are summed along the rows.
        """
        loaded = [vectors.name(multiplicands(column, lanes)) for column, lanes in self.pieces]
        for row, multiplier in enumerate(multipliers):
            for (begin, lanes), vector in zip(self.vectors, loaded, strict=True):
                product = vectors.splat(multiplier, lanes) * vector
                at = row * self.columns + begin
                vectors.store(self.sums, at, vectors.load(self.sums, at, lanes, dtype=self.dtype) + product, lanes)
        for number, begin, lanes in self.upright:
            assert column is not None
            product = column(begin, lanes) * vectors.splat(multiplicands(self.wide + number, 1), lanes)
            at = number * self.rows + begin
            vectors.store(self.beside, at, vectors.load(self.beside, at, lanes) + product, lanes)

    def multiply(self, depth: int, left: "Multipliers", right: Callable[[Position, int, int], Value]) -> None:
        """Sum the products of all steps; `right(step, begin, lanes)` gives multiplicands."""
        parts = parts_of(self.dtype, depth)
        if parts == 1:
            self._part(0, depth, left, right)
            return
        self.total = scratch(self.rows * self.columns)
        length = -(-depth // (parts * left.in_turn)) * left.in_turn
        begin, add = (lambda: self._take(lambda _, sums: sums)), (lambda: self._take(lambda total, sums: total + sums))
        with steps(depth // length) as part:
            self._part(part * length, length, left, right)
            begin() if depth < 2 * length else when(part == 0, begin, add)
        if depth % length:
            self._part(depth - depth % length, depth % length, left, right)
            add()

    def _take(self, both: Callable[[Value, Value], Value]) -> None:
        """Let the total be what `both` makes of it and of the sums in registers."""
        for row in range(self.rows):
            for begin, lanes in self.vectors:
                at = row * self.columns + begin
                sums = vectors.load(self.sums, at, lanes)
                vectors.store(self.total, at, both(self.value(row, begin, lanes), sums), lanes)

    def _part(
        self, first: Position, depth: int, left: "Multipliers", right: Callable[[Position, int, int], Value]
    ) -> None:
        """The sums of `depth` products from the `first` on, in registers."""
        self._clear()
        for at, row, lanes in self.upright:
            vectors.store(self.beside, at * self.rows + row, vectors.splat(0.0, lanes), lanes)
        self.accumulate(first, depth, left, right)

    def accumulate(
        self, first: Position, depth: int, left: "Multipliers", right: Callable[[Position, int, int], Value]
    ) -> None:
        """Add `depth` products from the `first` on to the sums in registers."""
        turn, done = left.in_turn, depth - depth % left.in_turn
        if done:
            with steps(depth // turn) as chunk:
                for begin in range(0, turn, left.at_once):
                    self._several(first + (chunk * turn + begin), left.at_once, left, right)
        while done < depth:
            count = left.at_once if left.at_once <= depth - done else 1
            self._several(first + done, count, left, right)
            done += count

    def _several(
        self, first: Position, count: int, left: "Multipliers", right: Callable[[Position, int, int], Value]
    ) -> None:
        for step, multipliers in enumerate(left.take(first, count)):
            column = left.column and functools.partial(left.column, first + step)
            self.add(multipliers, functools.partial(right, first + step), column)


def parts_of(dtype: str, depth: int) -> int:
    """As how many sums so many products of a type are summed, whose own sum is of float32."""
    return 1 if dtype == FLOAT32 else -(-depth // IN_A_ROW)


@dataclass(frozen=True)
class Multipliers:
    """A number for each row in every step: `take(first, count)` gives those of so many steps, `at_once` at best.

    `in_turn` steps are written out in a turn of the loop. `column(step, begin, n)` gives those of n rows as a vector,
    where they are neighbours.
    """

    take: Callable[[Position, int], Sequence[Sequence[Value]]]
    at_once: int
    in_turn: int
    column: Callable[[Position, int, int], Value] | None = None


def along_rows(rows: int, load: Callable[[int, Position, int], Value], profile: Profile, by_lane: bool) -> Multipliers:
    """Those of a matrix as it lies: `load(row, step, n)` gives n neighbouring steps of a row as a vector.

    `by_lane`: several steps are loaded at once, where each product takes its multiplier from any lane.
    """

    def take(first: Position, count: int) -> Sequence[Sequence[Value]]:
        if count == 1:
            return [[load(row, first, 1) for row in range(rows)]]
        held = [vectors.name(load(row, first, count)) for row in range(rows)]
        return [[vectors.lane(each, step) for each in held] for step in range(count)]

    at_once = profile.stored_lanes if by_lane else 1
    return Multipliers(take, at_once, TURNS * at_once if by_lane else 1)


def across_rows(
    rows: int, load: Callable[[Position, int, int], Value], profile: Profile, width: int | None = None
) -> Multipliers:
    """Those of a packed matrix: `load(step, begin, n)` gives a step's numbers of n rows from `begin` on.

    `width`: of its panels, where a tile has fewer `rows`.
    """

    def lanes(first: Position, count: int) -> Sequence[Sequence[Value]]:
        return [
            [
                vectors.lane(vector, row) if n > 1 else vector
                for begin, n in vectors.pieces(width or rows, profile.stored_lanes)
                if begin < rows
                for vector in [vectors.name(load(first + step, begin, n))]
                for row in range(min(n, rows - begin))
            ]
            for step in range(count)
        ]

    def numbers(first: Position, count: int) -> Sequence[Sequence[Value]]:
        return [[load(first + step, row, 1) for row in range(rows)] for step in range(count)]

    return Multipliers(lanes, 1, UNROLLED, load) if profile.by_lane else Multipliers(numbers, 1, 1, load)


def best_tile(profile: Profile, rows: int, columns: int) -> Tile:
    """The tile of a profile that does a product of so many rows and columns in the fewest cycles."""
    return best_tiles(profile, rows, (columns, 1))[0]


def best_bands(
    profile: Profile, rows: int, columns: int, whole: bool = False, packed: bool = False
) -> tuple[Band, ...]:
    """The columns of a product as what full tiles take and, where that is done in fewer cycles, a rest with its own.

    `whole`: all in one. `packed`: by the profile's tiles for left operands that are.
    """
    tiles = profile.packed if packed else profile.tiles

    def best(count: int) -> Tile:
        return packed_tile(profile, count, (rows, 1)) if packed else best_tile(profile, rows, count)

    def cut(first: int) -> tuple[Band, ...]:
        # Less than a vector costs as much as one: a rest that is less shares columns with what is before it.
        rest = max(columns - first, min(columns, profile.stored_lanes)) if first < columns else 0
        parts = ((0, first), (columns - rest, rest))
        return tuple(Band(begin, count, best(count)) for begin, count in parts if count)

    cuts = {0} if whole else {0} | {columns - columns % tile.columns for tile in tiles}
    return min(map(cut, cuts), key=lambda bands: cycles(profile, rows, bands, packed))


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


def packed_tile(profile: Profile, columns: int, *products: tuple[int, int]) -> Tile:
    """The tile that does products of so many (rows, depth), which are packed, in the fewest cycles together."""

    def cycles(tile: Tile) -> float:
        return sum(depth * _cycles(profile, tile, rows, columns, packed=True) for rows, depth in products)

    return min(profile.packed, key=cycles)


def packed_bands(
    profile: Profile, rows: int, bands: Sequence[Band], whole: bool, written: bool = False
) -> tuple[Band, ...]:
    """The columns of a product of rows as they lie, by `bands`, as they go where the rows are packed first; none where
    that takes no fewer cycles. `written`: they are constant, or computed, and as soon written in panels as otherwise.
    """
    *_, last = bands
    columns, found = last.first + last.columns, []
    if profile.packed and rows >= profile.packed[0].rows:
        found.append(best_bands(profile, rows, columns, whole, packed=True))
    if written and not whole:
        found += bands_beside(profile, rows, columns)
    packing = 0 if written else PACKING * rows
    best = min(found, key=lambda each: cycles(profile, rows, each, packed=True), default=())
    return best if best and cycles(profile, rows, best, packed=True) + packing < cycles(profile, rows, bands) else ()


def bands_beside(profile: Profile, rows: int, columns: int) -> list[tuple[Band, ...]]:
    """The ways to sum the columns that full vectors leave over beside a tile, where registers have room for them."""
    lanes, found = profile.lanes, []
    rest = columns % lanes
    for tile in profile.packed or profile.tiles:
        upright, wide = -(-tile.rows // lanes), -(-tile.columns // lanes)
        held = tile.rows * wide + wide + rest * upright + upright
        before = columns - rest - tile.columns
        if profile.stored != FLOAT32 or not rest or rows % tile.rows or before < 0 or held > profile.registers:
            continue
        first = best_bands(profile, rows, before, packed=bool(profile.packed)) if before else ()
        if all(band.tile.rows == tile.rows for band in first):
            found.append((*first, Band(before, tile.columns + rest, tile, rest)))
    return found


def cycles(profile: Profile, rows: int, bands: Sequence[Band], packed: bool = False) -> float:
    """Cycles of a product of depth 1, whose left operand may be `packed`."""
    return sum(_cycles(profile, each.tile, rows, each.columns - each.beside, packed, each.beside) for each in bands)


def _cycles(profile: Profile, tile: Tile, rows: int, columns: int, packed: bool = False, beside: int = 0) -> float:
    return math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) * step_cycles(profile, tile, packed, beside)


def step_cycles(profile: Profile, tile: Tile, packed: bool, beside: int = 0) -> float:
    """Cycles of a tile's step, by what limits it: multiply-adds, loads, or the time until a sum is ready for the next.

    Where multipliers are lanes, loads are few, and what counts is how many instructions there are. Elsewhere loads take
    their turns beside multiply-adds: of tiles that do the same, that with fewer of them is the better.
    """
    wide, upright = (-(-size // profile.stored_lanes) for size in (tile.columns, tile.rows))
    sums = tile.rows * wide + beside * upright
    if profile.by_lane:
        multipliers = tile.rows / profile.stored_lanes
        loads = wide / 2 + multipliers / (2 if packed else 1) + beside
        return max(sums + loads + LOOP, LATENCY)
    loads = tile.rows + wide + (beside + upright if beside else 0)
    return max(sums, loads, LATENCY) + loads / LOADS_HIDDEN
