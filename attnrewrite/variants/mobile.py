"""Mobile-Attention: linear attention with very small heads that compete for the flow of information."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.foldable import Affine
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.key_masks import key_weights, share, token_mean, weighed
from attnrewrite.variants.parts.products import Order, cheaper_order, mean_product, product_multiplies
from attnrewrite.variants.parts.qk_maps import NoMaps, QKMaps, qk_map_multiplies, signed_pairs
from attnrewrite.variants.parts.tensors import (
    as_type,
    merge_heads,
    safe,
    score_scale,
    split_heads,
    take_heads,
    unit,
    wide,
)

Reading = Literal["conversion", "code", "paper"]
EPSILON = 1e-6
GAIN = 3.0  # of 1 to 4: what explains most of softmax's output on a trained ViT
GAIN_BESIDE_MEAN = 2.0  # beside the values' mean: 1 is as good, but takes differences of larger numbers, 4 is worse


class Flows(NamedTuple):
    """Capacities [B, H, N, 1]: what a head takes in (I), gives out (O), and both after competition (Ibar, Obar)."""

    incoming: Tensor
    outgoing: Tensor
    competed_incoming: Tensor
    competed_outgoing: Tensor


def head_flows(query: Tensor, key: Tensor, epsilon: float) -> Flows:
    """The flows among the heads of each token, from features [B, H, N, d] (equations 5 and 6)."""

    def flow(features: Tensor, others: Tensor) -> Tensor:
        return ((features + epsilon) * (others.sum(1, keepdim=True) + epsilon)).sum(3, keepdim=True)

    incoming, outgoing = flow(query, key), flow(key, query)
    return Flows(incoming, outgoing, flow(query, key / outgoing), flow(key, query / incoming))


def features(x: Tensor, reading: Reading) -> Tensor:
    """Phi: the sigmoid, of each head's unit vector in the paper and of the vector itself in the code.

    A conversion divides by sums of it, which must not be zero where a model's own queries or keys are far below it.
    """
    if reading == "paper":
        return torch.sigmoid(unit(x, 3))
    return torch.sigmoid(x) if reading == "code" else torch.sigmoid(x).clamp(min=EPSILON)


def competition(flows: Flows, reading: Reading, weights: Tensor | None = None) -> Tensor:
    """What is left of each token's value in each head, [B, H, N, 1]: heads compete in the paper, tokens in the code."""
    if reading == "paper":
        return torch.softmax(flows.competed_outgoing, dim=1)
    contest = flows.competed_outgoing.clamp(-1, 1).exp()
    return contest / token_mean(contest, weights).clamp(min=EPSILON)  # each contest is at least 1 / e


def mobile_attention(
    query: Tensor, key: Tensor, value: Tensor, reading: Reading, order: Order = "auto", weights: Tensor | None = None
) -> Tensor:
    """U of equation 7 for query, key [B, H, N, d] and value [B, H, N, e] of very small heads -> [B, H, N, e].

    `paper`: heads compete by a softmax over heads, and each row is divided by its sum over tokens. `code`: tokens
    compete, times N, and each row is divided by its head flow, so that the result grows with N. `conversion`: as the
    code, with the paper's division. `weights` are those of the tokens as keys (key_weights).
    """
    query, key = features(wide(query), reading), features(wide(key), reading)
    epsilon = 0.0 if reading == "paper" else EPSILON
    flows = head_flows(query, key, epsilon)
    key = weighed(key, weights)
    total = mean_product(query, key, wide(value) * competition(flows, reading, weights), order)
    total = total * torch.sigmoid(flows.competed_incoming)
    if reading == "code":
        return as_type(total / flows.incoming * (key.shape[2] * share(weights)), value.dtype)
    row = query @ key.mean(2, keepdim=True).transpose(2, 3)
    return as_type(total / row.clamp(min=safe(0, row.dtype)), value.dtype)


def channels_of(heads: tuple[int, ...], width: int) -> list[int]:
    """The channels of some heads of `width` channels each."""
    return [head * width + channel for head in heads for channel in range(width)]


