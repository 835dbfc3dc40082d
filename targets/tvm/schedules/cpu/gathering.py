"""Right operands of products that each task copies a panel of, before the rows go by: windows of an image, which are
multiplied so without ever being written out whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import address, scratch, steps
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, pieces
from attnrewrite.targets.tvm.schedules.expression import Load
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, unravel

FEWEST_LANES = 4  # that lie side by side in all rows of an image, so that copying is little beside multiplying


@dataclass(frozen=True)
class Gathered:
    """A tensor read over [outer..., depth..., columns...], where several axes may make the depth and the columns."""

    argument: int
    layout: Layout
    depth: Shape
    columns: Shape

    def panel(
        self, buffers: Sequence[Any], z: Sequence[Position], column: Position, wide: int, profile: Profile
    ) -> Any:
        """A copy [depth, wide] of the columns from `column` on, a multiple of what lies side by side."""
        held = scratch(math.prod(self.depth) * wide, profile.stored)
        with steps(math.prod(self.depth)) as step:
            for begin, lanes in pieces(wide, min(profile.lanes, side_by_side(self.columns))):
                index = (*z, *spread(step, self.depth), *spread(column + begin, self.columns))
                at = address(self.layout, index)
                vector = vectors.load(buffers[self.argument], at, lanes, self.layout.strides[-1], profile.stored)
                vectors.store(held, step * wide + begin, vector, lanes)
        return held


def gathered(load: Load, lead: int, depth: int) -> Gathered:
    """A load over [outer..., depth..., columns...], of which `lead` axes are outer ones."""
    axes = load.layout.shape[lead:]
    cut = next(cut for cut in range(1, len(axes)) if math.prod(axes[:cut]) == depth)
    return Gathered(load.argument, load.layout, axes[:cut], axes[cut:])


def side_by_side(columns: Shape) -> int:
    """How many neighbours of the last axis, a power of two, are whole wherever so many columns begin."""
    return columns[-1] & -columns[-1] if len(columns) > 1 else 1 << columns[-1].bit_length()


def spread(flat: Position, shape: Shape) -> list[Position]:
    """The index on each axis."""
    return [flat] if len(shape) == 1 else [flat // step % size if size > 1 else 0 for step, size in unravel(shape)]
