"""Kernels of Strassen's algorithm: the factors of the left operand, packed in panels, and the products of them with
those of weights, by groups of tiles, whose sums stay in the first cache.

A group is as many tiles of registers high and wide as a matrix has blocks along a side, one tile of each block: blocks
are not quarters of the matrices, but every second tile along their rows and columns, and halves of the depth.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    SECOND_CACHE,
    address,
    each,
    evaluate,
    function,
    only_if,
    prefetch,
    scratch,
    steps,
    when,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.operands import spread
from attnrewrite.targets.tvm.schedules.cpu.product import CACHE_LINE
from attnrewrite.targets.tvm.schedules.cpu.register_tile import RegisterTile, Start, across_rows
from attnrewrite.targets.tvm.schedules.cpu.sharing import parts, shares
from attnrewrite.targets.tvm.schedules.cpu.strassen.algorithm import Scheme, left_factors, places
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, covering, pieces
from attnrewrite.targets.tvm.schedules.expression import Expression
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, SIZES, Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, contiguous

IN_LINE = CACHE_LINE // SIZES[FLOAT32]
FIELDS = 5  # of a product in a kernel's table
Row = Callable[[int, int], Position]  # of a group: by the number of a tile, and of a row of it


@dataclass(frozen=True)
class Grouping:
    """How `rows` are cut into groups of `side` tiles, `high` rows each; those of the last one are as low as may be."""

    rows: int
    high: int
    side: int

    @property
    def count(self) -> int:
        return -(-self.rows // (self.high * self.side))

    @property
    def short(self) -> int:
        """The height of the last group's tiles, where rows do not fill it; else 0."""
        return -(-(self.rows % (self.high * self.side)) // self.side)

    def height(self, group: Position) -> Position:
        """The height of a group's tiles."""
        if not self.short:
            return self.high
        return vectors.name(tirx.Select(group < self.count - 1, self.high, self.short))


@dataclass(frozen=True)
class _Level:
    """The factors of a level in a buffer from `begin` on: of each so many `blocks`, `pitch` numbers apart."""

    buffer: Any
    begin: Position
    pitch: int
    blocks: int

    def place(self, factor: Position, block: Position) -> Position:
        return self.begin + (factor * self.blocks + block) * self.pitch

    def put(self, factor: Position, block: Position, at: int, quarters: Sequence[Value]) -> None:
        """Write a vector of one block of each of the seven factors that a factor of the level before has."""
        a11, a12, a21, a22 = quarters
        for number, value in enumerate(left_factors(a11, a12, a21, a22, vectors.name)):
            place = self.place(factor * 7 + number, block) + at
            vectors.store(self.buffer, place, value, vectors.lanes_of(value))


@dataclass(frozen=True)
class LeftFactors:
    """The left factors [groups, products, depth / side, tile's rows] of `value` over [rows, depth]."""

    scheme: Scheme
    grouping: Grouping
    depth: int
    value: Expression
    name: str = "factors"

    @property
    def shape(self) -> Shape:
        return self.grouping.count, self.scheme.products, self.depth // self.scheme.side, self.grouping.high

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        part, lanes = self.shape[2], profile.lanes

        def body(*buffers: Any) -> None:
            with each((self.grouping.count,), contiguous(self.shape).size) as (group,):
                rows = self._rows(group)
                if turns := part // lanes:
                    with steps(turns) as turn:
                        self._write(group, rows, turn * lanes, lanes, buffers, lanes)
                if rest := part % lanes:
                    self._write(group, rows, part - rest, rest, buffers, lanes)

        return function(arguments, body)

    def _rows(self, group: Position) -> Row:
        """Where the rows of a group's tiles are: the last row again beyond it."""
        grouping = self.grouping
        first, high = vectors.name(group * (grouping.high * grouping.side)), grouping.height(group)

        def row(tile: int, number: int) -> Position:
            found = first + (tile * high + number)
            return tirx.min(found, grouping.rows - 1) if grouping.short else found

        return row

    def _write(
        self, group: Position, rows: Row, first: Position, count: int, buffers: Sequence[Any], lanes: int
    ) -> None:
        """The factors of a group at `count` steps from the `first` on, level by level, each in the first cache."""
        length, last, out = count * self.grouping.high, self.scheme.levels - 1, contiguous(self.shape)
        sizes = [4 ** (last - level) for level in range(last)]
        levels = [_Level(scratch(7 ** (at + 1) * size * length), 0, length, size) for at, size in enumerate(sizes)]
        levels.append(_Level(buffers[-1], address(out, (group, 0, first, 0)), out.strides[1], 1))
        inner = levels[0].blocks
        for block in range(inner):
            numbers = range(block, 4 * inner, inner)
            for at, quarters in self._turned(rows, numbers, first, count, buffers, lanes):
                levels[0].put(0, block, at, quarters)
        for number, (before, after) in enumerate(itertools.pairwise(levels), start=1):
            with steps(7**number) as factor, steps(after.blocks) as block:
                for at, wide in pieces(length, 2 * lanes):
                    places = [before.place(factor, block + i * after.blocks) + at for i in range(4)]
                    quarters = [vectors.name(vectors.load(before.buffer, place, wide)) for place in places]
                    after.put(factor, block, at, quarters)

    def _turned(
        self, rows: Row, numbers: Sequence[int], first: Position, count: int, buffers: Sequence[Any], lanes: int
    ) -> Iterator[tuple[int, list[Value]]]:
        """Vectors of a tile's rows out of some blocks, quarters of quarters, at `count` steps: the place of each among
        those of its block [steps, rows], and one of every block.
        """
        side, high, part = self.scheme.side, self.grouping.high, self.shape[2]
        for begin, wide in pieces(high, lanes if count == lanes else 1):
            for step in range(0, count, wide):
                squares = []
                for i, j in (divmod(places(side)[number], side) for number in numbers):
                    at = [(rows(i, line), first + (step + j * part)) for line in range(begin, begin + wide)]
                    squares.append(vectors.transposed([evaluate(self.value, buffers, each, wide) for each in at]))
                for number, found in enumerate(zip(*squares, strict=True)):
                    yield (step + number) * high + begin, list(found)


@dataclass(frozen=True)
class Strassen:
    """out[m, n] = epilogue(sum_k left[m, k] right[k, n]), where all axes of `out` but the last make the rows.

    The arguments `left` and `right` are the factors in panels [groups, products, depth / side, tile's rows] and
    [panels, products, depth / side, tile's columns]. `table` has the scheme's steps: for each product the tile that is
    its first seed, the tile that it makes, and where in the table its other seeds begin, where pairs of what is added
    after it, and where those end; tiles by their first number in memory.
    """

    scheme: Scheme
    grouping: Grouping
    depth: int
    left: int
    right: int
    table: int
    out: Layout
    epilogue: Expression
    tile: Tile
    name: str = "strassen"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile).write())


