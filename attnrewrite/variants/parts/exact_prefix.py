"""Exact rows for the few queries that are not image tokens: class and register tokens keep softmax at O(N) each."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnrewrite.variants.parts.foldable import Affine
from attnrewrite.variants.parts.form import FoldableMaps, Form, Heads, maps_of_query_and_key, summed_with
from attnrewrite.variants.parts.softmax_rows import FIRST, SoftmaxForm, softmax_attention

LARGEST_CONDITION = 100.0  # of maps that exact rows may undo: what float32 rounds is so many times larger at most


class Undone(nn.Module):
    """query C + shift for query [B, H, N, d] that a projection gives mapped, as its keys: C [H, d, d] undoes both."""

    def __init__(self, maps: Tensor, shift: Tensor | None) -> None:
        super().__init__()
        self.maps = nn.Parameter(maps)
        self.shift = None if shift is None else nn.Parameter(shift)

    def forward(self, query: Tensor) -> Tensor:
        query = query @ self.maps
        return query if self.shift is None else query + self.shift


class ExactPrefix(Form):
    """`form`, with the first `prefix` rows of its output replaced by exact softmax attention, bias included.

    Where projections hold the form's maps, `undone` takes them off the scores of these rows.
    """

    def __init__(self, form: Form, prefix: int, scale: float, undone: Undone | None = None) -> None:
        super().__init__()
        self.form = form
        self.prefix = prefix
        self.scale = scale
        self.undone = undone

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = None if bias is None else bias[..., : self.prefix, :]
        exact = softmax_attention(self._queries(query, self.prefix), key, value, self.scale, rows)
        rest = self.form(query, key, value, bias)[..., self.prefix :, :]
        return torch.cat([exact, rest], dim=2)

    def _queries(self, query: Tensor, count: int) -> Tensor:
        query = query[..., :count, :]
        return query if self.undone is None else self.undone(query)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The form's own, and what the first token attends to."""
        bias = None if heads.bias is None else heads.bias[..., :1, :]
        row = Heads(self._queries(heads.query, 1), heads.key, heads.value, bias)
        return {**self.form.token_maps(heads), FIRST: summed_with(SoftmaxForm(self.scale), row)[:, :, 0]}

    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        self.form.refine(activations)

    def resolved(self) -> dict[str, Any]:
        return self.form.resolved()

    def deploy(self) -> Form:
        return ExactPrefix(self.form.deploy(), self.prefix, self.scale, self.undone)

    def foldable_maps(self) -> FoldableMaps | None:
        """The form's own of query and key, where exact rows can undo them."""
        inner = maps_of_query_and_key(self.form)
        if inner is None or self.undone is not None:
            return None
        undone = None if inner.query is None or inner.key is None else undo(inner.query, inner.key, inner.heads)
        if undone is None:
            return None
        return replace(inner, form=ExactPrefix(inner.form, self.prefix, self.scale, undone))


@torch.no_grad()
def undo(query: Affine, key: Affine, heads: int) -> Undone | None:
    """What turns mapped queries into such as score mapped keys the way they were before both maps; None where these are
    no maps of a head's channels to as many, or lose too much to be undone.

    (q A + a) C + c = q A C with C = A^-1 B^-T, which is q . k for k B; what the key's shift adds, softmax does not see.
    """
    if query.weight.shape != key.weight.shape or query.weight.shape[0] != query.weight.shape[1]:
        return None
    first, second = (_blocks(each.weight.double(), heads) for each in (query, key))
    if float((torch.linalg.cond(first) * torch.linalg.cond(second)).max()) > LARGEST_CONDITION:
        return None
    maps = torch.linalg.inv(first) @ torch.linalg.inv(second).mT
    shift = None if query.bias is None else -(query.bias.double().reshape(heads, 1, -1) @ maps)
    own = query.weight.dtype
    return Undone(maps.to(own), None if shift is None else shift.to(own))


def _blocks(weight: Tensor, heads: int) -> Tensor:
    """The maps [H, d, d] (x A) that are the blocks of weight [H d, H d] (A^T x)."""
    parts = weight.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
    return parts.diagonal(dim1=0, dim2=2).permute(2, 1, 0)
