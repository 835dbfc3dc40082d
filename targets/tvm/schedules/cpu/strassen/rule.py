"""Products with weights by Strassen's algorithm, where that takes fewer instructions than to multiply directly.

A level makes seven eighths of the multiply-adds, out of weights that are 7 / 4 as large in the library, and about
doubles the error: in float32, of normal numbers, the root mean square is 1.9 times that of direct products with one
level and 3.6 times with two, the largest error 1.1 and 1.9 times.
"""

import functools
import math
from dataclasses import replace

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly, is_shared, without
from attnrewrite.targets.tvm.schedules.cpu.matmul import Factors, factors
from attnrewrite.targets.tvm.schedules.cpu.operands import READ_WEIGHT
from attnrewrite.targets.tvm.schedules.cpu.packing import rounded
from attnrewrite.targets.tvm.schedules.cpu.register_tile import PACKING, best_bands, cycles, step_cycles
from attnrewrite.targets.tvm.schedules.cpu.strassen.algorithm import Scheme
from attnrewrite.targets.tvm.schedules.cpu.strassen.kernels import FIELDS, Grouping, LeftFactors, Strassen
from attnrewrite.targets.tvm.schedules.expression import Arguments, Expression, Leaf, joined
from attnrewrite.targets.tvm.schedules.graph import shape, strided
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View

MOST_LEVELS = 2
MOST_BYTES = 4 * 2**20  # of a product's weights in the library: large models would grow by more than they gain
# Instructions, counted by hand on DeiT-Tiny's products: to sum a number of the left operand on a level, and around a
# product of tiles beside those of its vectors.
SUMS, AROUND = 0.8, 50


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    found = factors(call)
    if isinstance(found, Refusal) or (weights := _weights(found)) is None:
        return Refusal("other-operator", "is no product with weights")
    if found.of_integers:
        return Refusal("precision", "is a product of integers, whose sums of blocks hold too few digits")
    assert isinstance(found.left, Leaf)
    assembly = Assembly(found.covers)
    left, written = found.left.view, shape(call.var)
    refused = multiply_by_strassen(assembly, left, weights, found.out, found.epilogue, profile, written)
    return assembly.kernel() if refused is None else refused


def multiply_by_strassen(
    assembly: Assembly, left: View, weights: np.ndarray, out: Layout, epilogue: Expression, profile: Profile,
    written: Shape,
) -> Refusal | None:  # fmt: skip
    """Add out = epilogue(left weights), `left` over [rows..., depth], `weights` [depth, columns]; or say why not."""
    if profile.stored != FLOAT32:
        return Refusal("precision", "is a product of float16, whose sums of blocks hold too few digits")
    if not profile.by_lane:
        # On a Xeon with AVX-512 in turns with direct products of 1,025 rows and more: 1.09 to 1.43 of the time.
        return Refusal("processor", "gains nothing by Strassen's algorithm where multipliers are read from memory")
    arguments = Arguments()
    after = arguments.loading(epilogue)
    (layout, out), after = joined([left.layout, out], after, len(out.shape) - 1)
    (depth, columns), rows = weights.shape, math.prod(out.shape[:-1])
    flat = layout.reshape((rows, depth))
    if flat is None or flat.strides[-1] != 1:
        return Refusal("layout", "multiplies rows that no strides describe, or that do not lie one by one")
    scheme, tile = best_scheme(rows, depth, columns, profile)
    if scheme is None:
        told = "has too few rows, columns or steps to gain by Strassen's algorithm, or too large weights"
        return Refusal("size", told)
    grouping, read = Grouping(rows, tile.rows, scheme.side), Arguments()
    turned = LeftFactors(scheme, grouping, depth, read.loading(Leaf(replace(left, layout=flat))))
    made = arguments.number(assembly.add(turned, read.bases, turned.shape))
    right = arguments.number(_panels(scheme, weights, tile.columns))
    table = arguments.number(_table(scheme, tile.rows * tile.columns))
    kernel = Strassen(scheme, grouping, depth, made, right, table, out, after, tile)
    assembly.add(kernel, arguments.bases, written)
    return None


