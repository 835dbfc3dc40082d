"""Kernels that see whole rows: normalisation and softmax. A row is held in memory of the thread's own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    across,
    address,
    along,
    each,
    evaluate,
    function,
    registers,
    scratch,
)
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value
from attnrewrite.targets.tvm.schedules.expression import Expression
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.view import Layout, Shape

NEGLIGIBLE = -80.0  # softmax: less than e^-80 of the largest is nothing, and no number near the denormal ones either
MOST_AT_ONCE = 4  # registers of sums side by side


@dataclass(frozen=True)
class Normalise:
    """out = epilogue(x / sqrt(mean(x^2) + epsilon)) over the last `rank` axes, x less its mean first where `centred`.

    `value` is x; it, `out` and the epilogue's loads have the same shape.
    """

    rank: int
    centred: bool
    epsilon: float
    value: Expression
    out: Layout
    epilogue: Expression
    name: str = "normalise"

    def build(self, shapes: Sequence[Shape], profile: Profile) -> Any:
        outer, inner = self.out.shape[: -self.rank], self.out.shape[-self.rank :]
        count = math.prod(inner)

        def body(*buffers: Any) -> None:
            with each(outer, self.out.size) as z:
                row = scratch(count)

                def read(index: list[Position], at: Position, lanes: int) -> Value:
                    value = evaluate(self.value, buffers, (*z, *index), lanes)
                    vectors.store(row, at, value, lanes)
                    return value

                def keep(index: list[Position], at: Position, lanes: int) -> None:
                    read(index, at, lanes)

                def square(index: list[Position], at: Position, lanes: int) -> Value:
                    value = vectors.name(vectors.load(row, at, lanes) - vectors.splat(mean, lanes))
                    return value * value

                if self.centred:
                    mean = vectors.name(total(inner, profile.lanes, read) / vectors.splat(float(count), 1))
                else:
                    mean = vectors.splat(0.0, 1)
                    along(inner, profile.lanes, keep)
                variance = total(inner, profile.lanes, square) / vectors.splat(float(count), 1)
                factor = vectors.name(vectors.OPERATIONS["rsqrt"](variance + vectors.splat(self.epsilon, 1)))

                def write(index: list[Position], at: Position, lanes: int) -> None:
                    value = vectors.load(row, at, lanes) - vectors.splat(mean, lanes)
                    put(self, buffers, (*z, *index), lanes, vectors.name(value * vectors.splat(factor, lanes)))

                along(inner, profile.lanes, write)

        return function(shapes, body)


@dataclass(frozen=True)
class Softmax:
    """out = epilogue(softmax of value along the last axis); all of the same shape."""

    value: Expression
    out: Layout
    epilogue: Expression
    name: str = "softmax"

    def build(self, shapes: Sequence[Shape], profile: Profile) -> Any:
        *outer, count = self.out.shape

        def body(*buffers: Any) -> None:
            with each(outer, self.out.size) as z:
                row = scratch(count)

                def read(index: list[Position], at: Position, lanes: int) -> Value:
                    value = evaluate(self.value, buffers, (*z, *index), lanes)
                    vectors.store(row, at, value, lanes)
                    return value

                largest = fold((count,), profile.lanes, read, -math.inf, vectors.maximum)

                def raised(index: list[Position], at: Position, lanes: int) -> Value:
                    value = vectors.load(row, at, lanes) - vectors.splat(largest, lanes)
                    power = vectors.exp(vectors.name(value), NEGLIGIBLE)
                    vectors.store(row, at, power, lanes)
                    return power

                share = vectors.name(vectors.splat(1.0, 1) / total((count,), profile.lanes, raised))

                def write(index: list[Position], at: Position, lanes: int) -> None:
                    value = vectors.name(vectors.load(row, at, lanes) * vectors.splat(share, lanes))
                    put(self, buffers, (*z, *index), lanes, value)

                along((count,), profile.lanes, write)

        return function(shapes, body)


def put(kernel: Normalise | Softmax, buffers: Sequence[Any], index: Sequence[Position], lanes: int, value: Any) -> None:
    """Write the kernel's result at a place, after its epilogue."""
    value = evaluate(kernel.epilogue, buffers, index, lanes, value)
    vectors.store(buffers[-1], address(kernel.out, index), value, lanes, kernel.out.strides[-1])


def total(shape: Sequence[int], lanes: int, value: Callable[[list[Position], Position, int], Value]) -> Value:
    """The sum of `value` along a row."""
    return fold(shape, lanes, value, 0.0, lambda one, other: one + other)


def fold(
    shape: Sequence[int],
    lanes: int,
    value: Callable[[list[Position], Position, int], Value],
    start: float,
    combine: Callable[[Value, Value], Value],
) -> Value:
    """`value` at each place of a row, visited by vectors, combined to one number."""
    wide = MOST_AT_ONCE
    while wide > 1 and shape[-1] < lanes * wide:
        wide //= 2
    held = registers(lanes * wide)
    vectors.store(held, 0, vectors.splat(start, lanes * wide), lanes * wide)

    def visit(index: list[Position], at: Position, count: int) -> None:
        found = vectors.name(value(index, at, count))
        vectors.store(held, 0, combine(vectors.load(held, 0, count), found), count)

    along(shape, lanes, visit, wide)
    return across(vectors.load(held, 0, lanes * wide), lanes * wide, combine)
