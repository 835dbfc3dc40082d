"""Softmax attention itself: what `identity` re-emits, what forms are fitted to, and what exact rows keep."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.variants.parts.form import Form, Heads, summed_with

FIRST = "attention of the first token"


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """softmax(scale * query key^T + bias) value: [B, H, N, d], [B, H, M, d], [B, H, M, e] -> [B, H, N, e].

    The scale is folded into the query: importers of SDPA drop or decompose an explicit one.
    """
    factor = scale * math.sqrt(query.shape[3])
    query = query if factor == 1.0 else query * factor
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def filled_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor, filling: float) -> Tensor:
    """softmax_attention, but `filling` stands in place of the scores wherever `bias` is -inf.

    A row that is masked whole has equal weights, and one whose other scores are as low as `filling` weighs masked keys.
    """
    scores = (query * scale) @ key.transpose(2, 3) + bias
    return torch.softmax(scores.masked_fill(bias == -math.inf, filling), dim=3) @ value


def with_outputs(batches: Iterable[Heads], scale: float) -> Iterator[tuple[Heads, Tensor]]:
    """Each batch beside what softmax attention makes of it: the pairs that a form is fitted to."""
    for heads in batches:
        yield heads, softmax_attention(*heads[:3], scale, heads.bias)


class SoftmaxForm(Form):
    """The exact form; a causal site gets its mask back. `prefix` tokens come before the image's (see `token_maps`).

    `filling` stands in place of the scores that masks drop (site.Core).
    """

    def __init__(self, scale: float, causal: bool = False, prefix: int = 0, filling: float = -math.inf) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.prefix = prefix
        self.filling = filling

    @property
    def searched(self) -> tuple[str, ...]:
        return ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.causal:
            later = torch.full((query.shape[2], key.shape[2]), -math.inf, dtype=query.dtype, device=query.device)
            later = later.triu(1)
            bias = later if bias is None else bias + later
        if bias is not None and self.filling > -math.inf:
            return filled_attention(query, key, value, self.scale, bias, self.filling)
        return softmax_attention(query, key, value, self.scale, bias)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The weight of each key, on average over the queries, and to the first token where it is not the image's."""
        weights = summed_with(self, heads)
        first = {FIRST: weights[:, :, 0]} if self.prefix else {}
        return {"attention received": weights.mean(2), **first}
