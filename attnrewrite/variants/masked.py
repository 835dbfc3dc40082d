"""MaiT: softmax attention whose heads see the scores of a small square of neighbours, and zeros beyond it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.base import Form, Heads, summed_with
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.masked_heads import count_by_error, heads_by_error, heads_by_locality
from attnrewrite.variants.parts.neighbours import Neighbourhood
from attnrewrite.variants.parts.softmax_rows import FIRST, softmax_attention
from attnrewrite.variants.parts.tensors import (
    as_type,
    image_grid,
    merge_heads,
    score_scale,
    split_heads,
    take_heads,
    wide,
)

HeadChoice = Literal["all", "paper-search", "error"]
SMALLEST = 3  # the side of a square of neighbours
DEFAULT = 5  # the larger of the paper's two, which no grid is too small for
FEW_TOKENS = 400  # of a grid are trained by way of all their scores


class HardMask(nn.Module):
    """softmax(M * s) v in O(N R^2), where M is 1 between neighbours and 0 elsewhere (MaiT, equation 2).

    A score of 0 weighs e^0 = 1, so that out_i = [sum_near w_j v_j + e^-m sum_all v] / [sum_near w_j + N e^-m] with
    w_j = e^(s_j - m) - e^-m and m = max(0, max s_j). Prefix tokens see all and are seen by all. A step off the grid has
    score 0 and so weight 0. A bias counts where the score does.

    Of a grid that some square covers: `DenseMask`. A query that sees every key has none of score 0, and where all its
    scores are far below that, the sum under its weights is lost to rounding here.
    """

    inside: Tensor

    def __init__(self, grid: Grid, size: int, scale: float) -> None:
        super().__init__()
        self.near = Neighbourhood(grid, size)
        self.prefix = grid.prefix
        self.scale = scale
        self.register_buffer("inside", self.near.inside(), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        weights, rest = (as_type(part, value.dtype) for part in self.weights(query, key, bias))
        out = rest * value.mean(2, keepdim=True)
        for step, near in enumerate(self.near.shifted(value[..., self.prefix :, :])):
            out = out + weights[..., step : step + 1] * near
        if not self.prefix:
            return out
        out = out + weights[..., len(self.near.steps) :] @ value[..., : self.prefix, :]
        rows = None if bias is None else bias[..., : self.prefix, :]
        return torch.cat([softmax_attention(query[..., : self.prefix, :], key, value, self.scale, rows), out], dim=2)

    def weights(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What each neighbour and prefix key weighs beyond an unseen key, [B, H, P, steps + prefix], and what all
        unseen weight comes to, [B, H, P, 1]: together they sum to one.
        """
        scores = self.scores(query, key, bias)
        top = scores.amax(3, keepdim=True).clamp(min=0)
        unseen = torch.exp(-top)
        weights = torch.exp(scores - top) - unseen
        total = weights.sum(3, keepdim=True) + unseen * key.shape[2]
        return weights / total, unseen / total * key.shape[2]

    def scores(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
        """Scores of the grid's queries with their neighbours' keys, then with the prefix keys."""
        query, key = wide(query), wide(key)
        image = query[..., self.prefix :, :] * self.scale
        scores = self.near.scores(image, key[..., self.prefix :, :])
        if bias is not None:
            bias = bias.expand(*bias.shape[:-2], query.shape[2], key.shape[2])
            near = self.near.bias(bias[..., self.prefix :, self.prefix :])
            scores = scores + torch.where(self.inside > 0, near, 0.0)  # what is not there may be -inf
        scores = scores * self.inside.to(scores.dtype)
        if not self.prefix:
            return scores
        seen = image @ key[..., : self.prefix, :].transpose(2, 3)
        if bias is not None:
            seen = seen + bias[..., self.prefix :, : self.prefix]
        return torch.cat([scores, seen], dim=3)

    def counted(self) -> Tensor:
        """[N, N]: 1 where a score counts: between neighbours, and to and from the prefix; else 0."""
        every = self.prefix + self.near.tokens
        counted = torch.ones(every, every)
        counted[self.prefix :, self.prefix :] = self.near.dense()
        return counted

    def by_shifts(self) -> "HardMask":
        """The same in O(N R^2), as it is deployed."""
        return self

    def locality(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
        """The attention locality score of every image and head, [B, H] (equation 3)."""
        weights, rest = self.weights(query, key, bias)
        seen = self.inside.sum(1).to(rest.dtype) + self.prefix
        return (weights.sum(3) + rest.squeeze(3) * seen / key.shape[2]).mean(2)


class DenseMask(HardMask):
    """The same in O(N^2), by way of all scores, which takes less time than shifts where tokens are few, and is no more
    where a square covers the grid.
    """

    seen: Tensor

    def __init__(self, grid: Grid, size: int, scale: float) -> None:
        super().__init__(grid, size, scale)
        self.register_buffer("seen", self.counted().bool(), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return as_type(self._probabilities(query, key, bias), value.dtype) @ value

    def by_shifts(self) -> HardMask:
        return hard_mask(self.near.grid, self.near.size, self.scale).to(self.inside)

    def locality(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
        seen = self._probabilities(query, key, bias) * self.seen
        return seen[:, :, self.prefix :].sum(3).mean(2)

    def _probabilities(self, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
        scores = (wide(query) * self.scale) @ wide(key).transpose(2, 3)
        scores = scores if bias is None else scores + bias
        return torch.softmax(torch.where(self.seen, scores, 0.0), dim=3)


def hard_mask(grid: Grid, size: int, scale: float, few: int = 0) -> HardMask:
    """The mask of a grid, by way of all scores where it has at most `few` tokens or a square covers it."""
    dense = grid.rows * grid.columns <= few or size >= max(grid.rows, grid.columns)
    return (DenseMask if dense else HardMask)(grid, size, scale)


def window_maps(form: Form, heads: Heads, mask: HardMask) -> dict[str, Tensor]:
    """What a masked form's keys receive, what the first token sees where it is none of the image, and the window of the
    token in the image's middle.
    """
    weights, grid = summed_with(form, heads), mask.near.grid
    middle = grid.prefix + grid.rows // 2 * grid.columns + grid.columns // 2
    first = {FIRST: weights[:, :, 0]} if grid.prefix else {}
    return {"attention received": weights.mean(2), **first, "window of the middle token": weights[:, :, middle]}


class MaskedForm(Form):
    """Hard masks on the heads `masked`, plain softmax on the others; `choice` says how calibration chooses them."""

    def __init__(
        self, mask: HardMask, heads: int, choice: HeadChoice | int | tuple[int, ...], tolerance: float
    ) -> None:
        super().__init__()
        self.mask = mask
        self.heads = heads
        self.choice = choice
        self.tolerance = tolerance
        self.masked = self._start()

    @property
    def searched(self) -> tuple[str, ...]:
        """Query and key, where no head keeps softmax's own probabilities. Values stay: with them a search came further
        on its own images and less far on others.
        """
        return ("query", "key") if len(self.masked) == self.heads else ()

    def _start(self) -> tuple[int, ...]:
        """The masked heads before calibration: the paper starts from head 0."""
        if isinstance(self.choice, tuple):
            return tuple(sorted(set(self.choice)))
        if isinstance(self.choice, int):
            return tuple(range(self.choice))
        return (0,) if self.choice == "paper-search" else tuple(range(self.heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        free = tuple(head for head in range(self.heads) if head not in self.masked)
        if not free:
            return self.mask(query, key, value, bias)
        if not self.masked:
            return softmax_attention(query, key, value, self.mask.scale, bias)

        def part(heads: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
            own = bias if bias is None or bias.ndim < 3 or bias.shape[-3] == 1 else take_heads(bias, heads)
            return take_heads(query, heads), take_heads(key, heads), take_heads(value, heads), own

        plain = part(free)
        both = torch.cat(
            [self.mask(*part(self.masked)), softmax_attention(*plain[:3], self.mask.scale, plain[3])], dim=1
        )
        order = (*self.masked, *free)
        return take_heads(both, [order.index(head) for head in range(self.heads)])

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """The weight of each key, on average over the queries and in the window of the token in the image's middle."""
        return window_maps(self, heads, self.mask)

    def at_rest(self, bias: Tensor) -> Tensor:
        """Softmax's, of the bias where the score counts: everywhere in a head that is not masked."""
        seen = self.mask.counted().bool().repeat(self.heads, 1, 1)
        seen[[head for head in range(self.heads) if head not in self.masked]] = True
        return torch.softmax(torch.where(seen.to(bias.device), bias, 0.0), dim=3)

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Choose the masked heads: by the paper's locality rule, or by the error that masking makes in each."""
        if self.choice == "paper-search":
            self.masked = heads_by_locality(self.mask.locality, activations())
        elif self.choice == "error":
            self.masked = heads_by_error(self.mask, self.mask.scale, activations(), self.tolerance)
        elif isinstance(self.choice, int):
            self.masked = count_by_error(self.mask, self.mask.scale, activations(), self.choice)

    def resolved(self) -> dict[str, Any]:
        return {"heads": self.masked, "soft": False}

    def deploy(self) -> Form:
        return MaskedForm(self.mask.by_shifts(), self.heads, self.masked, self.tolerance)

    def extra_repr(self) -> str:
        return f"masked={list(self.masked)} of {self.heads}"


def soft_masked_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor, alpha: Tensor, bias: Tensor | None = None
) -> Tensor:
    """softmax(s * (M + alpha (1 - M))) v, with the dense mask M [N, N] and alpha [H, 1, 1] (MaiT, section 4.3)."""
    scores = (wide(query) * scale) @ wide(key).transpose(2, 3)
    scores = scores if bias is None else scores + bias
    return as_type(torch.softmax(scores * (mask + alpha * (1 - mask)), dim=3), value.dtype) @ value


class SoftMaskedForm(Form):
    """Scores of non-neighbours times a learned alpha in (0, 1) per head: dense, for training; deployed as hard masks.

    alpha near 1 leaves the head as it was, near 0 masks it (section 4.3).
    """

    dense: Tensor

    def __init__(self, mask: HardMask, heads: int) -> None:
        super().__init__()
        self.mask = mask
        self.logit = nn.Parameter(torch.full((heads, 1, 1), 2.0))
        self.register_buffer("dense", mask.counted(), persistent=False)

    @property
    def searched(self) -> tuple[str, ...]:
        return ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        alpha = torch.sigmoid(wide(self.logit))
        return soft_masked_attention(query, key, value, self.mask.scale, self.dense.to(alpha.dtype), alpha, bias)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """As the hard form's."""
        return window_maps(self, heads, self.mask)

    def deploy(self) -> Form:
        masked = (self.logit.flatten() < 0).nonzero().flatten().tolist()
        return MaskedForm(self.mask, self.logit.shape[0], tuple(masked), 0.0)


@dataclass(frozen=True, kw_only=True)
class Masked(LinearVariant):
    """size: the square's side, 3 or 5: trained with it, 3 loses no more (the paper's table 3); a trained model that is
    converted loses less with 5. soft: a learned alpha instead of zeros (dense until deployed).

    heads: which heads are masked: all, a list, a count (those that lose least), paper-search (locality scores) or
    error (those whose output changes by less than `tolerance` of its energy). Prefix tokens are exact as published.
    approximate keeps a bias between neighbours, and in factors (`bias_rank`) a part of the rest; not where `soft`.
    """

    size: int = DEFAULT
    heads: HeadChoice | int | tuple[int, ...] = "all"
    soft: bool = False
    tolerance: float = 0.1

    approximation = "keeps it between neighbours, and a part of the rest"
    left_out = "the {bias} bias is kept between neighbours only"
    no_key_bias = Refusal("far-keys-weighed", "weighs every key beyond the neighbours with a score of zero")
    name = "masked"
    summary = "MaiT: softmax over the scores of 3x3 or 5x5 neighbours, zeros beyond"
    source = "Li et al. 2022, MaiT, equations 2-3 and section 4.3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < SMALLEST or self.size % 2 == 0:
            raise InputError(f"masked: size={self.size} must be odd and at least {SMALLEST}")
        if isinstance(self.heads, int) and self.heads < 1:  # an empty list is what a fit that masks no head resolves to
            raise InputError(f"masked: heads={self.heads} masks nothing: give a count of at least 1, a list, or all")
        if not 0 <= self.tolerance <= 1:
            raise InputError(f"masked: tolerance={self.tolerance} must lie between 0 and 1")

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        grid = image_grid(site)
        if grid is None:
            return Refusal("no-grid", "needs tokens that are known to be an image grid")
        if self.size > max(DEFAULT, 2 * max(grid.rows, grid.columns) - 1):
            return Refusal("beyond-grid", f"size={self.size} reaches beyond its grid of {grid.rows}x{grid.columns}")
        if isinstance(self.heads, int) and not 0 < self.heads <= site.heads:
            return Refusal("too-many-heads", f"heads={self.heads} does not fit its {site.heads} heads")
        if isinstance(self.heads, tuple) and not set(self.heads) <= set(range(site.heads)):
            return Refusal("unknown-heads", f"heads={list(self.heads)} names heads beyond its {site.heads}")
        return None

    def note(self, site: AttentionSite) -> str | None:
        soft = "what is saved has hard masks, or none, in place of the soft ones" if self.soft else None
        return "; ".join(filter(None, [super().note(site), soft])) or None

    def exact_rows(self, site: AttentionSite) -> int:
        return 0

    def factors(self, site: AttentionSite) -> int:
        return 0 if self.soft else super().factors(site)

    def form(self, site: AttentionSite) -> Form:
        grid = image_grid(site)
        if grid is None:
            raise ValueError(f"{site.name}: no image grid; refuse it first")
        mask = grid, self.size, score_scale(site)
        if self.soft:
            return SoftMaskedForm(hard_mask(*mask), site.heads)
        return MaskedForm(hard_mask(*mask, few=FEW_TOKENS), site.heads, self.heads, self.tolerance)

    def form_multiplies(self, site: AttentionSite) -> int:
        grid = image_grid(site)
        prefix = grid.prefix if grid else 0
        pairs = (site.n_queries - prefix) * (self.size**2 + prefix) + prefix * site.n_keys
        masked = 0 if self.soft else self._masked_heads(site)
        dense = (site.heads - masked) * site.n_queries * site.n_keys
        return (masked * pairs + dense) * (site.head_dim + site.value_dim)

    def _masked_heads(self, site: AttentionSite) -> int:
        """How many heads are masked, as far as the options say: a search may leave fewer."""
        if isinstance(self.heads, tuple):
            return len(set(self.heads))
        return self.heads if isinstance(self.heads, int) else site.heads


class MaskedAttention(nn.Module):
    """The published block with its projections: x [B, N, C] -> [B, N, C]; soft where `soft`."""

    def __init__(
        self, dim: int, heads: int, grid: Grid, size: int, masked: tuple[int, ...], soft: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        mask = hard_mask(grid, size, (dim // heads) ** -0.5)
        self.form = MaskedForm(mask, heads, masked, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part, self.heads) for part in torch.chunk(self.qkv(x), 3, dim=-1))
        return self.proj(merge_heads(self.form(query, key, value)))
