"""Products of integers of eight bits: operands in words of four, sums in 32 bits, arithmetic behind as in any product.

The left operand is packed as the kernel before computes it, in blocks of as many rows as a tile has: a tile then reads
one block and one panel of weights, both from their start to their end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    by_pairs,
    each,
    evaluate,
    function,
    scratch,
    steps,
    when,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.int8.dot import TURNS, WORD, Dot, dot_of, flipped, groups_of, words
from attnrewrite.targets.tvm.schedules.cpu.sharing import parts, shares
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Expression
from attnrewrite.targets.tvm.schedules.profile import Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, unravel

SIDE = 4  # rows that are rounded at a time, and words of each


def place(rows: Shape, row: Position) -> list[Position]:
    """A row's place on each of the axes that make the rows."""
    if len(rows) == 1:
        return [row]
    return [row // step % size if size > 1 else 0 for step, size in unravel(rows)]


@dataclass(frozen=True)
class Words:
    """`value` over [rows..., depth], rounded to integers, as words [blocks, groups, high].

    Rows beyond the last repeat it.
    """

    rows: Shape
    depth: int
    high: int
    value: Expression
    name: str = "words"

    @property
    def shape(self) -> Shape:
        return -(-math.prod(self.rows) // self.high), groups_of(self.depth), self.high

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        dot = dot_of(profile)
        assert dot is not None
        blocks, groups, high = self.shape
        count = math.prod(self.rows)

        def body(*buffers: Any) -> None:
            def write(at: Position, word: Value) -> None:
                word = vectors.name(flipped(word) if dot.unsigned else word)
                vectors.store(buffers[-1], at, word, vectors.lanes_of(word))

            def read(row: Sequence[Position], at: Position, lanes: int) -> Value:
                return vectors.name(evaluate(self.value, buffers, (*row, at), lanes))

            def square(block: Position, first: int, side: int) -> None:
                """As many rows as words of each at a time, which change places."""
                rows = [
                    place(self.rows, vectors.name(tirx.min(block * high + first + i, count - 1))) for i in range(side)
                ]
                begin, lanes = block * groups * high + first, WORD * side
                done = self.depth // lanes
                if done:
                    with steps(done) as chunk:
                        found = [vectors.name(words(read(row, chunk * lanes, lanes))) for row in rows]
                        for group, word in enumerate(vectors.transposed(found)):
                            write(begin + (chunk * side + group) * high, word)
                for i, row in enumerate(rows):
                    for group in range(done * side, groups):  # what is beyond the depth is multiplied by zeros
                        held = scratch(WORD)
                        for lane in range(WORD):
                            at = group * WORD + lane
                            vectors.store(held, lane, read(row, at, 1) if at < self.depth else vectors.splat(0.0, 1), 1)
                        write(begin + i + group * high, words(vectors.load(held, 0, WORD)))

            with each((blocks,), count * self.depth) as (block,):
                for first, side in pieces(high, SIDE):
                    square(block, first, side)

        return function(arguments, body)


@dataclass(frozen=True)
class IntegerProduct:
    """out[m, n] = epilogue(sum_k left[m, k] right[k, n]) of integers.

    The arguments numbered `left`, `right` and `start` are Words, weights as `dot.packed` has them, and what the sums of
    the columns start with, where the instruction needs that. `out` and the epilogue have the shape [rows..., columns].
    """

    depth: int
    left: int
    right: int
    start: int | None
    out: Layout
    epilogue: Expression
    tile: Tile
    name: str = "product_of_integers"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        dot = dot_of(profile)
        assert dot is not None
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile, dot).write())


