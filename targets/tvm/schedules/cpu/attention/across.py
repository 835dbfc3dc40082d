"""Attention with queries side by side in vectors: keys, then channels of values, are what products take lanes of.

Each step of softmax is then arithmetic on whole vectors, and the scores of a block of keys lie as the sums of values
read them. Exponentials are powers of two of what scores are less than the largest one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import half, vectors
from attnrewrite.targets.tvm.schedules.cpu.attention.order import Order, Tile
from attnrewrite.targets.tvm.schedules.cpu.function import (
    address,
    along,
    evaluate,
    function,
    scratch,
    steps,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.operands import Panels
from attnrewrite.targets.tvm.schedules.cpu.register_tile import RegisterTile, across_rows, parts_of
from attnrewrite.targets.tvm.schedules.cpu.rows import NEGLIGIBLE
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Expression, Result
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, FLOAT32, Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout

BASE = math.log2(math.e)  # what is multiplied by it is a logarithm to the base of two
LEAST = BASE * NEGLIGIBLE

Sums = Callable[[int, int, int], Value]  # of a channel, from a query on, for so many


@dataclass(frozen=True)
class AttentionAcross:
    """out = epilogue(2^(base (scores(key query) - their largest)), normalised, times value) over
    [outer..., tokens, channels].

    `query` is packed [outer..., panels, depth, queries], `key` [outer..., panels, depth, keys], `value`
    [outer..., panels, keys, channels], each with its last panel shared; `scores` are over [outer..., keys, queries].
    """

    query: Panels
    key: Panels
    value: Panels
    scores: Expression
    base: float
    out: Layout
    epilogue: Expression
    order: Order
    name: str = "attention"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile).write())


class _Writer:
    """The statements of one attention. What is kept of the blocks so far, for each query of a group: the largest score,
    the sum of the powers, and, where there are several blocks, those of values; a single one's stay in registers.
    """

    def __init__(self, attention: AttentionAcross, buffers: Sequence[Any], profile: Profile) -> None:
        self.attention, self.buffers, self.profile, self.order = attention, buffers, profile, attention.order
        *self.outer, _, self.channels = attention.out.shape
        self.depth, self.wide = attention.query.layout.shape[-2:]
        self.high, self.parts = attention.key.width, attention.value.layout.shape[-3]
        self.several = self.order.blocks > 1
        self.pieces, self.wider = (pieces(self.wide, lanes) for lanes in (profile.lanes, profile.stored_lanes))
        # A sum of float16 that nothing comes after is not rounded again.
        plain = isinstance(attention.scores, Result) and parts_of(profile.stored, self.depth) == 1
        self.scored = profile.stored if plain else FLOAT32

    def write(self) -> None:
        order, stored = self.order, self.profile.stored
        work = math.prod(self.outer) * order.queries * order.keys * self.depth
        with order.over(self.outer, work) as (self.z, group):
            self.scores = scratch(order.length * self.wide, self.scored)
            self.powers = self.scores if stored == self.scored else scratch(order.length * self.wide, stored)
            self.largest = scratch(self.wide, self.scored)
            self.total, self.decay = (scratch(self.wide) for _ in range(2))
            if self.several:
                self.kept = [scratch(order.group * self.wide, dtype) for dtype in (self.scored, FLOAT32)]
                self.sums = scratch(order.group * self.parts * self.high * self.wide)
                self.clear(*self.kept)
                self.fill(self.sums, 0.0)
            group.go(self.block, self.finish)

    def clear(self, largest: Any, total: Any) -> None:
        """Before the first block."""
        self.fill(largest, lowest(self.scored))
        self.fill(total, 0.0)

    def fill(self, buffer: Any, number: float) -> None:
        length = int(buffer.shape[0])
        along((length,), self.profile.lanes, lambda _, at, n: vectors.store(buffer, at, vectors.splat(number, n), n))

    def block(self, tile: Tile, block: Position, keys: int) -> None:
        """Scores and powers for `keys` of them; sums of values, but those of a single block are left to `finish`."""
        first = vectors.name(block * self.order.length)
        if self.several:
            self.recall(tile)
        else:
            self.clear(self.largest, self.total)
        self.score(tile, block, first, keys)
        self.raise_to(keys)
        if self.several:
            for held, buffer in zip((self.largest, self.total), self.kept, strict=True):
                self.copy(held, 0, buffer, tile.place * self.wide)
            self.product(first, keys, lambda part, sums: self.add(tile, part, sums))

    def finish(self, tile: Tile) -> None:
        if not self.several:
            self.product(0, self.order.keys, lambda part, sums: self.put(tile, part, sums))
            return
        self.recall(tile)
        with steps(self.parts) as part:
            self.put(tile, part, lambda i, at, n: vectors.load(self.sums, self.place(tile, part, i) + at, n))

    def recall(self, tile: Tile) -> None:
        """Take what is kept of a tile to where loops have it in registers, as each of the places is a constant."""
        for held, buffer in zip((self.largest, self.total), self.kept, strict=True):
            self.copy(buffer, tile.place * self.wide, held, 0)

    def copy(self, source: Any, begin: Position, target: Any, to: Position) -> None:
        """A number for each query of a tile."""
        for at, n in self.pieces:
            vectors.store(target, to + at, own(source, begin + at, n), n)

    def product(self, first: Position, keys: int, take: Callable[[Position, Sums], None]) -> None:
        """Powers times `keys` values from the `first` on: `take` gets the sums of each panel of channels."""
        with steps(self.parts) as part:
            tile = RegisterTile(self.high, self.wider, self.profile)
            value = self.attention.value
            begin = vectors.name(address(value.layout, (*self.z, part, first, 0)))
            tile.multiply(
                keys,
                across_rows(self.high, lambda k, i, n: self.read(value, begin + k * self.high + i, n), self.profile),
                lambda k, at, n: vectors.load(self.powers, k * self.wide + at, n, dtype=self.profile.stored),
            )
            take(part, tile.value)

    def score(self, tile: Tile, block: Position, first: Position, keys: int) -> None:
        """The scores of a block from the `first` key on, and the largest yet."""
        attention = self.attention
        known = scratch(self.wide, self.scored)
        self.copy(self.largest, 0, known, 0)
        query = vectors.name(address(attention.query.layout, (*self.z, tile.number, 0, 0)))
        with steps(-(-keys // self.high)) as step:
            panel = vectors.name(block * self.order.panels + step)
            key = vectors.name(address(attention.key.layout, (*self.z, panel, 0, 0)))
            sums = RegisterTile(self.high, self.wider, self.profile)
            sums.multiply(
                self.depth,
                across_rows(
                    self.high, lambda k, i, n: self.read(attention.key, key + k * self.high + i, n), self.profile
                ),
                lambda k, at, n: self.read(attention.query, query + k * self.wide + at, n),
            )
            # The last panel has some keys of the one before it.
            row = vectors.name(tirx.min(step * self.high, keys - self.high))
            for i in range(self.high):
                for at, n in self.wider:
                    index = (*self.z, first + row + i, tile.query + at)
                    score = evaluate(attention.scores, self.buffers, index, n, sums.value(i, at, n, self.scored))
                    vectors.store(self.scores, (row + i) * self.wide + at, score, n)
                    vectors.store(self.largest, at, vectors.larger(score, own(self.largest, at, n)), n)
        for at, n in self.wider:
            vectors.store(self.decay, at, self.power(own(known, at, n), at, n), n)

    def raise_to(self, keys: int) -> None:
        """Turn the scores of a block into powers, relative to the largest score, and add them up."""
        for at, n in self.pieces:
            decayed = vectors.load(self.total, at, n) * vectors.load(self.decay, at, n)
            vectors.store(self.total, at, decayed, n)
        with steps(keys) as key:
            for at, n in self.wider:
                place = key * self.wide + at
                power = self.power(own(self.scores, place, n), at, n)
                vectors.store(self.powers, place, power, n)
                sum_ = vectors.load(self.total, at, n) + vectors.as_type(power, FLOAT32)
                vectors.store(self.total, at, sum_, n)

    def power(self, score: Value, at: int, lanes: int) -> Value:
        """The exponential of what `score` is less than the largest one."""
        fallen = score - own(self.largest, at, lanes)
        if self.attention.base != 1:
            # Not before: the least number times the base would be infinite.
            fallen = fallen * vectors.splat(self.attention.base, lanes)
        if self.profile.stored == FLOAT16:
            return half.falling_power(vectors.name(vectors.as_type(fallen, FLOAT16)))
        return vectors.falling_power(vectors.name(fallen), LEAST)

    def place(self, tile: Tile, part: Position, channel: int) -> Position:
        """Where the sums of a channel of a panel lie."""
        return ((tile.place * self.parts + part) * self.high + channel) * self.wide

    def add(self, tile: Tile, part: Position, sums: Sums) -> None:
        """Add a block's sums to those of the blocks before it."""
        for i in range(self.high):
            for at, n in self.pieces:
                place = self.place(tile, part, i) + at
                before = vectors.load(self.sums, place, n) * vectors.load(self.decay, at, n)
                vectors.store(self.sums, place, before + sums(i, at, n), n)

    def put(self, tile: Tile, part: Position, sums: Sums) -> None:
        """Write a panel of channels: vectors of queries become vectors of channels."""
        attention = self.attention
        channel = vectors.name(tirx.min(part * self.high, self.channels - self.high))
        for at, n in self.pieces:
            share = vectors.name(vectors.splat(1.0, n) / vectors.load(self.total, at, n))
            for begin in range(0, self.high, n):
                square = [vectors.name(sums(begin + i, at, n) * share) for i in range(n)]
                for number, value in enumerate(vectors.transposed(square)):
                    index = (*self.z, tile.query + at + number, channel + begin)
                    write(attention.epilogue, self.buffers, attention.out, index, n, value)

    def read(self, panels: Panels, at: Position, lanes: int) -> Value:
        return vectors.load(self.buffers[panels.argument], at, lanes, dtype=self.profile.stored)


def lowest(dtype: str) -> float:
    """Where the search for the largest score begins: finite, so that a masked block leaves no nan, and no more than
    what masks are filled with where they are not infinite.
    """
    return float(np.finfo(dtype).min)


def own(buffer: Any, at: Position, lanes: int) -> Value:
    """Numbers in the type that a buffer has them in."""
    return vectors.load(buffer, at, lanes, dtype=str(buffer.dtype))
