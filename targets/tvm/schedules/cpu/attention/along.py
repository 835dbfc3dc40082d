"""Attention in one kernel: scores, softmax and the sum of values for a few queries at a time, over blocks of keys.

The scores of a block are kept in memory of the thread's own; where there are several blocks, the sums so far are taken
down to the largest score yet (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.attention.across import lowest
from attnrewrite.targets.tvm.schedules.cpu.attention.order import Order, Tile
from attnrewrite.targets.tvm.schedules.cpu.function import (
    address,
    along,
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

LOWEST = lowest(FLOAT32)


@dataclass(frozen=True)
class Attention:
    """out = epilogue(softmax(scores(query key^T)) value) over [outer..., tokens, channels].

    `key` is packed [outer..., panels, channels, width]; `scores` are over [outer..., queries, keys]. `columns` channels
    of the value go at a time.
    """

    query: Load
    key: Panels
    value: Load
    scores: Expression
    out: Layout
    epilogue: Expression
    order: Order
    columns: int
    name: str = "attention"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile).write())


class _Writer:
    """The statements of one attention."""

    def __init__(self, attention: Attention, buffers: Sequence[Any], profile: Profile) -> None:
        self.attention, self.buffers, self.profile, self.order = attention, buffers, profile, attention.order
        self.outer, self.channels = attention.out.shape[:-2], attention.out.shape[-1]
        self.depth, self.width = attention.key.layout.shape[-2:]
        self.rows, self.lanes, self.several = self.order.rows, profile.lanes, self.order.blocks > 1
        self.length = self.filled(self.order.length)  # of a block's row of scores

    def filled(self, keys: int) -> int:
        """As far as so many keys are multiplied: in whole vectors, and not beyond a panel."""
        whole, rest = divmod(keys, self.width)
        lanes = self.profile.stored_lanes
        return whole * self.width + min(self.width, -(-rest // lanes) * lanes)

    def write(self) -> None:
        work = math.prod(self.outer) * self.order.queries * self.order.keys * self.depth
        with self.order.over(self.outer, work) as (z, group):
            # The sums of values lie behind the scores: in a buffer of their own they would take the registers that the
            # next block's sums need.
            sums = self.order.group * self.rows * self.channels if self.several else 0
            scores = scratch(self.rows * self.length + sums)
            state = _State(self, scores)

            def visit(tile: Tile, block: Position, keys: int) -> None:
                self.score(z, tile.query, block * self.order.panels, keys, scores)
                state.take(tile, self.filled(keys))
                state.sum_values(z, tile, block * self.order.length, keys)

            group.go(visit, lambda tile: state.finish(z, tile))

    def score(self, z: Sequence[Position], query: Position, first: Position, keys: int, scores: Any) -> None:
        """The scores of so many keys from the `first` panel on; -inf beyond the last key."""
        attention = self.attention
        panels = -(-keys // self.width)
        rest = keys - (panels - 1) * self.width
        with steps(panels) as step:
            panel = first + step

            def fill(width: int, keys: int) -> None:
                """A panel as far as `width`, of which so many are keys."""
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
                    for begin, n in pieces(width - keys, self.lanes):
                        vectors.store(scores, at + keys + begin, vectors.splat(-math.inf, n), n)

            whole = functools.partial(fill, self.width, self.width)
            last = functools.partial(fill, self.filled(rest), rest)
            if rest == self.width:
                whole()
            elif panels == 1:
                last()
            else:
                when(step < panels - 1, whole, last)

    def read(self, load: Load | Panels, index: Sequence[Position], lanes: int) -> Value:
        return vectors.load(self.buffers[load.argument], address(load.layout, index), lanes, dtype=self.profile.stored)


class _State:
    """What is kept of the blocks so far, for each query: the largest score, the sum of its exponentials, the values'.

    With a single block, the values' sums never leave the registers. Exponentials are of the type of products,
    and lie in the place of the scores where those are of it, too.
    """

    def __init__(self, writer: _Writer, scores: Any) -> None:
        self.writer, self.scores, self.several = writer, scores, writer.several
        stored = writer.profile.stored
        self.powers = scores if stored == FLOAT32 else scratch(writer.rows * writer.length, stored)
        rows = writer.order.group * writer.rows
        self.largest, self.total, self.decay = scratch(rows), scratch(rows), scratch(writer.rows)
        if self.several:
            self.fill(self.largest, 0, rows, LOWEST)
            self.fill(self.total, 0, rows, 0.0)
            self.fill(scores, writer.rows * writer.length, rows * writer.channels, 0.0)

    def fill(self, buffer: Any, begin: int, length: int, number: float) -> None:
        put = lambda _, at, n: vectors.store(buffer, begin + at, vectors.splat(number, n), n)  # noqa: E731
        along((length,), self.writer.lanes, put)

    def place(self, tile: Tile, row: Position) -> Position:
        """Where the largest score and the total of a row lie."""
        return tile.place * self.writer.rows + row

    def sums(self, tile: Tile, row: int, channel: Position) -> Position:
        """Where the sums of values lie."""
        return self.writer.rows * self.writer.length + self.place(tile, row) * self.writer.channels + channel

    def take(self, tile: Tile, length: int) -> None:
        """Turn so many scores of a block into exponentials, relative to the largest score yet."""
        lanes = self.writer.lanes
        with steps(self.writer.rows) as row:
            begin, place = row * self.writer.length, self.place(tile, row)
            known = self.largest[place] if self.several else vectors.splat(LOWEST, 1)
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
                vectors.store(self.largest, place, largest, 1)
                sum_ = self.total[place] * decay + sum_
            vectors.store(self.total, place, sum_, 1)

    def sum_values(self, z: Sequence[Position], tile: Tile, first: Position, keys: int) -> None:
        """Add the values of so many keys, each times its exponential; with a single block, that is left to `finish`."""
        if not self.several:
            return

        def keep(row: int, at: Position, n: int, value: Value) -> None:
            place = self.sums(tile, row, at)
            before = vectors.load(self.scores, place, n) * vectors.splat(self.decay[row], n)
            vectors.store(self.scores, place, before + value, n)

        self.product(z, first, keys, keep)

    def finish(self, z: Sequence[Position], tile: Tile) -> None:
        writer = self.writer
        attention = writer.attention

        def put(row: int, at: Position, n: int, value: Value) -> None:
            index = (*z, tile.query + row, at)
            share = vectors.splat(1.0, 1) / self.total[self.place(tile, row)]
            value = vectors.name(value * vectors.splat(share, n))
            value = evaluate(attention.epilogue, writer.buffers, index, n, value)
            vectors.store(writer.buffers[-1], address(attention.out, index), value, n, attention.out.strides[-1])

        if not self.several:
            self.product(z, 0, writer.order.keys, put)
            return
        for row in range(writer.rows):
            along(
                (writer.channels,),
                writer.lanes,
                lambda _, at, n, row=row: put(  # type: ignore[misc]
                    row, at, n, vectors.load(self.scores, self.sums(tile, row, at), n)
                ),
            )

    def product(self, z: Sequence[Position], first: Position, keys: int, keep: Any) -> None:
        """Exponentials times so many values from the `first` on: `keep(row, channel, lanes, value)` gets the sums."""
        writer = self.writer
        wide = min(writer.attention.columns, writer.channels)
        full, rest = divmod(writer.channels, wide)
        with steps(full) as part:
            self.part(z, part * wide, wide, first, keys, keep)
        if rest:
            self.part(z, full * wide, rest, first, keys, keep)

    def part(self, z: Sequence[Position], channel: Position, wide: int, first: Position, keys: int, keep: Any) -> None:
        """The product for `wide` channels from `channel` on. No two parts share a channel, as sums are added to."""
        writer = self.writer
        tile = RegisterTile(writer.rows, pieces(wide, writer.profile.stored_lanes), writer.profile)
        tile.multiply(
            keys,
            along_rows(
                writer.rows,
                lambda i, k, n: vectors.load(self.powers, i * writer.length + k, n, dtype=writer.profile.stored),
                writer.profile,
                writer.profile.by_lane,
            ),
            lambda k, begin, n: writer.read(writer.attention.value, (*z, first + k, channel + begin), n),
        )
        for row in range(writer.rows):
            for begin, n in pieces(wide, writer.lanes):
                keep(row, channel + begin, n, tile.value(row, begin, n))
