"""Affine maps on all heads' channels, which the projection before or after a form can hold in its own weights."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """weight x + bias on the channels of all heads together: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def only(self, rows: list[int]) -> "Affine":
        """Some of the results."""
        return Affine(self.weight[rows], None if self.bias is None else self.bias[rows])


def per_head(maps: Tensor, shift: Tensor | None = None) -> Affine:
    """x A + shift for heads x [B, H, N, d], A [H, d, r] and shift [H, 1, r]."""
    return Affine(torch.block_diag(*maps.mT), None if shift is None else shift.flatten())
