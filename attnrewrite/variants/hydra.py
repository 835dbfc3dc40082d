"""Hydra attention: as many heads as channels (Bolya et al. 2022, equation 8)."""

from dataclasses import dataclass

from torch import Tensor

from attnrewrite.errors import Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, refuse_unequal
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.key_masks import key_weights, largest_one, weighed
from attnrewrite.variants.parts.tensors import merge_heads, split_heads, unit


class HydraForm(Form):
    """As many heads as channels: q_hat * sum_n k_hat_n * v_n, with unit query and key tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        queries, keys = (unit(merge_heads(part), 2) for part in (query, key))
        value = weighed(value, largest_one(key_weights(bias)))
        return split_heads(queries * (keys * merge_heads(value)).sum(1, keepdim=True), value.shape[1])


@dataclass(frozen=True, kw_only=True)
class Hydra(LinearVariant):
    name = "hydra"
    summary = "linear attention with as many heads as channels"
    source = "Bolya et al. 2022, Hydra Attention, equation 8"
    no_key_bias = None

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        return refuse_unequal(site)

    def form(self, site: AttentionSite) -> Form:
        return HydraForm()

    def form_multiplies(self, site: AttentionSite) -> int:
        return 2 * (site.n_queries + site.n_keys) * site.heads * site.head_dim
