"""Exact rows for the few queries that are not image tokens: class and register tokens keep softmax at O(N) each."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnrewrite.variants.parts.form import Form, Heads, summed_with
from attnrewrite.variants.parts.softmax_rows import FIRST, SoftmaxForm, softmax_attention


class ExactPrefix(Form):
    """`form`, with the first `prefix` rows of its output replaced by exact softmax attention, bias included."""

    def __init__(self, form: Form, prefix: int, scale: float) -> None:
        super().__init__()
        self.form = form
        self.prefix = prefix
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = None if bias is None else bias[..., : self.prefix, :]
        exact = softmax_attention(query[..., : self.prefix, :], key, value, self.scale, rows)
        rest = self.form(query, key, value, bias)[..., self.prefix :, :]
        return torch.cat([exact, rest], dim=2)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The form's own, and what the first token attends to."""
        bias = None if heads.bias is None else heads.bias[..., :1, :]
        row = Heads(heads.query[:, :, :1], heads.key, heads.value, bias)
        return {**self.form.token_maps(heads), FIRST: summed_with(SoftmaxForm(self.scale), row)[:, :, 0]}

    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        self.form.refine(activations)

    def resolved(self) -> dict[str, Any]:
        return self.form.resolved()

    def deploy(self) -> Form:
        return ExactPrefix(self.form.deploy(), self.prefix, self.scale)
