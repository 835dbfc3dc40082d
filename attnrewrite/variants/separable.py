"""MobileViTv2's separable attention: context scores from a latent, one context vector, an elementwise gate."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.key_masks import key_weights
from attnrewrite.variants.parts.mean_query import mean_query, shares_of
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs
from attnrewrite.variants.parts.tensors import as_type, merge_heads, score_scale, split_heads, wide

RIDGE = 1e-2


def context_vectors(latents: Tensor, aggregated: Tensor, weights: Tensor | None = None) -> Tensor:
    """sum_n softmax_n(latent) K[n]: latents [B, N, L], aggregated [B, N, E] -> [B, 1, E].

    Each latent serves E / L channels in turn. The softmax runs over the tokens (MobileViTv2, equation 2),
    of which `weights` (key_weights) may leave some out.
    """
    values = split_heads(aggregated, latents.shape[2])
    scores = context_scores(latents, weights).transpose(1, 2).unsqueeze(2)
    return merge_heads(scores @ values)


def context_scores(latents: Tensor, weights: Tensor | None) -> Tensor:
    """The softmax over the tokens of latents [B, N, L]; zero where no token is left in."""
    if weights is None:
        return torch.softmax(latents, dim=1)
    kept = weights.squeeze(1)
    logarithm = kept.log().clamp(min=torch.finfo(kept.dtype).min / 2)
    scores = torch.softmax(wide(latents) + logarithm, dim=1) * (kept > 0)
    return as_type(scores, latents.dtype)


class SeparableForm(Form):
    """relu(gate(q)) * c_v on the heads, with the teacher's value in the aggregated slot.

    The latents read the teacher's keys, the gate its queries. Uncalibrated, the scores are uniform and the gate is one.
    """

    def __init__(self, heads: int, head_dim: int, value_dim: int, latents: int, scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = scale
        self.latent = nn.Linear(heads * head_dim, latents, bias=False)
        self.gate = nn.Linear(heads * head_dim, heads * value_dim)
        nn.init.zeros_(self.latent.weight)
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        context = context_vectors(self.latent(merge_heads(key)), merge_heads(value), key_weights(bias))
        return split_heads(F.relu(self.gate(merge_heads(query))) * context, value.shape[1])

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The context scores, one map a latent."""
        scores = context_scores(self.latent(merge_heads(heads.key)), key_weights(heads.bias))
        return {"context scores": scores.transpose(1, 2)}

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Latents score keys as the mean query does; then the gate of each channel, from its own head's query, by
        ridge regression on the softmax output, ReLU aside.
        """
        self._fit_latents(activations())
        fit = LeastSquares()
        for heads, target in with_outputs(activations(), self.scale):
            query = F.pad(heads.query, (0, 1), value=1.0).double()
            latents, weights = self.latent(merge_heads(heads.key)), key_weights(heads.bias)
            context = context_vectors(latents, merge_heads(heads.value), weights)
            context = split_heads(context, heads.value.shape[1]).double().transpose(2, 3)
            gram = (query.transpose(2, 3) @ query).unsqueeze(2) * context.square().unsqueeze(4)
            residual = target.double().transpose(2, 3) - context
            fit.add_statistics(gram.sum(0), (residual @ query * context).sum(0).unsqueeze(3))
        change = fit.solve(RIDGE)[..., 0].to(self.gate.weight)
        self.gate.weight.copy_(torch.block_diag(*change[..., :-1]))
        self.gate.bias.copy_(1 + change[..., -1].flatten())

    def _fit_latents(self, batches: Iterator[Heads]) -> None:
        mean = mean_query(batches) * self.scale
        shares = shares_of(self.latent.out_features, self.gate.out_features, self.heads)
        self.latent.weight.copy_((shares.to(mean).unsqueeze(2) * mean).flatten(1))


@dataclass(frozen=True, kw_only=True)
class Separable(LinearVariant):
    """latents: context scores per site; 0 gives one per head, 1 is the paper's."""

    latents: int = 0

    no_key_bias = None
    name = "separable"
    summary = "MobileViTv2's separable attention: one context vector for all tokens, gated elementwise"
    source = "Mehta & Rastegari 2022, Separable Self-attention for Mobile Vision Transformers, equation 2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latents < 0:
            raise InputError(f"separable: latents={self.latents} must be at least 1, or 0 for one per head")

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        channels = site.heads * site.value_dim
        if self.latents and channels % self.latents:
            why = f"its {channels} value channels do not split over {self.latents} latents"
            return Refusal("uneven-latents", why)
        return None

    def form(self, site: AttentionSite) -> Form:
        latents = self.latents or site.heads
        return SeparableForm(site.heads, site.head_dim, site.value_dim, latents, score_scale(site))

    def form_multiplies(self, site: AttentionSite) -> int:
        keys, values = site.heads * site.head_dim, site.heads * site.value_dim
        scores = site.n_keys * (keys * (self.latents or site.heads) + values)
        return scores + site.n_queries * values * (keys + 1)


class SeparableSelfAttention(nn.Module):
    """The published block with its projections: x [B, C, P, N], P pixels of each of N patches, -> [B, C, P, N]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Conv2d(dim, 1 + 2 * dim, 1)
        self.out_proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        dim, pixels = x.shape[1], x.shape[2]
        rows = self.qkv_proj(x).permute(0, 2, 3, 1).flatten(0, 1)
        latent, key, value = torch.split(rows, [1, dim, dim], dim=2)
        out = F.relu(value) * context_vectors(latent, key)
        return self.out_proj(out.reshape(-1, pixels, out.shape[1], dim).permute(0, 3, 1, 2))
