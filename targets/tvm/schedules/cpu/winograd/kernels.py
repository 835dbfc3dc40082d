"""Kernels of Winograd's algorithm: tiles of an image are transformed, products of them with weights summed over the
channels, one for each place in a tile, and the sums transformed to the output, by tasks of some rows of tiles.

Vectors are of channels as tiles are transformed, whatever the image's width. Where an image has places as neighbours,
squares of places and channels are transposed on the way in and out.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    FIRST_CACHE,
    SECOND_CACHE,
    by_pairs,
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
from attnrewrite.targets.tvm.schedules.cpu.operands import ROWS_AHEAD
from attnrewrite.targets.tvm.schedules.cpu.product import CACHE_LINE
from attnrewrite.targets.tvm.schedules.cpu.register_tile import RegisterTile, along_rows
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, covering
from attnrewrite.targets.tvm.schedules.cpu.winograd.transforms import Scheme, both_ways
from attnrewrite.targets.tvm.schedules.expression import Expression, loads, ordered
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, SIZES, Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape

CHANNELS_LAST = (0, 2, 3, 1)
IN_LINE = CACHE_LINE // SIZES[FLOAT32]


@contextmanager
def pieces(length: int, lanes: int) -> Iterator[tuple[Position, int]]:
    """A loop over the vectors of `covering`: where one begins, and its lanes."""
    begins = covering(length, lanes)
    wide = begins[0][1]
    with steps(len(begins)) as piece:
        yield vectors.name(tirx.min(piece * wide, length - wide)), wide


@dataclass(frozen=True)
class Grid:
    """How an output of `height` x `width` is cut into tiles of `places` on a side, `down` rows of them for a task."""

    height: int
    width: int
    places: int
    down: int

    @property
    def rows(self) -> int:
        return -(-self.height // self.places)

    @property
    def across(self) -> int:
        return -(-self.width // self.places)

    @property
    def blocks(self) -> int:
        """Tasks: the last one ends with the last row, and may do some of the one before again."""
        return -(-self.rows // self.down)

    @property
    def tiles(self) -> int:
        """Tiles of a task."""
        return self.down * self.across

    def first(self, block: Position) -> Position:
        """The first row of the output that a task does."""
        return vectors.name(tirx.min(block * self.down, self.rows - self.down) * self.places)


@dataclass(frozen=True)
class Tiles:
    """The transformed tiles [batch, blocks, size^2, tiles, depth] of an image, `value` over [batch, depth, height,
    width], of which `padding` are the zeros above and before it.
    """

    scheme: Scheme
    grid: Grid
    value: Expression
    space: Shape
    padding: tuple[int, int]
    name: str = "tiles"

    @property
    def shape(self) -> Shape:
        return self.space[0], self.grid.blocks, self.scheme.size**2, self.grid.tiles, self.space[1]

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        def body(*buffers: Any) -> None:
            batch, blocks, *block_shape = self.shape
            write = TilesWriter(self, buffers, profile)
            with each((batch, blocks, write.chunks), math.prod(self.shape)) as (image, block, chunk):
                begin = vectors.name((image * blocks + block) * math.prod(block_shape))
                write.chunk(image, self.grid.first(block), chunk, buffers[-1], begin)

        return function(arguments, body)


class TilesWriter:
    """The statements that transform a task's tiles, as many channels at a time as a vector has lanes."""

    def __init__(self, tiles: Tiles, buffers: Sequence[Any], profile: Profile) -> None:
        self.made, self.buffers, self.scheme, self.grid = tiles, buffers, tiles.scheme, tiles.grid
        self.depth, self.height, self.width = tiles.space[1:]
        self.lanes = covering(self.depth, profile.lanes)[0][1]
        self.chunks = -(-self.depth // self.lanes)
        self.seen_rows = self.grid.places * self.grid.down + 2
        self.pitch = self.grid.places * self.grid.across + 2

    def chunk(self, image: Position, first: Position, number: Position, into: Any, begin: Position) -> None:
        """The tiles of a task whose output begins in row `first`, written from `begin` on."""
        channel = vectors.name(tirx.min(number * self.lanes, self.depth - self.lanes))
        copy = self.copied(image, first, channel)
        with steps(self.grid.down) as row, steps(self.grid.across) as column:
            at = vectors.name((row * self.pitch + column) * (self.grid.places * self.lanes))

            def seen(y: int, x: int, at: Position = at) -> Value:
                return vectors.load(copy, at + (y * self.pitch + x) * self.lanes, self.lanes)

            place = vectors.name(begin + (row * self.grid.across + column) * self.depth + channel)
            for number, value in enumerate(both_ways(self.scheme.of_image, seen, self.scheme.size)):
                vectors.store(into, place + number * self.grid.tiles * self.depth, value, self.lanes)

    def copied(self, image: Position, first: Position, channel: Position) -> Any:
        """What the tiles see of some channels, with its border: [rows, columns, channels]."""
        top, left = self.made.padding
        copy = scratch(self.seen_rows * self.pitch * self.lanes)
        with steps(self.seen_rows) as row:
            y, begin = vectors.name(first + row - top), vectors.name(row * (self.pitch * self.lanes))

            def blank(x: Position) -> None:
                vectors.store(copy, begin + x * self.lanes, vectors.splat(0.0, self.lanes), self.lanes)

            def fill() -> None:
                for x in (*range(left), *range(left + self.width, self.pitch)):
                    blank(x)
                self.row((image, channel, y), copy, begin + left * self.lanes)

            def empty() -> None:
                with steps(self.pitch) as x:
                    blank(x)

            when(tirx.all(y >= 0, y < self.height), fill, empty)
        return copy

    def row(self, at: Sequence[Position], copy: Any, begin: Position) -> None:
        """A row of the image, from some channel on, copied from `begin` on."""
        image, channel, y = at
        value = self.made.value
        if all(load.layout.strides[1] == 1 for load in loads(value)):
            turned = ordered(value, CHANNELS_LAST)
            with steps(self.width) as x:
                vector = evaluate(turned, self.buffers, (image, y, x, channel), self.lanes)
                vectors.store(copy, begin + x * self.lanes, vector, self.lanes)
            return
        with pieces(self.width, self.lanes) as (x, side):
            for group in range(0, self.lanes, side):
                lines = [evaluate(value, self.buffers, (image, channel + (group + i), y, x), side) for i in range(side)]
                for i, vector in enumerate(vectors.transposed(lines)):
                    vectors.store(copy, begin + (x + i) * self.lanes + group, vector, side)


@dataclass(frozen=True)
class Winograd:
    """out[b, c] = epilogue(the 3 x 3 windows of image[b] times weight[b modulo `groups`, c]).

    The argument `weight` has Scheme.of_weights in panels [groups, panels, size^2, depth, tile.columns], the last of
    which ends with the last channel. `tiles` are the image's: the argument `given`, or made by each task for itself
    where that is None.
    """

    tiles: Tiles
    given: int | None
    weight: int
    groups: int
    out: Layout
    epilogue: Expression
    tile: Tile
    name: str = "winograd"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile).write())


