"""The linear maps at a form's ends: what stands in a lowered model has them in the site's own projections."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnrewrite.variants.base import Form


@dataclass(frozen=True)
class Affine:
    """weight x + bias on the channels of all heads together: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def only(self, rows: list[int]) -> "Affine":
        """Some of the results."""
        return Affine(self.weight[rows], None if self.bias is None else self.bias[rows])


@dataclass(frozen=True)
class Ends:
    """A form as `form` between affine maps: of query, key and value before it, of its result after it (None: none).

    `heads` is how many heads `form` reads and writes.
    """

    form: "Form"
    heads: int
    query: Affine | None = None
    key: Affine | None = None
    value: Affine | None = None
    output: Affine | None = None


def per_head(maps: Tensor, shift: Tensor | None = None) -> Affine:
    """x A + shift for heads x [B, H, N, d], A [H, d, r] and shift [H, 1, r]."""
    return Affine(torch.block_diag(*maps.mT), None if shift is None else shift.flatten())
