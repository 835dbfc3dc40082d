"""Attention in one kernel: scores, softmax and the sum of values for a few queries at a time, over blocks of keys.

The scores of a block are kept in memory of the thread's own; where there are several blocks, the sums so far are taken
down to the largest score yet (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.attention.across import LOWEST
from attnrewrite.targets.tvm.schedules.cpu.function import (
    address,
    along,
    each,
    evaluate,
    function,
    scratch,
    steps,
    when,
)
from attnrewrite.targets.tvm.schedules.cpu.operands import Panels
from attnrewrite.targets.tvm.schedules.cpu.register_tile import (
    RegisterTile,
    along_rows,
)
from attnrewrite.targets.tvm.schedules.cpu.rows import NEGLIGIBLE, fold, total
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import (
    Expression,
    Load,
)
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout


@dataclass(frozen=True)
class Attention:
    """out = epilogue(softmax(scores(query key^T)) value) over [outer..., tokens, channels].

    `key` is packed [outer..., panels, channels, width]; `scores` are over [outer..., queries, keys]. `rows` queries go
    at a time, over blocks of `block` panels of keys, `columns` channels of the value in a tile.
    """

    query: Load
    key: Panels
    value: Load
    keys: int
    scores: Expression
    out: Layout
    epilogue: Expression
    rows: int
    columns: int
    block: int
    name: str = "attention"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile).write())


class _Writer:
    """The statements of one attention."""

    def __init__(self, attention: Attention, buffers: Sequence[Any], profile: Profile) -> None:
        self.attention, self.buffers, self.profile = attention, buffers, profile
        self.outer, self.queries, self.channels = attention.out.shape[:-2], *attention.out.shape[-2:]
        self.depth, self.width = attention.key.layout.shape[-2:]
        self.panels, self.rows = attention.key.layout.shape[-3], attention.rows
        self.blocks = -(-self.panels // attention.block)
        self.lanes = profile.lanes
        # The last panel is multiplied as far as it has keys, in whole vectors.
        self.last = attention.keys - (self.panels - 1) * self.width
        self.narrow = min(self.width, -(-self.last // profile.stored_lanes) * profile.stored_lanes)
        filled = self.width if self.blocks > 1 else self.narrow
        self.length = (attention.block - 1) * self.width + filled  # of a block's row of scores

    def write(self) -> None:
        tiles = -(-self.queries // self.rows)
        work = math.prod(self.outer) * self.queries * self.attention.keys * self.depth
        with each((*self.outer, tiles), work) as (*z, tile):
            query = vectors.name(tirx.min(tile * self.rows, self.queries - self.rows))
            # The sums of values lie behind the scores: in a buffer of their own they would take the registers that the
            # next block's sums need.
            scores = scratch(self.rows * (self.length + (self.channels if self.blocks > 1 else 0)))
            state = _State(self, scores)
            with steps(self.blocks) as block:
                self.score(z, query, block, scores)
                state.take()
                state.sum_values(z, block)
            state.finish(z, query)

    def score(self, z: Sequence[Position], query: Position, block: Position, scores: Any) -> None:
        """The scores of a block; -inf beyond the last key."""
        attention = self.attention
        if self.panels % attention.block:
            # The last block has fewer panels than the others.
            along(
                (self.rows * self.length,),
                self.lanes,
                lambda _, at, n: vectors.store(scores, at, vectors.splat(-math.inf, n), n),
            )
        with steps(
            tirx.min(attention.block, self.panels - block * attention.block) if self.blocks > 1 else self.panels
        ) as step:
            panel = block * attention.block + step

            def fill(width: int, keys: int, filled: int) -> None:
                """A panel as far as `width`, of which so many are keys; its place in the row is `filled` up."""
                tile = RegisterTile(self.rows, pieces(width, self.profile.stored_lanes), self.profile)
                tile.multiply(
                    self.depth,
                    along_rows(
                        self.rows,
                        lambda i, k, n: self.read(attention.query, (*z, query + i, k), n),
                        self.profile,
                        self.profile.by_lane and attention.query.layout.strides[-1] == 1,
                    ),
                    lambda k, begin, n: self.read(attention.key, (*z, panel, k, begin), n),
                )
                for i in range(self.rows):
                    at = i * self.length + step * self.width
                    for begin, n in pieces(keys, self.lanes):
                        index = (*z, query + i, panel * self.width + begin)
                        score = evaluate(attention.scores, self.buffers, index, n, tile.value(i, begin, n))
                        vectors.store(scores, at + begin, score, n)
                    for begin, n in pieces(filled - keys, self.lanes):
                        vectors.store(scores, at + keys + begin, vectors.splat(-math.inf, n), n)

            last = functools.partial(fill, self.narrow, self.last, self.length % self.width or self.width)
            if self.panels == 1:
                last()
            elif self.last == self.width:
                fill(self.width, self.width, self.width)
            else:
                when(panel < self.panels - 1, lambda: fill(self.width, self.width, self.width), last)

    def read(self, load: Load | Panels, index: Sequence[Position], lanes: int) -> Value:
        return vectors.load(self.buffers[load.argument], address(load.layout, index), lanes, dtype=self.profile.stored)


class _State:
    """What is kept of the blocks so far, for each query: the largest score, the sum of its exponentials, the values'.

    With a single block, the values' sums never leave the registers. Exponentials are of the type of products,
    and lie in the place of the scores where those are of it, too.
    """

    def __init__(self, writer: _Writer, scores: Any) -> None:
        self.writer, self.scores, self.several = writer, scores, writer.blocks > 1
        stored = writer.profile.stored
        self.powers = scores if stored == FLOAT32 else scratch(writer.rows * writer.length, stored)
        rows = writer.rows
        self.largest, self.total, self.decay = scratch(rows), scratch(rows), scratch(rows)
        if self.several:
            for row in range(rows):
                vectors.store(self.largest, row, vectors.splat(LOWEST, 1), 1)
                vectors.store(self.total, row, vectors.splat(0.0, 1), 1)
            along(
                (rows * writer.channels,),
                writer.lanes,
                lambda _, at, n: vectors.store(self.scores, self.sums(0, at), vectors.splat(0.0, n), n),
            )

    def sums(self, row: int, channel: Position) -> Position:
        """Where the sums of values lie."""
        return self.writer.rows * self.writer.length + row * self.writer.channels + channel

    def take(self) -> None:
        """Turn a block's scores into exponentials, relative to the largest score yet."""
        length, lanes = self.writer.length, self.writer.lanes
        with steps(self.writer.rows) as row:
            begin = row * length
            known = self.largest[row] if self.several else vectors.splat(LOWEST, 1)
            highest = fold(
                (length,), lanes, lambda _, at, n: vectors.load(self.scores, begin + at, n), LOWEST, vectors.maximum
            )
            largest = vectors.name(vectors.maximum(known, highest))

            def raised(_: list[Position], at: Position, n: int) -> Value:
                value = vectors.name(vectors.load(self.scores, begin + at, n) - vectors.splat(largest, n))
                power = vectors.falling_exp(value, NEGLIGIBLE)
                vectors.store(self.powers, begin + at, power, n)
                return power

            sum_ = total((length,), lanes, raised)
            if self.several:
                decay = vectors.falling_exp(vectors.name(known - largest), NEGLIGIBLE)
                vectors.store(self.decay, row, decay, 1)
                vectors.store(self.largest, row, largest, 1)
                sum_ = self.total[row] * decay + sum_
            vectors.store(self.total, row, sum_, 1)

    def sum_values(self, z: Sequence[Position], block: Position) -> None:
        """Add a block's values, each times its exponential; with a single block, that is left to `finish`."""
        if not self.several:
            return
        writer = self.writer
        first = block * writer.length

        def keep(row: int, at: Position, n: int, value: Value) -> None:
            place = self.sums(row, at)
            before = vectors.load(self.scores, place, n) * vectors.splat(self.decay[row], n)
            vectors.store(self.scores, place, before + value, n)

        self.product(z, lambda k: tirx.min(first + k, writer.attention.keys - 1), writer.length, keep)

    def finish(self, z: Sequence[Position], query: Position) -> None:
        writer = self.writer
        attention = writer.attention

        def put(row: int, at: Position, n: int, value: Value) -> None:
            index = (*z, query + row, at)
            share = vectors.splat(1.0, 1) / self.total[row]
            value = vectors.name(value * vectors.splat(share, n))
            value = evaluate(attention.epilogue, writer.buffers, index, n, value)
            vectors.store(writer.buffers[-1], address(attention.out, index), value, n, attention.out.strides[-1])

        if not self.several:
            self.product(z, lambda k: k, attention.keys, put)
            return
        for row in range(writer.rows):
            along(
                (writer.channels,),
                writer.lanes,
                lambda _, at, n, row=row: put(  # type: ignore[misc]
                    row, at, n, vectors.load(self.scores, self.sums(row, at), n)
                ),
            )

    def product(self, z: Sequence[Position], key: Any, depth: int, keep: Any) -> None:
        """Exponentials times values: `keep(row, channel, lanes, value)` gets the sums."""
        writer = self.writer
        wide = min(writer.attention.columns, writer.channels)
        full, rest = divmod(writer.channels, wide)
        with steps(full) as part:
            self.part(z, part * wide, wide, key, depth, keep)
        if rest:
            self.part(z, full * wide, rest, key, depth, keep)

    def part(self, z: Sequence[Position], channel: Position, wide: int, key: Any, depth: int, keep: Any) -> None:
        """The product for `wide` channels from `channel` on. No two parts share a channel, as sums are added to."""
        writer = self.writer
        tile = RegisterTile(writer.rows, pieces(wide, writer.profile.stored_lanes), writer.profile)
        tile.multiply(
            depth,
            along_rows(
                writer.rows,
                lambda i, k, n: vectors.load(self.powers, i * writer.length + k, n, dtype=writer.profile.stored),
                writer.profile,
                writer.profile.by_lane,
            ),
            lambda k, begin, n: writer.read(writer.attention.value, (*z, key(k), channel + begin), n),
        )
        for row in range(writer.rows):
            for begin, n in pieces(wide, writer.lanes):
                keep(row, channel + begin, n, tile.value(row, begin, n))
