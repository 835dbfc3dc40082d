"""Small forms that users compare against: ViTALiTy's Taylor, Hydra and cross-covariance."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, received, refuse_unpaired
from attnrewrite.variants.kernel import Order, cheaper_order, mean_product, product_multiplies
from attnrewrite.variants.key_weights import centred, key_weights, largest_one, token_mean, weighed
from attnrewrite.variants.layout import merge_heads, score_scale, split_heads, unit
from attnrewrite.variants.linear import LinearVariant


class TaylorForm(Form):
    """mean(v) + scale q (k_c^T v) / N with centred keys k_c: their sum is zero, so the denominator is N."""

    def __init__(self, scale: float, order: Order) -> None:
        super().__init__()
        self.scale = scale
        self.order = order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = key_weights(bias)
        key = weighed(centred(key, weights), weights)
        return token_mean(value, weights) + mean_product(query * self.scale, key, value, self.order)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return received(self, heads)


@dataclass(frozen=True, kw_only=True)
class Taylor(LinearVariant):
    name = "taylor"
    summary = "softmax to first order around centred keys"
    source = "Dass et al. 2023, ViTALiTy, section III"
    no_key_bias = None

    def form(self, site: AttentionSite) -> Form:
        order = cheaper_order(site.n_queries, site.n_keys, site.head_dim, site.value_dim)
        return TaylorForm(score_scale(site), order)

    def form_multiplies(self, site: AttentionSite) -> int:
        product = product_multiplies(site.n_queries, site.n_keys, site.head_dim, site.value_dim, "auto")
        return site.heads * product


class HydraForm(Form):
    """As many heads as channels: q_hat * sum_n k_hat_n * v_n, with unit query and key tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        queries, keys = (unit(merge_heads(part), 2) for part in (query, key))
        value = weighed(value, largest_one(key_weights(bias)))
        return split_heads(queries * (keys * merge_heads(value)).sum(1, keepdim=True), value.shape[1])


def refuse_unequal(site: AttentionSite) -> str | None:
    """The refusal of forms that meet query, key and value channel by channel."""
    if site.head_dim != site.value_dim:
        return f"meets key and value channel by channel, and they have {site.head_dim} and {site.value_dim}"
    return None


@dataclass(frozen=True, kw_only=True)
class Hydra(LinearVariant):
    name = "hydra"
    summary = "linear attention with as many heads as channels"
    source = "Bolya et al. 2022, Hydra Attention, equation 8"
    no_key_bias = None

    def refuse_form(self, site: AttentionSite) -> str | None:
        return refuse_unequal(site)

    def form(self, site: AttentionSite) -> Form:
        return HydraForm()

    def form_multiplies(self, site: AttentionSite) -> int:
        return 2 * (site.n_queries + site.n_keys) * site.heads * site.head_dim


def cross_covariance(query: Tensor, key: Tensor, value: Tensor, temperature: Tensor) -> Tensor:
    """softmax(q_hat^T k_hat tau) over channels, applied to the channels of v (XCiT, equation 3).

    query, key, value [B, H, N, d], of l2 norm one per channel over the tokens; temperature [H, 1, 1].
    """
    scores = unit(query, 2).transpose(2, 3) @ unit(key, 2)
    return value @ torch.softmax(scores * temperature, dim=3).transpose(2, 3)


class CrossCovarianceForm(Form):
    """Attention over channels instead of tokens, with a learned temperature per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return cross_covariance(query, key, value, self.temperature)


@dataclass(frozen=True, kw_only=True)
class CrossCovariance(LinearVariant):
    name = "xca"
    summary = "cross-covariance attention: channels attend to channels"
    source = "El-Nouby et al. 2021, XCiT, equation 3"
    no_key_bias = "norms queries over all tokens, of which a mask on the keys says nothing"

    def refuse_form(self, site: AttentionSite) -> str | None:
        return refuse_unpaired(site) or refuse_unequal(site)

    def form(self, site: AttentionSite) -> Form:
        return CrossCovarianceForm(site.heads)

    def form_multiplies(self, site: AttentionSite) -> int:
        return site.heads * site.n_queries * site.head_dim * (2 * site.head_dim + 4)


class CrossCovarianceAttention(nn.Module):
    """The published block with its projections: x [B, N, C] -> [B, N, C]."""

    def __init__(self, dim: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part, self.heads) for part in torch.chunk(self.qkv(x), 3, dim=-1))
        return self.proj(merge_heads(cross_covariance(query, key, value, self.temperature)))
