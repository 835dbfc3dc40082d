"""Attention that looks at nothing: every token gets the mean of all values, and keeps a share of its own."""

from dataclasses import dataclass

from torch import Tensor

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form
from attnrewrite.variants.linear import LinearVariant


class PooledForm(Form):
    """out_i = own * v_i + (1 - own) * mean(v): [B, H, N, d], [B, H, M, d], [B, H, M, e] -> [B, H, N, e]."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self.own = own

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.own * value + (1 - self.own) * value.mean(2, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Pooled(LinearVariant):
    """own: the share of its own value that a token keeps, 0 to 1."""

    own: float = 0.25

    name = "pooled"
    summary = "the mean of all values for every token, and a share of its own"
    source = "a package of someone else's; after Yu et al. 2022, MetaFormer"

    def __post_init__(self) -> None:
        if not 0 <= self.own <= 1:
            raise ValueError(f"own={self.own} must lie between 0 and 1")

    def refuse_form(self, site: AttentionSite) -> str | None:
        return None if site.n_queries == site.n_keys else "mixes each token's own value in, and has none for a query"

    def form(self, site: AttentionSite) -> Form:
        return PooledForm(self.own)

    def form_multiplies(self, site: AttentionSite) -> int:
        return site.heads * site.n_queries * site.value_dim
