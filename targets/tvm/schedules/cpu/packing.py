"""Operands of products rearranged so that a tile reads its columns one row of vectors after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import address, each, evaluate, function, steps, when
from attnrewrite.targets.tvm.schedules.cpu.register_tile import panel_shape
from attnrewrite.targets.tvm.schedules.cpu.vectors import pieces
from attnrewrite.targets.tvm.schedules.expression import Expression
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Shape, contiguous


@dataclass(frozen=True)
class Pack:
    """Panels [outer..., panels, depth, width] of a computed operand, `value` over [outer..., depth, columns].

    Columns beyond the last repeat it.
    """

    outer: Shape
    depth: int
    columns: int
    width: int
    value: Expression
    name: str = "pack"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        out = contiguous(panel_shape(self.outer, self.depth, self.columns, self.width))
        count, rest = out.shape[-3], self.columns % self.width

        def body(*buffers: Any) -> None:
            with each((*self.outer, count), out.size) as (*z, panel), steps(self.depth) as row:

                def full() -> None:
                    for begin, lanes in pieces(self.width, profile.lanes):
                        at = (*z, row, panel * self.width + begin)
                        vector = evaluate(self.value, buffers, at, lanes)
                        vectors.store(buffers[-1], address(out, (*z, panel, row, begin)), vector, lanes)

                def last() -> None:
                    with steps(self.width) as column:
                        at = tirx.min(panel * self.width + column, self.columns - 1)
                        number = evaluate(self.value, buffers, (*z, row, at), 1)
                        vectors.store(buffers[-1], address(out, (*z, panel, row, column)), number, 1)

                when(panel < count - 1, full, last) if rest and count > 1 else last() if rest else full()

        return function(arguments, body)


def rounded(constant: np.ndarray, dtype: str) -> np.ndarray:
    """A constant operand in the type of products; infinite beyond that, which the check of the result finds."""
    with np.errstate(over="ignore"):
        return constant.astype(dtype)


def packed(weight: np.ndarray, width: int) -> np.ndarray:
    """A constant operand [..., depth, columns] as panels of its type, filled up with zeros."""
    *outer, depth, columns = weight.shape
    count = -(-columns // width)
    filled = np.zeros((*outer, depth, count * width), weight.dtype)
    filled[..., :columns] = weight
    parts = filled.reshape(*outer, depth, count, width)
    return np.ascontiguousarray(np.moveaxis(parts, -2, -3))
