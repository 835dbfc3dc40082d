"""SimA: attention without softmax, by l1 normalisation of query and key over the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import FollowUp, Form, Heads, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.key_masks import centred, key_weights, share, token_mean, weighed
from attnrewrite.variants.parts.products import Order, cheaper_order, mean_product, product_multiplies
from attnrewrite.variants.parts.tensors import as_type, merge_heads, safe, split_heads, wide

EPSILON = 1e-12
LEAST_SPREAD = 1e-4  # of keys about their mean, of their own size: less is what rounding leaves of equal keys
Pair = tuple[Tensor | None, Tensor | None]


def l1_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    order: Order = "auto",
    weights: Pair = (None, None),
    least: Tensor | None = None,
) -> Tensor:
    """q_hat k_hat^T v with q_hat, k_hat of l1 norm one per channel over the tokens (SimA, equation 3).

    query [B, H, N, d], key [B, H, M, d], value [B, H, M, e] -> [B, H, N, e]. Norms are taken as means and the
    division by N is halved between the ends, so that half precision neither overflows nor underflows. `weights` are
    those of the queries and of the keys (key_weights), of which l1 norms are taken too. The keys' mean size
    counts as `least` [B, H, 1, d] where it is less.
    """
    tokens, root = query.shape[2], query.shape[2] ** 0.5
    query = query / (token_mean(query.abs(), weights[0]).clamp(min=safe(EPSILON / tokens, query.dtype)) * root)
    size = token_mean(key.abs(), weights[1]).clamp(min=safe(EPSILON / key.shape[2], key.dtype))
    key = key / (size if least is None else torch.maximum(size, least))
    result = mean_product(query, weighed(key, weights[1]), value, order) / root
    return result if weights[0] is None else result / share(weights[0])


def unit_l1(tokens: Tensor) -> Tensor:
    """[B, H, N, d] of l1 norm one per channel over the tokens (SimA, equation 3)."""
    return tokens / tokens.abs().sum(2, keepdim=True).clamp(min=safe(EPSILON, tokens.dtype))


class L1Form(Form):
    """SimA on the heads. `centred` takes the mean off the keys and adds mean(v), which softmax has and SimA loses.

    Where queries and keys are `paired` (of the same tokens), what masks keys leaves out their queries' norms as well.
    """

    def __init__(self, centred: bool, single_head: bool, order: Order, paired: bool) -> None:
        super().__init__()
        self.paired = paired
        self.centred = centred
        self.single_head = single_head
        self.order = order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        weights, dtype = key_weights(bias), value.dtype
        if weights is not None:  # a norm over no token at all is too small for half precision
            query, key, value = wide(query), wide(key), wide(value)
        pair = weights if self.paired else None, weights
        if not self.centred:
            return as_type(self._attend(query, key, value, pair), dtype)
        least = token_mean(key.abs(), weights) * LEAST_SPREAD
        attended = self._attend(query, centred(key, weights), value, pair, least)
        return as_type(attended + token_mean(value, weights), dtype)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The l2 norm of each token's normalised query and key, which says how much it weighs (SimA, section 4.7)."""
        key = centred(heads.key) if self.centred else heads.key
        parts = {"|query|": heads.query, "|key|": key}
        if self.single_head:
            parts = {name: merge_heads(part).unsqueeze(1) for name, part in parts.items()}
        return {name: unit_l1(part).norm(dim=3) for name, part in parts.items()}

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, weights: Pair, least: Tensor | None = None) -> Tensor:
        if not self.single_head:
            return l1_attention(query, key, value, self.order, weights, least)
        query, key, whole = (merge_heads(part).unsqueeze(1) for part in (query, key, value))
        least = None if least is None else merge_heads(least).unsqueeze(1)
        return split_heads(l1_attention(query, key, whole, self.order, weights, least).squeeze(1), value.shape[1])


@dataclass(frozen=True, kw_only=True)
class L1(LinearVariant):
    """centred: the conversion mode; false is the paper's. order: auto, qk or kv. single_head: the paper's one head.

    relu: the paper's ReLU for GELU in the MLPs, which the pass that rewrites the graph carries out.
    """

    centred: bool = True
    order: Order = "auto"
    single_head: bool = False
    relu: bool = False

    no_key_bias = None
    name = "l1"
    summary = "SimA: query and key of l1 norm one over the tokens, no softmax"
    source = "Koohpayegani & Pirsiavash 2022, SimA, equations 3-4"

    def follow_ups(self) -> tuple[FollowUp, ...]:
        return ("relu-for-gelu",) if self.relu else ()

    def form(self, site: AttentionSite) -> Form:
        return L1Form(self.centred, self.single_head, self._order(site), refuse_unpaired(site) is None)

    def form_multiplies(self, site: AttentionSite) -> int:
        heads, head_dim, value_dim = self._sizes(site)
        return heads * product_multiplies(site.n_queries, site.n_keys, head_dim, value_dim, self._order(site))

    def _order(self, site: AttentionSite) -> Order:
        if self.order != "auto" or site.n_queries < 1 or site.n_keys < 1:
            return self.order
        _, head_dim, value_dim = self._sizes(site)
        return cheaper_order(site.n_queries, site.n_keys, head_dim, value_dim)

    def _sizes(self, site: AttentionSite) -> tuple[int, int, int]:
        """Heads, query channels and value channels as the products see them."""
        if self.single_head:
            return 1, site.heads * site.head_dim, site.heads * site.value_dim
        return site.heads, site.head_dim, site.value_dim


class SimA(nn.Module):
    """The published block (SimA, algorithm 1) with its projections: x [B, N, C] -> [B, N, C]."""

    def __init__(self, dim: int, heads: int, order: Order = "auto", qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.order = order
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part, self.heads) for part in torch.chunk(self.qkv(x), 3, dim=-1))
        return self.proj(merge_heads(l1_attention(query, key, value, self.order)))
