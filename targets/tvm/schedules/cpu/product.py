"""Products of matrices, with all that follows them element by element."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import (
    FIRST_CACHE,
    SECOND_CACHE,
    address,
    by_pairs,
    function,
    prefetch,
    steps,
    when,
    write,
)
from attnrewrite.targets.tvm.schedules.cpu.operands import ROWS_AHEAD, Panel, Panels, Right, Row, spread
from attnrewrite.targets.tvm.schedules.cpu.register_tile import (
    Band,
    Multipliers,
    RegisterTile,
    across_rows,
    along_rows,
)
from attnrewrite.targets.tvm.schedules.cpu.sharing import parts, shares
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, covering
from attnrewrite.targets.tvm.schedules.expression import Expression, Load
from attnrewrite.targets.tvm.schedules.profile import SIZES, Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout

CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Product:
    """out[z, m, n] = epilogue(sum_k left[z, m, k] right[z, k, n]).

    `left` has any strides, or is packed. `bands` are the columns, all in one where they are packed. `out` and the
    epilogue's loads have the shape [outer..., rows..., columns], of which `row_axes` make the rows: those of windows of
    an image, say, are many axes, and too few on each for a tile. Products are of the type `stored`.
    """

    depth: int
    left: Load | Panels
    right: Right
    out: Layout
    epilogue: Expression
    bands: tuple[Band, ...]
    stored: str
    row_axes: int = 1
    name: str = "product"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        def body(*buffers: Any) -> None:
            for band in self.bands:
                _Writer(self, band, buffers, profile.storing(self.stored)).write()

        return function(arguments, body)


class _Writer:
    """The statements of one product for a band of its columns."""

    def __init__(self, product: Product, band: Band, buffers: Sequence[Any], profile: Profile) -> None:
        self.product, self.band, self.buffers, self.profile = product, band, buffers, profile
        lead = len(product.out.shape) - 1 - product.row_axes
        self.outer, self.row_shape = product.out.shape[:lead], product.out.shape[lead:-1]
        self.rows, self.columns = math.prod(self.row_shape), band.columns
        self.high = band.tile.rows
        self.wide = product.right.wide(band.tile.columns + band.beside, self.columns)
        self.across = -(-self.columns // self.wide)
        self.down = -(-self.rows // self.high)
        # A panel stays in the cache while a part's rows go by; gathered it is for each part anew. Where instructions
        # are what counts, those for another part are spared.
        halved = product.right.filled and not profile.by_lane
        self.parts = parts(self.down, self.across * math.prod(self.outer), halved)
        self.per_part = -(-self.down // self.parts)
        self.narrow = self.columns % self.wide if product.right.filled else 0
        # Rows that panels leave over have a tile of their own; of those as they lie, some are done twice.
        self.short = self.rows % self.high if isinstance(product.left, Panels) else 0

    def write(self) -> None:
        work = math.prod(self.outer) * self.rows * self.columns * self.product.depth
        with shares(self.product.out, len(self.outer), self.down, self.parts, self.across, work) as share:
            z, panel = share.z, share.panel
            column, right = self.right(z, panel)
            with steps(share.tiles) as step:
                number = vectors.name(share.first + step)
                fetched = self.product.right.filled and self.per_part > 1
                row = self.fetching(z, panel, step, right) if fetched else right
                tile = functools.partial(self.tile, z, panel, number, column, row)
                if self.short:
                    when(number < self.down - 1, lambda: tile(self.high), lambda: tile(self.short))
                else:
                    tile(self.high)

    def tile(
        self, z: Sequence[Position], panel: Position, number: Position, column: Position, right: Row, high: int
    ) -> None:
        """The sums of one tile of `high` rows, and what follows them."""
        row = vectors.name(tirx.min(number * self.high, self.rows - high))
        beside = self.band.beside
        tile = RegisterTile(high, covering(self.wide - beside, self.profile.stored_lanes), self.profile, beside)
        tile.multiply(self.product.depth, self.left(z, number, row, high), right)

        # One row's code in a loop: that of all rows side by side would take the compiler a long time.
        sums = tile.spilled()

        def store(width: int) -> None:
            for begin, lanes in covering(width, self.profile.stored_lanes):

                def put(i: Position, begin: int = begin, lanes: int = lanes) -> None:
                    value = vectors.load(sums, i * self.wide + begin, lanes)
                    self.store((*z, *self.at(row + i), column + begin), lanes, value)

                by_pairs(high, put)

        if not self.narrow or self.across == 1:
            store(self.narrow or self.wide)
        else:
            when(panel < self.across - 1, lambda: store(self.wide), lambda: store(self.narrow))

    def at(self, row: Position) -> list[Position]:
        """A row's place on each of the axes that make the rows."""
        return spread(row, self.row_shape)

    def left(self, z: Sequence[Position], number: Position, row: Position, high: int) -> Multipliers:
        """How the multipliers of a tile of rows are read, given the tile's number and first row."""
        left, stored = self.product.left, self.profile.stored
        buffer, layout = self.buffers[left.argument], left.layout
        if isinstance(left, Panels):
            panel = vectors.name(address(layout, (*z, number, 0, 0)))
            return across_rows(
                high,
                lambda k, i, n: vectors.load(buffer, panel + k * left.width + i, n, dtype=stored),
                self.profile,
                left.width,
            )
        begins = [vectors.name(address(layout, (*z, *self.at(row + i), 0))) for i in range(high)]
        along_depth = layout.strides[-1]

        depth, flat = self.product.depth, layout.reshape((*self.outer, self.rows, self.product.depth))
        # The next tile's rows, where they follow these, are asked for as these are used.
        follows = not self.profile.by_lane and flat is not None and flat.strides[-2:] == (depth, 1)

        def load(i: int, k: Position, n: int) -> Value:
            if follows and i == 0:
                prefetch(buffer, begins[0] + high * (depth + k), SECOND_CACHE)
            return vectors.load(buffer, begins[i] + k * along_depth, n, dtype=stored)

        return along_rows(high, load, self.profile, self.profile.by_lane and along_depth == 1)

    def right(self, z: Sequence[Position], panel: Position) -> tuple[Position, Row]:
        """The first column of a panel, and how its rows are read."""
        right, column = self.product.right, panel * self.wide
        if not right.filled:
            column = vectors.name(self.band.first + tirx.min(column, self.columns - self.wide))
        return column, right.rows(self.buffers[right.argument], Panel(z, panel, column, self.wide), self.profile)

    def store(self, index: Sequence[Position], lanes: int, value: Value) -> None:
        write(self.product.epilogue, self.buffers, self.product.out, index, lanes, value)

    def fetching(self, z: Sequence[Position], panel: Position, step: Position, right: Row) -> Row:
        """`right`, whose rows are asked for some steps before their turn, and a share of the next panel beside them.

        Where instructions are what counts, the share is asked for at once, line by line. Beyond the last panel lies
        what is read next, mostly: other weights.
        """
        buffer, depth = self.buffers[self.product.right.argument], self.product.depth
        size, in_line = depth * self.wide, CACHE_LINE // SIZES[self.profile.stored]
        share = -(-size // (in_line * self.per_part)) * in_line
        here = vectors.name(address(self.product.right.layout, (*z, panel, 0, 0)))
        coming = vectors.name(here + size + tirx.min(step, -(-size // share) - 1) * share)

        if self.profile.by_lane:
            if self.across > 1:
                with steps(share // in_line) as line:
                    prefetch(buffer, coming + line * in_line, SECOND_CACHE)
            return right

        def row(k: Position, first: int, lanes: int) -> Value:
            if first == 0:
                for begin in range(0, self.wide, in_line):
                    prefetch(buffer, here + (k + ROWS_AHEAD) * self.wide + begin, FIRST_CACHE)
                prefetch(buffer, coming + k * -(-share // depth), SECOND_CACHE)
            return right(k, first, lanes)

        return row