class _Writer:
    """The statements of one product."""

    def __init__(self, kernel: Strassen, buffers: Sequence[Any], profile: Profile) -> None:
        self.kernel, self.buffers, self.profile = kernel, buffers, profile
        self.scheme, self.grouping = kernel.scheme, kernel.grouping
        *rows, self.columns = kernel.out.shape
        self.row_shape = tuple(rows)
        self.high, self.wide = kernel.tile.rows, kernel.tile.columns
        self.part, self.size = kernel.depth // self.scheme.side, self.high * self.wide
        self.across = -(-self.columns // (self.wide * self.scheme.side))
        self.parts = parts(self.grouping.count, self.across, halved=False)

    def write(self) -> None:
        grouping, work = self.grouping, self.grouping.rows * self.columns * self.kernel.depth
        with shares(self.kernel.out, 0, grouping.count, self.parts, self.across, work) as share:
            tiles = scratch(self.scheme.tiles * self.size)
            for at, lanes in pieces(self.size, self.profile.lanes):
                vectors.store(tiles, self.scheme.zero * self.size + at, vectors.splat(0.0, lanes), lanes)
            with steps(share.tiles) as step:
                group = vectors.name(share.first + step)
                self.fetch(share.panel, step)

                def multiply(high: int, group: Position = group) -> None:
                    self.multiply(tiles, group, share.panel, high)

                if grouping.short:
                    when(group < grouping.count - 1, lambda: multiply(self.high), lambda: multiply(grouping.short))
                else:
                    multiply(self.high)
                self.finish(tiles, group, share.panel)

    def fetch(self, panel: Position, step: Position) -> None:
        """Ask for a share of what the next panel reads; beside the last panel, of what that one reads."""
        size = self.scheme.products * self.part * self.wide
        share = -(-size // (IN_LINE * -(-self.grouping.count // self.parts))) * IN_LINE
        begin = vectors.name(
            tirx.min(panel + 1, self.across - 1) * size + tirx.min(step, -(-size // share) - 1) * share
        )
        if self.across > 1:
            with steps(share // IN_LINE) as line:
                prefetch(self.buffers[self.kernel.right], begin + line * IN_LINE, SECOND_CACHE)

    def multiply(self, tiles: Any, group: Position, panel: Position, high: int) -> None:
        """The scheme's steps for a group, whose tiles have `high` rows."""
        left, right, table = (self.buffers[each] for each in (self.kernel.left, self.kernel.right, self.kernel.table))
        with steps(self.scheme.products) as number:
            seed, into, seeds, after, end = (vectors.name(table[number * FIELDS + field]) for field in range(FIELDS))
            above = vectors.name((group * self.scheme.products + number) * (self.part * self.high))
            beside = vectors.name((panel * self.scheme.products + number) * (self.part * self.wide))
            sums = RegisterTile(high, pieces(self.wide, self.profile.lanes), self.profile)

            def held(at: Position) -> Start:
                return lambda row, begin, lanes: vectors.load(tiles, at + (row * self.wide + begin), lanes)

            def keep(at: Position) -> None:
                for row in range(high):
                    for begin, lanes in sums.vectors:
                        vectors.store(tiles, at + (row * self.wide + begin), sums.value(row, begin, lanes), lanes)

            def multipliers(k: Position, row: int, lanes: int) -> Any:
                return vectors.load(left, above + (k * self.high + row), lanes)

            def multiplicands(k: Position, column: int, lanes: int) -> Any:
                return vectors.load(right, beside + (k * self.wide + column), lanes)

            sums.begin(held(seed))
            with T.serial(0, after - seeds) as more:
                sums.plus(held(vectors.name(table[seeds + more])))
            sums.accumulate(0, self.part, across_rows(high, multipliers, self.profile, self.high), multiplicands)
            keep(into)
            with T.serial(0, (end - after) // 2) as pair:
                at = vectors.name(after + pair * 2)
                sums.plus(held(vectors.name(table[at])))
                keep(vectors.name(table[at + 1]))

    def finish(self, tiles: Any, group: Position, panel: Position) -> None:
        """What follows the tiles of a group, and where they are written."""
        side, high = self.scheme.side, self.grouping.height(group)
        with steps(side) as i, steps(side) as j:
            row = vectors.name(group * (self.high * side) + i * high)
            column = vectors.name((panel * side + j) * self.wide)
            begin = vectors.name((i * side + j) * self.size)
            # So many that are known only here, no compiler writes out side by side, for which registers are too few.
            count = vectors.name(tirx.min(high, self.grouping.rows - row))

            def put(width: int) -> None:
                with T.serial(0, (count + 1) // 2) as pair:
                    # Two in a turn, the last one twice where they are odd.
                    for number in (pair * 2, vectors.name(tirx.min(pair * 2 + 1, count - 1))):
                        for at, lanes in covering(width, self.profile.lanes):
                            self.store(tiles, begin + (number * self.wide + at), row + number, column + at, lanes)

            narrow = self.columns % self.wide
            if self.columns % (self.wide * side) == 0:
                put(self.wide)
            elif narrow:
                rest = lambda: only_if(column < self.columns, lambda: put(narrow))  # noqa: E731
                when(column + self.wide <= self.columns, lambda: put(self.wide), rest)
            else:
                only_if(column < self.columns, lambda: put(self.wide))

    def store(self, tiles: Any, at: Position, row: Position, column: Position, lanes: int) -> None:
        index = (*spread(row, self.row_shape), column)
        write(self.kernel.epilogue, self.buffers, self.kernel.out, index, lanes, vectors.load(tiles, at, lanes))
