"""Winograd's transforms: what tiles of an image, of weights and of sums are taken to, so that products are fewer.

A line of m + 2 places times three weights at m places is the product of two polynomials, known by its values at m + 2
points: so many products instead of 3 m (Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016).
Which points those are decides what is lost to rounding (Barabasz et al., "Error analysis and improving the accuracy of
Winograd convolution for deep neural networks", 2020).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.vectors import Value


@dataclass(frozen=True)
class Scheme:
    """F(m x m, 3 x 3), m twice the number of `pairs`: points and their negatives, beside 0 and infinity."""

    pairs: tuple[float, ...]

    @property
    def places(self) -> int:
        """m: places of the output on a side of a tile."""
        return 2 * len(self.pairs)

    @property
    def size(self) -> int:
        """Places of the image on a side of a tile."""
        return self.places + 2

    def of_image(self, line: Sequence[Value]) -> list[Value]:
        """A line of an image's tile, transformed."""
        whole = self._roots()
        found = [_combined(whole, line[0::2])]
        for point in self.pairs:
            # (x^2 + point x) rest(x^2) and its mirror: the same even powers, and the same odd ones with another sign.
            rest = self._roots(but=point)
            even, odd = _combined(rest, line[2::2]), _times(point, _combined(rest, line[1:-1:2]))
            found += [vectors.name(even + odd), vectors.name(even - odd)]
        return [*found, _combined(whole, line[1::2])]

    def of_sums(self, line: Sequence[Value]) -> list[Value]:
        """The line of the output that a line of sums is the transform of."""
        at_zero, *pairs, at_infinity = line
        beside = list(zip(pairs[::2], pairs[1::2], strict=True))
        even = [vectors.name(one + other) for one, other in beside]
        odd = [vectors.name(one - other) for one, other in beside]
        found = [_combined([1.0, *(1.0 for _ in even)], [at_zero, *even])]
        for power in range(1, self.places):
            found.append(_combined([point**power for point in self.pairs], odd if power % 2 else even))
        found[-1] = vectors.name(found[-1] + at_infinity)
        return found

    def of_weights(self, weight: np.ndarray) -> np.ndarray:
        """Weights [channels, depth, 3, 3] as [size^2, depth, channels], in float32."""
        rows = [np.array([1.0, 0.0, 0.0]) / math.prod(-(point**2) for point in self.pairs)]
        for point in self.pairs:
            slope = 2 * point**2 * math.prod(point**2 - other**2 for other in self.pairs if other != point)
            rows += [np.array([1.0, each, each**2]) / slope for each in (point, -point)]
        matrix = np.array([*rows, np.array([0.0, 0.0, 1.0])])
        found = np.einsum("yi,coij,xj->yxoc", matrix, weight.astype(np.float64), matrix, optimize=True)
        return found.reshape(-1, *found.shape[2:]).astype(np.float32)

    def _roots(self, but: float | None = None) -> list[float]:
        """Coefficients, the constant one first, of the polynomial in x^2 that is 0 at all pairs, `but` one."""
        made = np.poly([point**2 for point in self.pairs if point != but])
        return [float(each) for each in np.atleast_1d(made)[::-1]]


def both_ways(
    line: Callable[[Sequence[Value]], list[Value]], at: Callable[[int, int], Value], size: int
) -> Iterator[Value]:
    """What a transform of lines makes of the columns of a square of `size`, and then of the rows, one after the other:
    whoever stores them as they come leaves few in registers.
    """
    columns = [line([vectors.name(at(y, x)) for y in range(size)]) for x in range(size)]
    for row in zip(*columns, strict=True):
        yield from line(row)


def _times(factor: float, value: Value) -> Value:
    return value if factor == 1 else value * vectors.splat(factor, vectors.lanes_of(value))


def _combined(factors: Sequence[float], values: Sequence[Value]) -> Value:
    """sum_i factors[i] values[i], a value of factor 1 first, so that each of the others is one multiply-add."""
    first, *rest = sorted(zip(factors, values, strict=True), key=lambda each: each[0] != 1)
    total = _times(*first)
    for factor, value in rest:
        total = total - value if factor == -1 else total + _times(factor, value)
    return vectors.name(total)
