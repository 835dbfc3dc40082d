"""Strassen's algorithm in Winograd's form, as data.

A product of matrices that are cut into quarters takes seven products of sums of quarters, where it would take eight
products of quarters; each of the seven may be cut again (`Scheme.levels`). A *factor* is such a sum, of one operand's
quarters. The steps add the products up to the result, in *tiles* of memory.

Fifteen sums a level: four of the left operand's quarters, four of the right one's, seven of products (Strassen 1969,
Gaussian elimination is not optimal; Winograd's form, 1971, as https://en.wikipedia.org/wiki/Strassen_algorithm has it).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Block = Any  # what can be added and subtracted: an array, or a TIR vector
Seeds = list[tuple[int, ...]]  # for each tile that is made, the tiles whose sum the product is added to


@dataclass(frozen=True)
class Step:
    """One of the products: tile `into` = the sum of tiles `seeds` + the product; then, for each (other, made) of
    `after` in order, tile `made` = what was made last + tile `other`.
    """

    seeds: tuple[int, ...]
    into: int
    after: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Scheme:
    """The algorithm `levels` deep: with 2, of quarters of quarters."""

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
        """The number of the tile that holds zeros; the tiles before it are the blocks of the result, row by row."""
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
    """The row-major numbers of a matrix's blocks, in the order quarter by quarter, and so on within each quarter."""
    if side == 1:
        return [0]
    half = side // 2
    inner = [divmod(place, half) for place in places(half)]
    return [(y * half + i) * side + x * half + j for y in range(2) for x in range(2) for i, j in inner]


def left_factors(
    a11: Block, a12: Block, a21: Block, a22: Block, keep: Callable[[Block], Block] = lambda block: block
) -> list[Block]:
    """The left factors of the seven products; `keep` gives a name to what is read more than once."""
    s1 = keep(a21 + a22)
    s2 = keep(s1 - a11)
    return [a11, a12, s2, a11 - a21, a22, s1, a12 - s2]


def right_factors(b11: Block, b12: Block, b21: Block, b22: Block) -> list[Block]:
    """The right factors, in the same order, which `_Steps.product` has too."""
    t1 = b12 - b11
    t2 = b22 - t1
    return [b11, b21, t2, b22 - b12, b21 - t2, t1, b22]


class _Steps:
    """Puts the steps together, and numbers the tiles that they need."""

    def __init__(self, zero: int) -> None:
        self.zero, self.tiles, self.free = zero, zero + 1, list[int]()
        self.begun: list[tuple[tuple[int, ...], int]] = []
        self.after: list[list[tuple[int, int]]] = []
        self.maker: dict[int, int] = {}  # of a tile: the step that made it last

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(Step(*begun, tuple(after)) for begun, after in zip(self.begun, self.after, strict=True))

    def product(self, seeds: Seeds, into: list[int]) -> None:
        """Make tiles `into` the sums of `seeds` + a product. A tile may be a seed of what is made in it."""
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
        """Make tile `into` the sum of tiles `made`, `other` and `seeds`, as part of the step that made `made` last."""
        self.maker[into] = self.maker[made]
        # A seed that is `into` itself is read first, before it is written over.
        read = (*sorted(seeds, key=lambda seed: seed != into), other)
        self.after[self.maker[made]] += [(each, into) for each in read]

    def taken(self, count: int) -> list[int]:
        """`count` tiles that hold nothing that is still to be read."""
        while len(self.free) < count:
            self.free.append(self.tiles)
            self.tiles += 1
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def _joined(seeds: Seeds, *tiles: list[int]) -> Seeds:
    return [(*seed, *more) for seed, *more in zip(seeds, *tiles, strict=True)]
