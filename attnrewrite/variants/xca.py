"""Cross-covariance attention: channels attend to channels (El-Nouby et al. 2021, XCiT, equation 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.errors import Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, refuse_unequal, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.tensors import merge_heads, split_heads, unit


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
    no_key_bias = Refusal("queries-normed", "norms queries over all tokens, of which a mask on the keys says nothing")

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
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
