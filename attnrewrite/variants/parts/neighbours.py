"""Scores between grid tokens and their neighbours, in O(N R^2): shifted copies of the keys, never an N x N tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.site import Grid


class Neighbourhood:
    """The size x size square around every token of a grid, as shifts along the flattened tokens."""

    def __init__(self, grid: Grid, size: int) -> None:
        reach = range(-(size // 2), size // 2 + 1)
        self.tokens = grid.rows * grid.columns
        self.steps = [(down, right) for down in reach for right in reach]
        self.offsets = [down * grid.columns + right for down, right in self.steps]
        self.margin = max(self.offsets)
        self.grid, self.size = grid, size

    def shifted(self, tokens: Tensor) -> list[Tensor]:
        """For each step, what lies there from every token of [B, H, P, c]; what lies off the ends is zero."""
        padded = F.pad(tokens, (0, 0, self.margin, self.margin))
        starts = [self.margin + offset for offset in self.offsets]
        return [padded[..., start : start + self.tokens, :] for start in starts]

    def inside(self) -> Tensor:
        """[P, steps]: 1 where the step from the token stays on the grid, else 0."""
        index = torch.arange(self.tokens)
        row, column = index // self.grid.columns, index % self.grid.columns
        hits = [
            (row + down >= 0)
            & (row + down < self.grid.rows)
            & (column + right >= 0)
            & (column + right < self.grid.columns)
            for down, right in self.steps
        ]
        return torch.stack(hits, dim=1).to(torch.get_default_dtype())

    def dense(self) -> Tensor:
        """[P, P]: 1 between neighbours, else 0."""
        dense = torch.zeros(self.tokens, self.tokens)
        inside = self.inside().bool()
        for step, offset in enumerate(self.offsets):
            token = inside[:, step].nonzero()[:, 0]
            dense[token, token + offset] = 1
        return dense

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Products of every token's query with its neighbours' keys: [B, H, P, d] twice -> [B, H, P, steps]."""
        return torch.stack([(query * near).sum(3) for near in self.shifted(key)], dim=3)

    def bias(self, bias: Tensor) -> Tensor:
        """The entries of a bias [..., P, P] that belong to the steps: [..., P, steps]."""
        flat = bias.flatten(-2)
        return torch.stack([self._diagonal(flat, offset) for offset in self.offsets], dim=-1)

    def _diagonal(self, flat: Tensor, offset: int) -> Tensor:
        """The diagonal `offset` of a flattened [..., P * P], padded to P entries: a strided slice."""
        length = self.tokens - abs(offset)
        if length <= 0:
            return torch.zeros_like(flat[..., : self.tokens])
        before, stride = max(0, -offset), self.tokens + 1
        start = before * stride + offset
        return F.pad(flat[..., start : start + (length - 1) * stride + 1 : stride], (before, max(0, offset)))
