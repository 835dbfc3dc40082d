"""SwiftFormer's efficient additive attention: global queries for all tokens, no softmax and no value."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, refuse_unpaired
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.foldable import Affine, per_head
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.mean_query import mean_query, shares_of
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs
from attnrewrite.variants.parts.tensors import merge_heads, safe, score_scale, split_heads, unit

RIDGE = 1e-2
LEVEL = 8.0  # of the constant channel, in mean token norms
GATE_CHANNELS = 64  # of a query, that a gate is fitted to: statistics grow with their square, for every channel
LEAST_NORM = 1e-12  # of the mean token, below which it counts as zero


def additive_attention(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(G * k, q) of the authors' code, for query, key [B, N, D] and w_g [D, Q]: [B, N, D] each.

    q and k have l2 norm one per token, alpha = q w_g norm one over the tokens (which cancels the paper's scale), and
    G = sum_n alpha_n q_n. The paper's equations 4-6 leave both normalisations out; its code and timm have them. The
    paper has one global query, Q = 1; several are ours, each of D / Q channels in turn.
    """
    query, key = unit(query, 2), unit(key, 2)
    return global_query(query, weight) * key, query


def global_query(query: Tensor, weight: Tensor) -> Tensor:
    """G [B, 1, D], all global queries side by side, for unit queries [B, N, D] and w_g [D, Q]."""
    alpha = token_weights(query, weight).transpose(1, 2).unsqueeze(2)
    return merge_heads(alpha @ split_heads(query, weight.shape[1]))


def token_weights(query: Tensor, weight: Tensor) -> Tensor:
    """alpha [B, N, Q]: each token's part in the global queries, of l2 norm one, for unit queries [B, N, D]."""
    return unit(query @ weight, 1)


