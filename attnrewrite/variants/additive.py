"""SwiftFormer's efficient additive attention: one global query for all tokens, and no value."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.errors import Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.foldable import Affine
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs
from attnrewrite.variants.parts.tensors import merge_heads, score_scale, split_heads, unit

RIDGE = 1e-4
SHIFTS = (8.0, 4.0)  # of the aggregated and the deciding slot, in mean token norms; fp16 bears them


def additive_attention(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(G * k, q) of the authors' code, for query, key [B, N, D] and w_g [D, 1]: [B, N, D] each.

    q and k have l2 norm one per token, alpha = q w_g norm one over the tokens (which cancels the paper's scale), and
    G = sum_n alpha_n q_n. The paper's equations 4-6 leave both normalisations out; its code and timm have them.
    """
    query, key = unit(query, 2), unit(key, 2)
    alpha = global_weights(query, weight)
    return (alpha.transpose(1, 2) @ query) * key, query


def global_weights(query: Tensor, weight: Tensor) -> Tensor:
    """alpha [B, N, 1]: each token's part in the global query, of l2 norm one, for unit queries [B, N, D]."""
    return unit(query @ weight, 1)


def attend(query: Tensor, value: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """(G * k, q) with the teacher's value and query, each shifted, in the slots of the published query and key."""
    return additive_attention(merge_heads(value) + shift[0], merge_heads(query) + shift[1], weight)


class SideBySide(Form):
    """[G * k, q], as [B, H, N, 2 e]: the published form without its maps, which an output projection holds."""

    def __init__(self, weight: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.shift = nn.Parameter(shift.detach().clone())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return split_heads(torch.cat(attend(query, value, self.weight, self.shift), dim=2), value.shape[1])


class AdditiveForm(Form):
    """context(G * k) + final(q): the published Final(Proj(G * k) + q), with Final Proj held as one map.

    The teacher's value stands in the published query's place (what is aggregated, and passed on), its query in the
    published key's place (what decides, token by token, how much of the aggregate is taken). The teacher's key is idle.
    """

    def __init__(self, heads: int, channels: int, scale: float) -> None:
        super().__init__()
        width = heads * channels
        self.heads = heads
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(width, 1))
        self.shift = nn.Parameter(torch.zeros(2, width))
        self.context = nn.Linear(width, width)
        self.final = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            nn.init.eye_(self.context.weight)
            nn.init.zeros_(self.context.bias)
            nn.init.eye_(self.final.weight)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        context, token = attend(query, value, self.weight, self.shift)
        return split_heads(self.context(context) + self.final(token), value.shape[1])

    def foldable_maps(self) -> FoldableMaps | None:
        """Both maps after the form: what is left writes [G * k, q] side by side."""
        weight = torch.cat([self.context.weight, self.final.weight], dim=1)
        form = SideBySide(self.weight, self.shift)
        return FoldableMaps(form, self.heads, output=Affine(weight, self.context.bias))

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """Each token's part in the global query, one map for all heads."""
        query = unit(merge_heads(heads.value) + self.shift[0], 2)
        return {"part in the global query": global_weights(query, self.weight).transpose(1, 2)}

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Shifts and w_g first, then both maps together by ridge regression on the softmax output.

        The shifts (biases of the published projections) are SHIFTS times as long as the mean token: beside them the
        normalisation is nearly linear, alpha nearly uniform, and the magnitude of a token is not lost.
        """
        measured = [(self._lengths(heads), len(heads.query)) for heads in activations()]
        images = sum(count for _, count in measured)
        lengths = torch.stack([each * (count / images) for each, count in measured]).sum(0)
        width = self.final.weight.shape[0]
        lengths = lengths * lengths.new_tensor(SHIFTS) * width**-0.5
        self.shift.copy_(lengths.unsqueeze(1).expand(2, width))
        total = sum(unit(merge_heads(heads.value) + self.shift[0], 2).double().sum((0, 1)) for heads in activations())
        self.weight.copy_(unit(torch.as_tensor(total), 0).unsqueeze(1))
        fit = LeastSquares()
        for heads, target in with_outputs(activations(), self.scale):
            context, token = attend(heads.query, heads.value, self.weight, self.shift)
            columns = torch.cat([context, token, torch.ones_like(token[..., :1])], dim=2)
            fit.add(columns.flatten(0, 1).double(), merge_heads(target).flatten(0, 1).double())
        maps = fit.solve(RIDGE).T.to(self.final.weight)
        self.context.weight.copy_(maps[:, :width])
        self.final.weight.copy_(maps[:, width : 2 * width])
        self.context.bias.copy_(maps[:, -1])

    def searched(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @staticmethod
    def _lengths(heads: Heads) -> Tensor:
        """The mean norm of a token's value and of its query, [2]."""
        return torch.stack([merge_heads(part).double().norm(dim=2).mean() for part in (heads.value, heads.query)])


@dataclass(frozen=True, kw_only=True)
class Additive(LinearVariant):
    no_key_bias = Refusal("weights-normed", "norms weights of all tokens, of which a mask on the keys leaves none out")
    name = "additive"
    summary = "SwiftFormer's efficient additive attention: one global query, no softmax, no key-value product"
    source = "Shaker et al. 2023, SwiftFormer, equations 4-6, with the code's normalisations"

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        if reason := refuse_unpaired(site):
            return reason
        if site.head_dim != site.value_dim:
            why = f"multiplies query and value channel by channel, and they have {site.head_dim} and {site.value_dim}"
            return Refusal("unequal-channels", why)
        return None

    def form(self, site: AttentionSite) -> Form:
        return AdditiveForm(site.heads, site.value_dim, score_scale(site))

    def form_multiplies(self, site: AttentionSite) -> int:
        width = site.heads * site.value_dim
        return site.n_queries * (2 * width * width + 5 * width)


class EfficientAdditiveAttention(nn.Module):
    """The published block with its projections: x [B, N, C] -> [B, N, C]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_query = nn.Linear(dim, dim)
        self.to_key = nn.Linear(dim, dim)
        self.w_g = nn.Parameter(torch.randn(dim, 1))
        self.proj = nn.Linear(dim, dim)
        self.final = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        context, query = additive_attention(self.to_query(x), self.to_key(x), self.w_g)
        return self.final(self.proj(context) + query)
