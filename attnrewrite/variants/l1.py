"""SimA: attention without softmax, by l1 normalisation of query and key over the tokens."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import FollowUp, Form, Heads, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.foldable import Affine, per_head
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.key_masks import centred, key_weights, share, token_mean, weighed
from attnrewrite.variants.parts.products import Order, cheaper_order, mean_product, product_multiplies
from attnrewrite.variants.parts.qk_maps import QKMaps
from attnrewrite.variants.parts.tensors import as_type, merge_heads, safe, split_heads, wide

EPSILON = 1e-12
LEAST_SPREAD = 1e-4  # of keys about their mean, of their own size: less is what rounding leaves of equal keys
GAIN = 2.0  # over head_dim: of 1/4 to 4, what a conversion without calibration loses least with, on two trained ViTs
Pair = tuple[Tensor | None, Tensor | None]


def l1_attention(
    query: Tensor, key: Tensor, value: Tensor, order: Order = "auto", weights: Pair = (None, None)
) -> Tensor:
    """q_hat k_hat^T v with q_hat, k_hat of l1 norm one per channel over the tokens (SimA, equation 3).

    query [B, H, N, d], key [B, H, M, d], value [B, H, M, e] -> [B, H, N, e]. Norms are taken as means and the
    division by N is halved between the ends, so that half precision neither overflows nor underflows. `weights` are
    those of the queries and of the keys (key_weights), of which l1 norms are taken too.
    """
    root = query.shape[2] ** 0.5
    query = _of_mean_one(query, weights[0]) / root
    result = mean_product(query, weighed(_of_mean_one(key, weights[1]), weights[1]), value, order) / root
    return result if weights[0] is None else result / share(weights[0])


def l1_deviation(
    query: Tensor, key: Tensor, value: Tensor, order: Order = "auto", weights: Pair = (None, None)
) -> Tensor:
    """The same of keys about their mean, times N, which is of the order of the values whatever N is: beside the values'
    mean, l1 norms of one over N tokens leave a part in N of what softmax adds to that.

    Keys that differ by less than LEAST_SPREAD of their size are not enlarged.
    """
    least = token_mean(key.abs(), weights[1]) * LEAST_SPREAD
    key = _of_mean_one(centred(key, weights[1]), weights[1], least)
    return mean_product(_of_mean_one(query, weights[0]), weighed(key, weights[1]), value, order)


def _of_mean_one(tokens: Tensor, weights: Tensor | None, least: Tensor | None = None) -> Tensor:
    """[B, H, N, d] of mean size one per channel over the tokens, or less where their mean size is under `least`
    [B, H, 1, d].
    """
    size = token_mean(tokens.abs(), weights).clamp(min=safe(EPSILON / tokens.shape[2], tokens.dtype))
    return tokens / (size if least is None else torch.maximum(size, least))


def unit_l1(tokens: Tensor) -> Tensor:
    """[B, H, N, d] of l1 norm one per channel over the tokens (SimA, equation 3)."""
    return tokens / tokens.abs().sum(2, keepdim=True).clamp(min=safe(EPSILON, tokens.dtype))


class ShiftedQuery(QKMaps):
    """query A_q + shift and key A_k, in their own precision: keys about their mean have no shift."""

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query_map, shift, key_map = (as_type(part, query.dtype) for part in (self.query, self.shift, self.key))
        return query @ query_map + shift, key @ key_map

    def taken_out(self) -> tuple[Affine, Affine]:
        return per_head(self.query, self.shift), per_head(self.key)

    def changes_nothing(self) -> bool:
        identity = torch.eye(self.query.shape[1]).to(self.query)
        return not self.shift.any() and bool((self.query == identity).all() and (self.key == identity).all())


class L1Form(Form):
    """SimA on the heads, of query and key as `qk_maps` map them: l1 norms are taken channel by channel, so that it
    matters which channels there are. Where `centred`, what it adds to the mean of the values (l1_deviation).

    Where queries and keys are `paired` (of the same tokens), what masks keys leaves out their queries' norms as well.
    """

    def __init__(
        self, qk_maps: ShiftedQuery | None, centred: bool, single_head: bool, order: Order, paired: bool
    ) -> None:
        super().__init__()
        self.qk_maps = qk_maps
        self.paired = paired
        self.centred = centred
        self.single_head = single_head
        self.order = order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        weights, dtype, heads = key_weights(bias), value.dtype, value.shape[1]
        if self.qk_maps is not None:
            query, key = self.qk_maps(query, key)
        if weights is not None:  # a norm over no token at all is too small for half precision
            query, key, value = wide(query), wide(key), wide(value)
        if self.single_head:
            query, key, value = (merge_heads(part).unsqueeze(1) for part in (query, key, value))
        attend = l1_deviation if self.centred else l1_attention
        result = attend(query, key, value, self.order, (weights if self.paired else None, weights))
        return as_type(split_heads(result.squeeze(1), heads) if self.single_head else result, dtype)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The l2 norm of each token's normalised query and key, which says how much it weighs (SimA, section 4.7)."""
        query, key = heads[:2] if self.qk_maps is None else self.qk_maps(*heads[:2])
        parts = {"|query|": query, "|key|": centred(key) if self.centred else key}
        if self.single_head:
            parts = {name: merge_heads(part).unsqueeze(1) for name, part in parts.items()}
        return {name: unit_l1(part).norm(dim=3) for name, part in parts.items()}

    def deploy(self) -> Form:
        if self.qk_maps is not None and self.qk_maps.changes_nothing():
            self.qk_maps = None
        return self

    def foldable_maps(self) -> FoldableMaps | None:
        if self.qk_maps is None:
            return None
        form = copy.deepcopy(self)
        form.qk_maps = None
        return FoldableMaps(form, self.qk_maps.query.shape[0], *self.qk_maps.taken_out())


@dataclass(frozen=True, kw_only=True)
class L1(LinearVariant):
    """centred: the conversion mode, with keys about their mean beside the values' mean, and maps of query and key that
    calibration finds and projections hold; false is the paper's.

    order: auto, qk or kv. single_head: the paper's one head.
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
        qk_maps = ShiftedQuery(site.heads, site.head_dim) if self.centred else None
        return L1Form(qk_maps, self.centred, self.single_head, self._order(site), refuse_unpaired(site) is None)

    def value_mean(self, site: AttentionSite) -> tuple[float, float] | None:
        return (GAIN / self._sizes(site)[1], 1.0) if self.centred else None

    def form_multiplies(self, site: AttentionSite) -> int:
        heads, head_dim, value_dim = self._sizes(site)
        gain = site.heads * site.n_queries * site.value_dim if self.centred else 0
        return heads * product_multiplies(site.n_queries, site.n_keys, head_dim, value_dim, self._order(site)) + gain

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