class MobileForm(Form):
    """Mobile-Attention on the heads, re-cut into `count` small ones, of which `kept` (None: all) take part.

    The channels of a head that does not take part are zero in the output.
    """

    def __init__(
        self, count: int, qk_maps: QKMaps, scale: float, gain: float, reading: Reading, order: Order,
        kept: tuple[int, ...] | None, keep: int, value_width: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gain = gain
        self.value_width = value_width
        self.count = count
        self.qk_maps = qk_maps
        self.scale = scale
        self.reading = reading
        self.order = order
        self.kept = kept
        self.keep = keep

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        heads, weights = value.shape[1], key_weights(bias)
        query, key = self.qk_maps(query, key)
        query, key, value = (split_heads(merge_heads(part), self.count) for part in (query, key, value))
        if self.kept is None:
            return self._joined(mobile_attention(query, key, value, self.reading, self.order, weights), heads)
        query, key, few = (take_heads(part, self.kept) for part in (query, key, value))
        few = mobile_attention(query, key, few, self.reading, self.order, weights)
        places = [self.kept.index(head) if head in self.kept else len(self.kept) for head in range(self.count)]
        return self._joined(take_heads(torch.cat([few, torch.zeros_like(value[:, :1])], dim=1), places), heads)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The competition's weights, one map for each small head that takes part."""
        query, key = (split_heads(merge_heads(part), self.count) for part in self.qk_maps(heads.query, heads.key))
        if self.kept is not None:
            query, key = take_heads(query, self.kept), take_heads(key, self.kept)
        epsilon = 0.0 if self.reading == "paper" else EPSILON
        flows = head_flows(features(query, self.reading), features(key, self.reading), epsilon)
        weights = key_weights(heads.bias)
        return {"competition weight": competition(flows, self.reading, weights).squeeze(3)}

    def foldable_maps(self) -> FoldableMaps | None:
        """The re-cut of query and key; heads that take no part are not projected at all."""
        if isinstance(self.qk_maps, NoMaps):
            return None
        query, key = self.qk_maps.taken_out()
        heads, channels, _ = self.qk_maps.query.shape
        if self.kept is None:
            return FoldableMaps(self._as_cut(self.count, self.value_width), heads, query, key)
        rows, own = (channels_of(self.kept, width // self.count) for width in (heads * channels, self.value_width))
        query, key = (part.only(rows) for part in (query, key))
        chosen = torch.eye(self.value_width).to(query.weight)[own]
        form = self._as_cut(len(self.kept), len(own))
        return FoldableMaps(form, len(self.kept), query, key, value=Affine(chosen), output=Affine(chosen.T))

    def _as_cut(self, count: int, value_width: int) -> "MobileForm":
        """The form with all of `count` heads in it, that projections have cut already."""
        return MobileForm(count, NoMaps(), self.scale, self.gain, self.reading, self.order, None, count, value_width)

    @staticmethod
    def _joined(small: Tensor, heads: int) -> Tensor:
        return split_heads(merge_heads(small), heads)

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Give every small head of a head the leading coordinates of that head's scores, with both signs; then choose
        the heads to keep: those of the largest mean competed outgoing flow (the paper's appendix A).
        """
        heads, channels, _ = self.qk_maps.query.shape
        size = heads * channels // self.count
        if size > 1 and channels % size == 0:
            self.qk_maps.fit(activations(), self.scale, lambda maps: signed_pairs(maps, size, self.gain))
        if self.keep < self.count and self.kept is None:
            self.kept = self._largest_flows(activations())

    def _largest_flows(self, batches: Iterator[Heads]) -> tuple[int, ...]:
        score = torch.zeros(self.count, dtype=torch.float64)
        for heads in batches:
            qk_maps = self.qk_maps(heads.query, heads.key)
            query, key = (split_heads(merge_heads(part), self.count) for part in qk_maps)
            flows = head_flows(features(query, self.reading), features(key, self.reading), EPSILON)
            score += flows.competed_outgoing.mean((2, 3)).sum(0).double().cpu()
        return tuple(sorted(score.topk(self.keep).indices.tolist()))

    def resolved(self) -> dict[str, Any]:
        return {} if self.kept is None else {"keep_heads": self.kept}

    def extra_repr(self) -> str:
        return f"heads={self.count}, reading={self.reading}, kept={self.kept or 'all'}"


@dataclass(frozen=True, kw_only=True)
class Mobile(LinearVariant):
    """reading: conversion (the code's features, the paper's division, beside the values' mean), code or paper.

    head_dim: the channels of a small head.
    keep_heads: the fraction of small heads that calibration keeps, or the heads themselves.
    """

    reading: Reading = "conversion"
    head_dim: int = 4
    keep_heads: float | tuple[int, ...] = 1.0

    no_key_bias = None
    name = "mobile"
    summary = "Mobile-Attention: linear attention with heads of 4 channels that compete"
    source = "Yao et al. 2024, Mobile Attention, equations 5-7 and appendix A"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 1:
            raise InputError(f"mobile: head_dim={self.head_dim} must be at least 1")
        if isinstance(self.keep_heads, float) and not 0 < self.keep_heads <= 1:
            raise InputError(f"mobile: keep_heads={self.keep_heads} must lie above 0 and be at most 1")
        if self.keep_heads == ():
            raise InputError("mobile: keep_heads=[] keeps none: name at least one head, or the fraction to keep")

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        channels = site.heads * site.head_dim
        if reason := refuse_unpaired(site):
            return reason
        if channels % self.head_dim:
            why = f"its {channels} channels do not split into heads of {self.head_dim}"
            return Refusal("uneven-heads", why)
        count = channels // self.head_dim
        if site.heads * site.value_dim % count:
            why = f"its {site.heads * site.value_dim} value channels do not split over {count} heads"
            return Refusal("uneven-values", why)
        if isinstance(self.keep_heads, tuple) and not set(self.keep_heads) <= set(range(count)):
            return Refusal("unknown-heads", f"keep_heads names heads beyond its {count}")
        return None

    def form(self, site: AttentionSite) -> Form:
        count, _ = self._sizes(site)
        kept = self.keep_heads if isinstance(self.keep_heads, tuple) else None
        scale, order = score_scale(site), cheaper_order(*self._shape(site))
        qk_maps = QKMaps(site.heads, site.head_dim, math.copysign(1, scale))
        width = site.heads * site.value_dim
        gain = GAIN if self.value_mean(site) is None else GAIN_BESIDE_MEAN
        return MobileForm(count, qk_maps, scale, gain, self.reading, order, kept, self._keep(site), width)

    def value_mean(self, site: AttentionSite) -> tuple[float, float] | None:
        """A conversion of all heads has it: where heads are left out, so are their values."""
        return (1.0, 0.0) if self.reading == "conversion" and self.keep_heads == 1.0 else None

    def form_multiplies(self, site: AttentionSite) -> int:
        channels = self._keep(site) * self.head_dim
        flows = 6 * channels * site.n_queries
        qk_maps = site.heads * qk_map_multiplies(site.n_queries, site.n_keys, site.head_dim)
        return self._keep(site) * product_multiplies(*self._shape(site), "auto") + flows + qk_maps

    def _keep(self, site: AttentionSite) -> int:
        """How many small heads take part once calibrated."""
        count, _ = self._sizes(site)
        return len(self.keep_heads) if isinstance(self.keep_heads, tuple) else max(1, round(count * self.keep_heads))

    def _sizes(self, site: AttentionSite) -> tuple[int, int]:
        """The number of small heads, and the value channels of each."""
        count = site.heads * site.head_dim // self.head_dim
        return count, site.heads * site.value_dim // count

    def _shape(self, site: AttentionSite) -> tuple[int, int, int, int]:
        return site.n_queries, site.n_keys, self.head_dim, self._sizes(site)[1]


class MobileAttention(nn.Module):
    """The published block with its projections: x [B, N, C] -> [B, N, C]."""

    def __init__(self, dim: int, heads: int, reading: Reading = "code") -> None:
        super().__init__()
        self.heads = heads
        self.reading = reading
        self.query_projection = nn.Linear(dim, dim)
        self.key_projection = nn.Linear(dim, dim)
        self.value_projection = nn.Linear(dim, dim)
        self.out_projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        projections = self.query_projection, self.key_projection, self.value_projection
        query, key, value = (split_heads(projection(x), self.heads) for projection in projections)
        return self.out_projection(merge_heads(mobile_attention(query, key, value, self.reading)))
