"""In which order attention goes: groups of tiles of queries, each group over all blocks of keys, block by block.

Keys and values that fit in the second cache come from there for every tile: a tile is a group of its own. Where they do
not fit, a block of them does, beside the queries and sums of a group: what is beyond goes by once for each group.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import each, steps, when
from attnrewrite.targets.tvm.schedules.cpu.operands import Panels
from attnrewrite.targets.tvm.schedules.cpu.sharing import parts, taken
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, SIZES, Profile


@dataclass(frozen=True)
class Order:
    """`rows` queries make a tile, all tiles so many `groups`; `width` keys make a panel, `panels` a block.

    The last tile has some queries of the one before it, the last block may have fewer keys than the others.
    """

    queries: int
    rows: int
    groups: int
    keys: int
    width: int
    panels: int

    @property
    def tiles(self) -> int:
        return -(-self.queries // self.rows)

    @property
    def group(self) -> int:
        """The tiles of the largest group."""
        return -(-self.tiles // self.groups)

    @property
    def length(self) -> int:
        """The keys of a block that is not the last, or of the only one."""
        return min(self.keys, self.panels * self.width)

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.length)

    @contextmanager
    def over(self, outer: Sequence[int], work: int) -> Iterator[tuple[list[Position], "Group"]]:
        """A loop over the groups of all matrices, of `work` numbers in all: the matrix's index, and the group."""
        with each((*outer, self.groups), work) as (*z, group):
            yield z, Group(self, *taken(group, self.tiles, self.groups))


@dataclass(frozen=True)
class Tile:
    """Queries that go at a time: the number of the tile, that in its group, and the first query."""

    number: Position
    place: Position
    query: Position


@dataclass(frozen=True)
class Group:
    """So many tiles from the `first` on."""

    order: Order
    first: Position
    tiles: Position

    def go(self, visit: Callable[[Tile, Position, int], None], finish: Callable[[Tile], None]) -> None:
        """`visit` every tile with every block, of so many keys, in turn; `finish` each tile after its last block."""
        order = self.order
        last = order.keys - (order.blocks - 1) * order.length
        if order.blocks == 1:
            with self._each() as tile:
                visit(tile, 0, last)
                finish(tile)
            return
        with steps(order.blocks) as block, self._each() as tile:
            rest = functools.partial(visit, tile, block, last)
            if last == order.length:
                rest()
            else:
                when(block < order.blocks - 1, lambda: visit(tile, block, order.length), rest)
        with self._each() as tile:
            finish(tile)

    @contextmanager
    def _each(self) -> Iterator[Tile]:
        order = self.order
        with steps(self.tiles) as place:
            number = vectors.name(self.first + place)
            yield Tile(number, place, vectors.name(tirx.min(number * order.rows, order.queries - order.rows)))


def order_for(profile: Profile, matrices: int, queries: int, rows: int, key: Panels, value: tuple[int, int]) -> Order:
    """The order for so many `matrices`, `rows` queries at a time, with a packed `key` and a value [keys, channels].

    A block's scores fill half of the first cache at most, its keys and values half of the second.
    """
    count, depth, width = key.layout.shape[-3:]
    (keys, channels), size = value, SIZES[profile.stored]
    most, groups = profile.l1 // 2 // (SIZES[FLOAT32] * rows * width), -(-queries // rows)
    pair = size * (depth + channels)
    if keys * pair > profile.l2:
        room, tile = profile.l2 // 2, rows * (size * depth + SIZES[FLOAT32] * channels)
        most = min(most, room // (pair * width))
        groups = parts(groups, matrices, halved=True, most=room // tile)
    return Order(queries, rows, groups, keys, width, panels_in_block(count, max(1, most)))


def panels_in_block(count: int, most: int) -> int:
    """How many of `count` panels of keys make a block: `most` at most, evenly shared.

    No panel, perhaps of few keys, is a block alone, even where that takes more than `most`.
    """
    even = -(-count // -(-count // most))
    return next((block for block in (*range(even, 1, -1), *range(even + 1, count + 1)) if count % block != 1), even)
