"""ViTALiTy: softmax to first order around centred keys (Dass et al. 2023, section III)."""

from dataclasses import dataclass

from torch import Tensor

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, received
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.key_masks import centred, key_weights, token_mean, weighed
from attnrewrite.variants.parts.products import Order, cheaper_order, mean_product, product_multiplies
from attnrewrite.variants.parts.tensors import score_scale


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