class _Writer:
    """The statements of one product."""

    def __init__(self, product: IntegerProduct, buffers: Sequence[Any], profile: Profile, dot: Dot) -> None:
        self.product, self.buffers, self.dot, self.lanes = product, buffers, dot, profile.lanes
        self.by_lane = profile.by_lane
        *rows, self.columns = product.out.shape
        self.rows, self.row_shape = math.prod(rows), tuple(rows)
        self.high, self.wide = product.tile.rows, product.tile.columns
        self.groups = groups_of(product.depth)
        self.across, self.down = -(-self.columns // self.wide), -(-self.rows // self.high)
        self.vectors = pieces(self.wide, self.lanes)

    def write(self) -> None:
        work = self.product.out.size * self.product.depth
        cut = parts(self.down, self.across, halved=not self.by_lane)
        with shares(self.product.out, 0, self.down, cut, self.across, work) as share, steps(share.tiles) as step:
            panel, block = share.panel, vectors.name(share.first + step)
            if short := self.rows % self.high:
                when(
                    block < self.down - 1,
                    lambda: self.tile(panel, block, self.high),
                    lambda: self.tile(panel, block, short),
                )
            else:
                self.tile(panel, block, self.high)

    def tile(self, panel: Position, block: Position, high: int) -> None:
        """`high` rows of a block, for a panel of columns."""
        sums = scratch(high * self.wide, "int32")
        self.begin(sums, panel, high)
        left = vectors.name(block * self.groups * self.high)
        right = vectors.name(panel * self.groups * self.wide)
        turns = TURNS if self.groups % (2 * TURNS) else 2 * TURNS
        with steps(self.groups // turns) as chunk:
            for turn in range(turns):
                group = chunk * turns + turn
                self.add(sums, left + group * self.high, right + group * self.wide, high)
        self.finish(sums, block, panel, high)

    def begin(self, sums: Any, panel: Position, high: int) -> None:
        for row in range(high):
            for begin, lanes in self.vectors:
                value = vectors.integers(0, lanes)
                if self.product.start is not None:
                    value = vectors.load(self.buffers[self.product.start], panel * self.wide + begin, lanes)
                vectors.store(sums, row * self.wide + begin, value, lanes)

    def add(self, sums: Any, left: Position, right: Position, high: int) -> None:
        """One word of depth: four products for each sum."""
        weights = self.buffers[self.product.right]
        loaded = [vectors.name(vectors.load(weights, right + begin, lanes)) for begin, lanes in self.vectors]
        for row, word in enumerate(self.multipliers(left)[:high]):
            for (begin, lanes), vector in zip(self.vectors, loaded, strict=True):
                at = row * self.wide + begin
                value = self.dot.add(vectors.load(sums, at, lanes), vectors.splat(word, lanes), vector)
                vectors.store(sums, at, value, lanes)

    def multipliers(self, left: Position) -> list[Value]:
        """A word of each row: lanes of vectors where a processor multiplies by those."""
        words = self.buffers[self.product.left]
        if not self.by_lane:
            return [vectors.load(words, left + row, 1) for row in range(self.high)]
        found: list[Value] = []
        for begin, lanes in pieces(self.high, self.lanes):
            held = vectors.name(vectors.load(words, left + begin, lanes))
            found += [held] if lanes == 1 else [vectors.lane(held, lane) for lane in range(lanes)]
        return found

    def finish(self, sums: Any, block: Position, panel: Position, high: int) -> None:
        """Write the sums, row by row: side by side, the code of all rows would take the compiler a long time."""
        memory = scratch(high * self.wide, "int32")
        for row in range(high):
            for begin, lanes in self.vectors:
                at = row * self.wide + begin
                vectors.store(memory, at, vectors.load(sums, at, lanes), lanes)
        narrow, first = self.columns % self.wide, vectors.name(block * self.high)

        def store(width: int) -> None:
            for begin, lanes in pieces(width, 2 * self.lanes):

                def put(row: Position, begin: int = begin, lanes: int = lanes) -> None:
                    value = vectors.load(memory, row * self.wide + begin, lanes)
                    index = (*place(self.row_shape, first + row), panel * self.wide + begin)
                    self.store(index, lanes, vectors.number(value))

                by_pairs(high, put)

        if not narrow or self.across == 1:
            store(narrow or self.wide)
        else:
            when(panel < self.across - 1, lambda: store(self.wide), lambda: store(narrow))

    def store(self, index: Sequence[Position], lanes: int, value: Value) -> None:
        write(self.product.epilogue, self.buffers, self.product.out, index, lanes, vectors.name(value))
