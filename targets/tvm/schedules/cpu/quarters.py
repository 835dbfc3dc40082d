"""Strassen's algorithm in Winograd's form: a product of matrices out of seven products of sums of their quarters, and
so on in each of them, as data: the factors, and the steps that make the product out of theirs in tiles of memory.

Seven products and fifteen sums, four of them of the left operand, four of the right one (Strassen 1969, Gaussian
elimination is not optimal; in Winograd's form, 1971, as https://en.wikipedia.org/wiki/Strassen_algorithm has it).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Block = Any  # what can be added and subtracted: an array, or a TIR vector
Seeds = list[tuple[int, ...]]  # for each tile those whose sum it begins with


@dataclass(frozen=True)
class Step:
    """Tile `into` = the sum of tiles `seeds` + the next product; then, one after the other, tile `after[i][1]` = what
    was made last + tile `after[i][0]`.
    """

    seeds: tuple[int, ...]
    into: int
    after: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Scheme:
    """The algorithm with quarters of quarters, `levels` deep."""

    levels: int

    @property
    def side(self) -> int:
        """Blocks along a side of a matrix."""
        return 2**self.levels

    @property
    def products(self) -> int:
        return 7**self.levels

    @property
    def zero(self) -> int:
        """The tile that is to hold zeros; those before it are the blocks of the product, row by row."""
        return self.side**2

    @property
    def tiles(self) -> int:
        """Tiles of memory that the steps use."""
        return self._made.tiles

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._made.steps

    @functools.cached_property
    def _made(self) -> "_Steps":
        made = _Steps(self.zero)
        made.product([()] * self.zero, places(self.side))
        return made

    def of_weights(self, weights: np.ndarray) -> np.ndarray:
        """The right factors [products, depth / side, columns / side] of [depth, columns], in float64."""
        blocks = weights.astype(np.float64)[None]
        for _ in range(self.levels):
            quarters = (quarter for half in np.split(blocks, 2, axis=1) for quarter in np.split(half, 2, axis=2))
            factors = right_factors(*quarters)
            blocks = np.stack(factors, axis=1).reshape(-1, *factors[0].shape[1:])
        return blocks


def places(side: int) -> list[int]:
    """The numbers, row by row, of blocks that are counted quarter after quarter."""
    if side == 1:
        return [0]
    half = side // 2
    inner = [divmod(place, half) for place in places(half)]
    return [(y * half + i) * side + x * half + j for y in range(2) for x in range(2) for i, j in inner]


# The factors of the seven products, in the order in which `_Steps.product` has them.
def left_factors(
    a11: Block, a12: Block, a21: Block, a22: Block, keep: Callable[[Block], Block] = lambda block: block
) -> list[Block]:
    """`keep` gives what is read more than once a name."""
    s1 = keep(a21 + a22)
    s2 = keep(s1 - a11)
    return [a11, a12, s2, a11 - a21, a22, s1, a12 - s2]


def right_factors(b11: Block, b12: Block, b21: Block, b22: Block) -> list[Block]:
    t1 = b12 - b11
    t2 = b22 - t1
    return [b11, b21, t2, b22 - b12, b21 - t2, t1, b22]


class _Steps:
    """Steps as they are put together, and the tiles that they take."""

    def __init__(self, zero: int) -> None:
        self.zero, self.tiles, self.free = zero, zero + 1, list[int]()
        self.begun: list[tuple[tuple[int, ...], int]] = []
        self.after: list[list[tuple[int, int]]] = []
        self.maker: dict[int, int] = {}  # of a tile: the step that made it last

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(Step(*begun, tuple(after)) for begun, after in zip(self.begun, self.after, strict=True))

    def product(self, seeds: Seeds, into: list[int]) -> None:
        """Tiles `into` = the sums of `seeds` + a product. A tile may be a seed of what is made in it."""
        if len(into) == 1:
            self.maker[into[0]] = len(self.begun)
            self.begun.append((seeds[0] or (self.zero,), into[0]))
            self.after.append([])
            return
        size = len(into) // 4
        quarters = [slice(begin, begin + size) for begin in range(0, len(into), size)]
        s11, s12, s21, s22 = (seeds[quarter] for quarter in quarters)
        c11, c12, c21, c22 = (into[quarter] for quarter in quarters)
        none: Seeds = [()] * size
        one, other = self.taken(size), self.taken(size)
        self.product(none, one)  # a11 b11
        self.product(_joined(s11, one), c11)  # a12 b21
        self.product(_joined(none, one), one)  # s2 t2
        self.product(none, other)  # (a11 - a21) (b22 - b12)
        self.product(_joined(s21, one, other), c21)  # a22 (b21 - t2)
        self.product(_joined(none, one), one)  # s1 t1
        for ends in zip(one, other, s22, c22, strict=True):
            self.add(*ends)
        self.product(_joined(s12, one), c12)  # (a12 - s2) b22
        self.free += [*one, *other]

    def add(self, made: int, other: int, seeds: tuple[int, ...], into: int) -> None:
        """Tile `into` = tile `made` + `other` + `seeds`, by the step that has just made the first of them."""
        self.maker[into] = self.maker[made]
        # What is a seed and written to is read first.
        read = (*sorted(seeds, key=lambda seed: seed != into), other)
        self.after[self.maker[made]] += [(each, into) for each in read]

    def taken(self, count: int) -> list[int]:
        """Tiles that hold nothing that is still read."""
        while len(self.free) < count:
            self.free.append(self.tiles)
            self.tiles += 1
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def _joined(seeds: Seeds, *tiles: list[int]) -> Seeds:
    return [(*seed, *more) for seed, *more in zip(seeds, *tiles, strict=True)]