class _Writer:
    """The statements of one convolution."""

    def __init__(self, kernel: Winograd, buffers: Sequence[Any], profile: Profile) -> None:
        self.kernel, self.buffers, self.profile = kernel, buffers, profile
        self.scheme, self.grid, self.depth = kernel.tiles.scheme, kernel.tiles.grid, kernel.tiles.space[1]
        self.channels = kernel.out.shape[1]
        self.high, self.wide = kernel.tile.rows, kernel.tile.columns
        self.pieces = covering(self.wide, profile.lanes)
        self.lanes = self.pieces[0][1]

    def write(self) -> None:
        batch, blocks, *block_shape = self.kernel.tiles.shape
        panels, work = -(-self.channels // self.wide), math.prod(self.kernel.tiles.shape) * self.channels
        given, count = self.kernel.given, self.scheme.size**2 * self.grid.tiles
        with each((batch, blocks, 1 if given is None else panels), work) as (image, block, part):
            first = self.grid.first(block)
            if given is None:
                seen, begin = self.transformed(image, first), 0
            else:
                seen, begin = self.buffers[given], vectors.name((image * blocks + block) * math.prod(block_shape))
            sums = scratch(count * self.wide)
            with steps(panels if given is None else 1) as step:
                panel = part + step
                self.multiply(vectors.name(image % self.kernel.groups * panels + panel), seen, begin, sums)
                self.finish(image, first, vectors.name(tirx.min(panel * self.wide, self.channels - self.wide)), sums)

    def transformed(self, image: Position, first: Position) -> Any:
        write = TilesWriter(self.kernel.tiles, self.buffers, self.profile)
        seen = scratch(self.scheme.size**2 * self.grid.tiles * self.depth)
        with steps(write.chunks) as chunk:
            write.chunk(image, first, chunk, seen, 0)
        return seen

    def multiply(self, panel: Position, seen: Any, begin: Position, sums: Any) -> None:
        """sums[number, tile, channel of the panel], a product for each number of a place in a tile."""
        count, size = self.grid.tiles, self.depth * self.wide
        with steps(self.scheme.size**2) as number:
            weights = vectors.name((panel * self.scheme.size**2 + number) * size)
            with steps(-(-count // self.high)) as group:
                row = vectors.name(number * count + tirx.min(group * self.high, count - self.high))
                left = vectors.name(begin + row * self.depth)

                def load(i: int, k: Position, n: int, left: Position = left) -> Value:
                    return vectors.load(seen, left + (i * self.depth + k), n)

                tile = RegisterTile(self.high, self.pieces, self.profile)
                multipliers = along_rows(self.high, load, self.profile, self.profile.by_lane)
                tile.multiply(self.depth, multipliers, self.weights(weights, size))
                for i in range(self.high):
                    for (column, lanes), (at, _) in zip(self.pieces, tile.vectors, strict=True):
                        vectors.store(sums, (row + i) * self.wide + column, tile.value(i, at, lanes), lanes)

    def weights(self, begin: Position, size: int) -> Any:
        """How rows of a panel are read: asked for before their turn, and what is multiplied next beside them."""
        buffer = self.buffers[self.kernel.weight]

        def row(k: Position, first: int, lanes: int) -> Value:
            at = begin + k * self.wide
            if first == 0 and not self.profile.by_lane:
                for line in range(0, self.wide, IN_LINE):
                    prefetch(buffer, at + ROWS_AHEAD * self.wide + line, FIRST_CACHE)
                    prefetch(buffer, at + size + line, SECOND_CACHE)
            return vectors.load(buffer, at + first, lanes)

        return row

    def finish(self, image: Position, first: Position, channel: Position, sums: Any) -> None:
        """The output out of its sums, as many channels at a time as a vector has lanes, and what follows it."""
        places, lanes, size = self.grid.places, self.lanes, self.scheme.size
        pitch = places * self.grid.across
        made = scratch(places * self.grid.down * pitch * lanes)
        with steps(len(self.pieces)) as piece:
            begin = vectors.name(tirx.min(piece * lanes, self.wide - lanes))
            with steps(self.grid.down) as row, steps(self.grid.across) as column:
                at = vectors.name((row * self.grid.across + column) * self.wide + begin)

                def sum_(y: int, x: int, at: Position = at) -> Value:
                    return vectors.load(sums, at + (y * size + x) * self.grid.tiles * self.wide, lanes)

                into = vectors.name((row * pitch + column) * (places * lanes))
                for number, value in enumerate(both_ways(self.scheme.of_sums, sum_, size)):
                    y, x = divmod(number, places)
                    vectors.store(made, into + (y * pitch + x) * lanes, value, lanes)
            with steps(places * self.grid.down) as row:
                place = (image, vectors.name(channel + begin), vectors.name(first + row))

                def put(place: Sequence[Position] = place, line: Position = row * (pitch * lanes)) -> None:
                    self.put(made, line, place)

                if self.grid.height % places:
                    only_if(place[2] < self.grid.height, put)
                else:
                    put()

    def put(self, made: Any, begin: Position, at: Sequence[Position]) -> None:
        """What follows a row of the output, and where it is written: `at` an image, a channel and a row."""
        out, epilogue = self.kernel.out, self.kernel.epilogue
        (image, channel, y), width, lanes = at, self.grid.width, self.lanes
        if out.strides[1] == 1:
            turned, after = out.permute(CHANNELS_LAST), ordered(epilogue, CHANNELS_LAST)

            def place(x: Position) -> None:
                value = vectors.name(vectors.load(made, begin + x * lanes, lanes))
                self.store(turned, after, (image, y, x, channel), value, lanes)

            by_pairs(width, place)
            return
        rows = scratch(lanes * width)
        with pieces(width, lanes) as (x, side):
            for group in range(0, lanes, side):
                places = [vectors.name(vectors.load(made, begin + (x + i) * lanes + group, side)) for i in range(side)]
                for i, value in enumerate(vectors.transposed(places)):
                    vectors.store(rows, (group + i) * width + x, value, side)
        with pieces(width, self.profile.lanes) as (x, wide):

            def line(i: Position) -> None:
                value = vectors.name(vectors.load(rows, i * width + x, wide))
                self.store(out, epilogue, (image, channel + i, y, x), value, wide)

            by_pairs(lanes, line)

    def store(self, out: Layout, epilogue: Expression, index: Sequence[Position], value: Value, lanes: int) -> None:
        write(epilogue, self.buffers, out, index, lanes, value)