class Slots(nn.Module):
    """The teacher's value and query [B, H, N, d] in the slots of the published query and key, [B, N, D] each.

    The value is what is aggregated and passed on, each channel with a gain and a shift. A gate, a map of the query
    within its head, says token by token how much of the aggregate is taken. Uncalibrated, both are plain copies.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        width = heads * channels
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.gate = nn.Parameter(torch.eye(channels).repeat(heads, 1, 1))
        self.gate_shift = nn.Parameter(torch.zeros(width))

    def forward(self, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.aggregated(value), merge_heads(query @ self.gate) + self.gate_shift

    def aggregated(self, value: Tensor) -> Tensor:
        return merge_heads(value) * self.gain + self.shift

    def level(self, channel: int) -> None:
        """Make one channel of both slots the constant LEVEL."""
        head, own = divmod(channel, self.gate.shape[2])
        self.gain[channel], self.shift[channel] = 0.0, LEVEL
        self.gate[head, :, own], self.gate_shift[channel] = 0.0, LEVEL

    def taken_out(self) -> tuple[Affine, Affine]:
        """What this does to query and value, for their projections to do."""
        return per_head(self.gate, self.gate_shift), Affine(torch.diag(self.gain), self.shift)


class SideBySide(Form):
    """[G * k, q], as [B, H, N, 2 e]: the published form without the maps after it, which an output projection holds,
    and without those before it (None) where projections hold them, too.
    """

    def __init__(self, weight: Tensor, slots: Slots | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.slots = copy.deepcopy(slots)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        first, second = (merge_heads(value), merge_heads(query)) if self.slots is None else self.slots(query, value)
        return split_heads(torch.cat(additive_attention(first, second, self.weight), dim=2), value.shape[1])

    def foldable_maps(self) -> FoldableMaps | None:
        """What fills the slots."""
        if self.slots is None:
            return None
        query, value = self.slots.taken_out()
        return FoldableMaps(SideBySide(self.weight, None), len(self.slots.gate), query=query, value=value)


class AdditiveForm(Form):
    """context(G * k) + final(q): the published Final(Proj(G * k) + q), with Final Proj held as one map. The teacher's
    value and query fill its slots; the teacher's key is idle.
    """

    maps_after = ("context", "final")

    def __init__(self, heads: int, channels: int, queries: int, scale: float) -> None:
        super().__init__()
        width = heads * channels
        self.heads = heads
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(width, queries))
        self.slots = Slots(heads, channels)
        self.context = nn.Linear(width, width)
        self.final = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            nn.init.eye_(self.context.weight)
            nn.init.zeros_(self.context.bias)
            nn.init.eye_(self.final.weight)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        context, token = self._attend(query, value)
        return split_heads(self.context(context) + self.final(token), self.heads)

    def _attend(self, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        aggregated, gate = self.slots(query, value)
        return additive_attention(aggregated, gate, self.weight)

    def _unit_values(self, value: Tensor) -> Tensor:
        """What the global queries are sums of, [B, N, D]."""
        return unit(self.slots.aggregated(value), 2)

    def foldable_maps(self) -> FoldableMaps | None:
        """Both maps after the form: what is left writes [G * k, q] side by side, and has maps before it."""
        weight = torch.cat([self.context.weight, self.final.weight], dim=1)
        return FoldableMaps(SideBySide(self.weight, self.slots), self.heads, output=Affine(weight, self.context.bias))

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """Each token's part in the global queries, one map a query."""
        alpha = token_weights(self._unit_values(heads.value), self.weight)
        return {"part in the global query": alpha.transpose(1, 2)}

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """A constant channel first; then w_g, the gate, and both maps together, each by ridge regression.

        Tokens in both slots are scaled to norm one on average, and one channel, the one of softmax's output that varies
        least, is made the constant LEVEL: beside it the normalisation is nearly linear, and no magnitude is lost.
        """
        channel, norm = steadiest_channel(activations(), self.scale)
        self.slots.gain.fill_(1 / self._at_least(norm))
        self.slots.shift.zero_()
        self.slots.level(channel)
        self.weight.copy_(self._fitted_weight(mean_query(activations()), activations()))
        gate, norm = self._fitted_gate(activations)
        gate = gate / self._at_least(norm)
        self.slots.gate.copy_(gate[:, :-1])
        self.slots.gate_shift.copy_(gate[:, -1].flatten())
        self.slots.level(channel)
        maps = self._fitted_maps(activations()).T
        width = self.final.weight.shape[0]
        self.context.weight.copy_(maps[:, :width])
        self.final.weight.copy_(maps[:, width:-1])
        self.context.bias.copy_(maps[:, -1])

    def _at_least(self, norm: float) -> float:
        """A norm to divide by: zero it is where all tokens are."""
        return max(norm, safe(LEAST_NORM, self.weight.dtype))

    def _fitted_weight(self, mean: Tensor, batches: Iterator[Heads]) -> Tensor:
        """w_g [D, Q], for parts of the tokens as the softmax of the mean query [H, d] with their keys gives them."""
        width, queries = self.weight.shape
        shares = shares_of(queries, width, self.heads).to(mean)
        fit = LeastSquares()
        for heads in batches:
            scores = torch.einsum("hd,bhnd->bnh", mean * self.scale, heads.key.double())
            wanted = torch.softmax(scores, dim=1) @ shares.T * scores.shape[1]
            fit.add(self._unit_values(heads.value).flatten(0, 1).double(), wanted.flatten(0, 1))
        return fit.solve(RIDGE)

    def _fitted_gate(self, batches: Callable[[], Iterator[Heads]]) -> tuple[Tensor, float]:
        """The gate g [H, d + 1, d] of [q, 1], and the root mean square of what it gives a token.

        Each channel of softmax's output is fitted by [q, 1] g * G + [q, 1] c; what c gives is left to the maps after.
        Of queries of many channels, those directions count that they have most of.
        """
        basis = _leading(batches(), GATE_CHANNELS)
        fit, total = LeastSquares(), torch.zeros(1, dtype=torch.float64)
        for heads, target in with_outputs(batches(), self.scale):
            query = F.pad(heads.query.double() @ basis, (0, 1), value=1.0)
            gram, moment = query.mT @ query, target.double().mT @ query
            context = global_query(self._unit_values(heads.value), self.weight)
            context = split_heads(context, self.heads).squeeze(2).double()
            both = torch.stack([context, torch.ones_like(context)], dim=3)  # the columns are [G, 1] x [q, 1]
            left = torch.einsum("bhei,bhej,bhkl->heikjl", both, both, gram).flatten(4).flatten(2, 3)
            right = torch.einsum("bhei,bhek->heik", both, moment).flatten(2)
            fit.add_statistics(left, right.unsqueeze(3))
            total = total.to(gram) + gram.sum(0)
        gate = fit.solve(RIDGE)[:, :, : total.shape[1], 0]
        energy, tokens = torch.einsum("hek,hkl,hel->", gate, total, gate), total[0, -1, -1]
        linear, constant = gate.mT.split([basis.shape[2], 1], dim=1)
        return torch.cat([basis @ linear, constant], dim=1), math.sqrt(float(energy / tokens))

    def _fitted_maps(self, batches: Iterator[Heads]) -> Tensor:
        """The maps after the form, [2 D + 1, D]: of G * k, of q, and the bias."""
        fit = LeastSquares()
        for heads, target in with_outputs(batches, self.scale):
            columns = F.pad(torch.cat(self._attend(heads.query, heads.value), dim=2), (0, 1), value=1.0)
            fit.add(columns.flatten(0, 1).double(), merge_heads(target).flatten(0, 1).double())
        return fit.solve(RIDGE)


