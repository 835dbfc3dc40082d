"""Convolutions of each channel by itself.

Where the places of a channel are neighbours, its image is copied with its border into memory of the thread's own, and,
where windows move by several places, with the places that the same element of all windows sees side by side. Then
windows one after the other are neighbours from one row of the output to the next, so that vectors are full however
narrow the image is.

Where the channels of a place are neighbours, as tokens have them, vectors are of channels, and nothing is copied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    address,
    along,
    each,
    evaluate,
    function,
    only_if,
    scratch,
    steps,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value
from attnrewrite.targets.tvm.schedules.cpu.windows import Windows
from attnrewrite.targets.tvm.schedules.expression import Expression, Load, moved
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, Shape

AT_ONCE = 2  # vectors side by side
SUMS = 4  # vectors of sums side by side: fewer would wait for their own last sum
PLACES = 4  # windows in a row that share what they see


@dataclass(frozen=True)
class Depthwise:
    """out[b, c] = epilogue(the windows of image[b, c / `multiplier`] times weight[c]).

    `image` is over [batch, channels, height, width], `weight` over [channels of the output, elements of a window].
    """

    image: Expression
    space: Shape
    windows: Windows
    weight: Load
    multiplier: int
    out: Layout
    epilogue: Expression
    name: str = "depthwise"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _Writer(self, buffers, profile.lanes).write())


class _Writer:
    """The statements of one convolution."""

    def __init__(self, kernel: Depthwise, buffers: Sequence[Any], lanes: int) -> None:
        self.kernel, self.buffers, self.lanes = kernel, buffers, lanes
        *_, self.high, self.wide = kernel.out.shape
        self.reach = kernel.windows.reach((self.high, self.wide))
        self.parts = kernel.windows.stride
        # The copy's planes: one for each place relative to a window's begin, of rows of `pitch`.
        rows, self.pitch = (-(-size // step) for size, step in zip(self.reach, self.parts, strict=True))
        self.plane = rows * self.pitch
        self.length = (self.high - 1) * self.pitch + self.wide
        self.at_once = lanes * min(SUMS, 1 << (-(-self.length // lanes) - 1).bit_length())

    def write(self) -> None:
        batch, channels = self.kernel.out.shape[:2]
        with each((batch, channels), self.kernel.out.size * math.prod(self.kernel.windows.size)) as (image, channel):
            copy = self.copied(image, channel // self.kernel.multiplier)
            sums = scratch(self.length + self.at_once)
            with steps(-(-self.length // self.at_once)) as block:
                begin = block * self.at_once
                vectors.store(sums, begin, self.sum(copy, channel, begin), self.at_once)
            with steps(self.high) as row:

                def put(index: list[Position], at: Position, count: int) -> None:
                    place = (image, channel, row, at)
                    value = vectors.name(vectors.load(sums, row * self.pitch + at, count))
                    write(self.kernel.epilogue, self.buffers, self.kernel.out, place, count, value)

                along((self.wide,), self.lanes, put, AT_ONCE)

    def copied(self, image: Position, channel: Position) -> Any:
        """The channel's image with its border, place by place relative to the begins of windows."""
        size = self.plane * math.prod(self.parts)
        copy = scratch(size + self.at_once)
        along((size + self.at_once,), self.lanes, lambda _, at, n: vectors.store(copy, at, vectors.splat(0.0, n), n))
        top, left, *_ = self.kernel.windows.padding
        height, width = self.kernel.space[2:]
        down, right = self.parts
        with steps(min(height, self.reach[0] - top)) as row:
            placed = row + top
            begin = vectors.name(placed % down * (right * self.plane) + placed // down * self.pitch)
            for part in range(right):
                first = max(0, -(-(left - part) // right))
                source = first * right + part - left
                count = len(range(source, min(width, self.reach[1] - left), right))
                if count > 0:
                    seen = moved(self.kernel.image, lambda it, at=source, n=count: it.narrow(3, at, n, right))  # type: ignore[misc]
                    assert seen is not None
                    into = begin + part * self.plane + first
                    self.copy_row(seen, copy, into, (image, channel, row), count)
        return copy

    def copy_row(self, seen: Expression, copy: Any, into: Position, place: Sequence[Position], count: int) -> None:
        def move(_: list[Position], at: Position, lanes: int) -> None:
            vectors.store(copy, into + at, evaluate(seen, self.buffers, (*place, at), lanes), lanes)

        along((count,), self.lanes, move, AT_ONCE)

    def sum(self, copy: Any, channel: Position, begin: Position) -> Value:
        """The windows' elements from a place of the output on, each times its weight."""
        windows, weight = self.kernel.windows, self.kernel.weight
        (down, right), (lower, farther) = self.parts, windows.dilation
        total: Value = vectors.splat(0.0, self.at_once)
        for number, (row, column) in enumerate(np.ndindex(*windows.size)):
            y, x = int(row) * lower, int(column) * farther
            place = (y % down * right + x % right) * self.plane + y // down * self.pitch + x // right
            factor = self.buffers[weight.argument][address(weight.layout, (channel, number))]
            seen = vectors.load(copy, begin + place, self.at_once)
            total = vectors.name(total + seen * vectors.splat(factor, self.at_once))
        return total


@dataclass(frozen=True)
class DepthwiseTokens:
    """out[b, y, x] = epilogue(the window of image[b] at y, x times weight), channel by channel.

    `image` is over [batch, height, width, channels], `weight` over [elements of a window, channels].
    """

    image: Load
    windows: Windows
    weight: Load
    out: Layout
    epilogue: Expression
    name: str = "depthwise"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        return function(arguments, lambda *buffers: _TokensWriter(self, buffers, profile.lanes).write())


class _TokensWriter:
    """The statements of one convolution over tokens, a row of the output at a time."""

    def __init__(self, kernel: DepthwiseTokens, buffers: Sequence[Any], lanes: int) -> None:
        self.kernel, self.buffers, self.lanes = kernel, buffers, lanes
        self.size, self.stride, self.dilation = kernel.windows.size, kernel.windows.stride, kernel.windows.dilation
        self.padding = kernel.windows.padding[:2]
        _, *self.space, self.channels = kernel.image.layout.shape

    def write(self) -> None:
        batch, high, wide, _ = self.kernel.out.shape
        with each((batch, high), self.kernel.out.size * math.prod(self.size)) as (image, row):
            place = 0
            for elements, run in groupby(range(wide), lambda column: self.inside(1, column)):
                end = place + len(list(run))
                full = (end - place) // PLACES
                if full:
                    with steps(full) as tile:
                        self.tiles((image, row, place + tile * PLACES), PLACES, elements)
                if place + full * PLACES < end:
                    begin = place + full * PLACES
                    self.tiles((image, row, begin), end - begin, elements)
                place = end

    def tiles(self, at: Sequence[Position], count: int, columns: Sequence[int]) -> None:
        """All channels of `count` places in a row: neighbours in memory, as places often are whole pages apart."""

        def block(_: list[Position], channel: Position, lanes: int) -> None:
            self.tile((*at, channel), count, columns, lanes)

        along((self.channels,), self.lanes, block, AT_ONCE)

    def inside(self, axis: int, place: int) -> tuple[int, ...]:
        """The elements of the window at a place of the output, along an axis, that lie in the image."""
        begin = place * self.stride[axis] - self.padding[axis]
        return tuple(
            element
            for element in range(self.size[axis])
            if 0 <= begin + element * self.dilation[axis] < self.space[axis]
        )

    def tile(self, at: Sequence[Position], count: int, columns: Sequence[int], lanes: int) -> None:
        """`count` places in a row, whose windows see the same `columns`, for `lanes` channels."""
        image, row, column, channel = at
        sums = scratch(count * lanes)
        for number in range(count):
            vectors.store(sums, number * lanes, vectors.splat(0.0, lanes), lanes)
        for element in range(self.size[0]):
            y = row * self.stride[0] - self.padding[0] + element * self.dilation[0]

            def add(y: Position = y, element: int = element) -> None:
                x = column * self.stride[1] - self.padding[1]
                self.add_row(sums, (image, y, x, channel), element, count, columns, lanes)

            seen = [element in self.inside(0, place) for place in range(self.kernel.out.shape[1])]
            if all(seen):
                add()
            elif any(seen):
                only_if(T.And(y >= 0, y < self.space[0]), add)
        for number in range(count):
            place = (image, row, column + number, channel)
            value = vectors.name(vectors.load(sums, number * lanes, lanes))
            write(self.kernel.epilogue, self.buffers, self.kernel.out, place, lanes, value)

    def add_row(
        self, sums: Any, at: Sequence[Position], row: int, count: int, columns: Sequence[int], lanes: int
    ) -> None:
        """A row of the windows' elements, from the place that the first window begins at."""
        image, y, x, channel = at
        weight, seen = self.kernel.weight, {}
        totals = [vectors.name(vectors.load(sums, number * lanes, lanes)) for number in range(count)]
        for column in columns:
            place = (row * self.size[1] + column, channel)
            factor = vectors.name(vectors.load(self.buffers[weight.argument], address(weight.layout, place), lanes))
            for number in range(count):
                step = number * self.stride[1] + column * self.dilation[1]
                if step not in seen:
                    seen[step] = evaluate(self.kernel.image, self.buffers, (image, y, x + step, channel), lanes)
                totals[number] = vectors.name(totals[number] + seen[step] * factor)
        for number, total in enumerate(totals):
            vectors.store(sums, number * lanes, total, lanes)
