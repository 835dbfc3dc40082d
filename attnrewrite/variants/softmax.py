"""The original attention as a variant: the identity rewrite, and a candidate at every site."""

import math
from dataclasses import dataclass

from attnrewrite.errors import Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Variant, refuse_without_core
from attnrewrite.variants.parts.softmax_rows import SoftmaxForm
from attnrewrite.variants.parts.tensors import prefix_queries, score_scale


@dataclass(frozen=True, kw_only=True)
class Softmax(Variant):
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), with any bias and over either axis."""

    name = "softmax"
    summary = "the original attention, re-emitted: the identity rewrite, and a candidate at every site"
    source = "Vaswani et al. 2017, Attention Is All You Need, equation 1"

    def refuse(self, site: AttentionSite) -> Refusal | None:
        return refuse_without_core(site)

    def build(self, site: AttentionSite) -> Form:
        filling = -math.inf if site.core is None else site.core.filling
        return SoftmaxForm(score_scale(site), site.causal, prefix_queries(site), filling)

    def multiplies(self, site: AttentionSite) -> int:
        per_head = site.n_queries * site.n_keys * (site.head_dim + site.value_dim)
        return site.windows * site.heads * per_head