def _leading(batches: Iterator[Heads], most: int) -> Tensor:
    """The directions [H, d, at most `most`] that queries have most of; all of them as they are, where those are few."""
    first = next(batches)
    heads, channels = first.query.shape[1], first.query.shape[3]
    every = torch.eye(channels).to(first.query.device, torch.float64).expand(heads, -1, -1)
    if channels <= most:
        return every
    moment = torch.zeros_like(every)
    for query in (each.query.double() for each in (first, *batches)):
        moment += (query.mT @ query).sum(0)
    return torch.linalg.eigh(moment).eigenvectors[..., -most:]


def steadiest_channel(batches: Iterator[Heads], scale: float) -> tuple[int, float]:
    """The channel of softmax's output, of all heads together, that varies least, and the mean norm of a value token."""
    moments, norms = [], []
    for heads, target in with_outputs(batches, scale):
        outputs = merge_heads(target).flatten(0, 1).double()
        moments.append(torch.stack([torch.ones_like(outputs), outputs, outputs.square()]).sum(1))
        norms.append(merge_heads(heads.value).double().norm(dim=2).sum())
    count, total, square = torch.stack(moments).sum(0)
    return int((square - total.square() / count).argmin()), float(torch.stack(norms).sum() / count[0])


@dataclass(frozen=True, kw_only=True)
class Additive(LinearVariant):
    """queries: global queries per site; 0 gives one per head, 1 is the paper's."""

    queries: int = 0

    no_key_bias = Refusal("weights-normed", "norms weights of all tokens, of which a mask on the keys leaves none out")
    name = "additive"
    summary = "SwiftFormer's efficient additive attention: one global query for each head, no softmax"
    source = "Shaker et al. 2023, SwiftFormer, equations 4-6, with the code's normalisations"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 0:
            raise InputError(f"additive: queries={self.queries} must be at least 1, or 0 for one per head")

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        if reason := refuse_unpaired(site):
            return reason
        if site.head_dim != site.value_dim:
            why = f"multiplies query and value channel by channel, and they have {site.head_dim} and {site.value_dim}"
            return Refusal("unequal-channels", why)
        channels = site.heads * site.value_dim
        if self.queries and channels % self.queries:
            why = f"its {channels} channels do not split over {self.queries} global queries"
            return Refusal("uneven-queries", why)
        return None

    def form(self, site: AttentionSite) -> Form:
        return AdditiveForm(site.heads, site.value_dim, self.queries or site.heads, score_scale(site))

    def form_multiplies(self, site: AttentionSite) -> int:
        """Of every channel: both maps, the gate, the tokens' parts, and the value's gain, two norms, G and G * k."""
        width, queries = site.heads * site.value_dim, self.queries or site.heads
        return site.n_queries * width * (2 * width + site.head_dim + queries + 5)


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