def _weights(found: Factors) -> np.ndarray | None:
    """The right operand [depth, columns], where it is a constant that is the same for the whole batch."""
    lead = len(found.out.shape) - 2
    if not isinstance(found.right, Leaf) or not is_shared(found.right, lead):
        return None
    matrix = without(found.right, lead)
    assert isinstance(matrix, Leaf)
    view: View = matrix.view
    return strided(view.base, view.layout) if isinstance(view.base, np.ndarray) else None


def best_scheme(rows: int, depth: int, columns: int, profile: Profile) -> tuple[Scheme | None, Tile]:
    """The scheme and tile that a product takes the fewest cycles with; no scheme where that is to multiply directly."""
    direct = depth * (cycles(profile, rows, best_bands(profile, rows, columns, True, True), True) + PACKING * rows)
    found: list[tuple[float, Scheme | None, Tile]] = [
        (direct + _read(depth * columns, profile), None, profile.packed[0])
    ]
    for scheme in map(_scheme, range(1, MOST_LEVELS + 1)):
        weights = 4 * scheme.products * depth * columns // scheme.side**2
        if depth % scheme.side == 0 and weights <= MOST_BYTES:
            found += [(_cycles(scheme, tile, rows, depth, columns, profile), scheme, tile) for tile in profile.packed]
    _, best, tile = min(found, key=lambda each: each[0])
    return best, tile


def _cycles(scheme: Scheme, tile: Tile, rows: int, depth: int, columns: int, profile: Profile) -> float:
    part, grouping = depth // scheme.side, Grouping(rows, tile.rows, scheme.side)
    panels = -(-columns // (tile.columns * scheme.side))
    # Vectors are loaded and stored two at once, and those that are added loaded.
    pairs = sum(2 + 3 * len(step.seeds[1:]) + 4 * len(step.after) for step in scheme.steps) / 2

    def group(high: int) -> float:
        vectors = high * tile.columns // profile.lanes
        inner = part * step_cycles(profile, Tile(high, tile.columns), packed=True) + AROUND
        return scheme.products * inner + pairs * vectors

    full = grouping.count - (1 if grouping.short else 0)
    multiplied = panels * (full * group(tile.rows) + (group(grouping.short) if grouping.short else 0))
    sums = sum((7 / 4) ** level for level in range(scheme.levels))
    weights = scheme.products * part * panels * tile.columns
    return multiplied + rows * depth * (PACKING + SUMS * sums) + _read(weights, profile)


def _read(weights: int, profile: Profile) -> float:
    """Cycles to read so many weights from memory."""
    return weights * READ_WEIGHT / profile.lanes


_scheme = functools.cache(Scheme)


@functools.cache
def _table(scheme: Scheme, size: int) -> np.ndarray:
    """A row [FIELDS] for each product, and then what they point to, as `Strassen` says: tiles of `size` numbers."""
    rows, rest, begin = [], list[int](), scheme.products * FIELDS
    for step in scheme.steps:
        seed, *more = step.seeds
        first = begin + len(rest)
        rest += [*more, *(tile for pair in step.after for tile in pair)]
        rows += [seed * size, step.into * size, first, first + len(more), begin + len(rest)]
    return np.array([*rows, *(tile * size for tile in rest)], np.int32)


def _panels(scheme: Scheme, weights: np.ndarray, width: int) -> np.ndarray:
    """The right factors [panels, products, depth / side, width], filled up with zeros."""
    (depth, columns), side = weights.shape, scheme.side
    count = -(-columns // (width * side))
    filled = np.zeros((depth, count * side * width), weights.dtype)
    filled[:, :columns] = weights
    # A block of a matrix is made of every `side`-th tile of it.
    blocks = filled.reshape(depth, count, side, width).swapaxes(1, 2).reshape(depth, -1)
    made = scheme.of_weights(blocks).reshape(scheme.products, depth // side, count, width)
    return np.ascontiguousarray(rounded(np.moveaxis(made, 2, 0), FLOAT32))


STRASSEN = Rule("strassen", _apply)
