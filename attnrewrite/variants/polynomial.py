"""Softmax attention by a polynomial: centred keys, a few reduced coordinates per head, and their monomials."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, received
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.foldable import per_head
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.key_masks import centred, key_weights, weighed
from attnrewrite.variants.parts.products import Order, mean_product
from attnrewrite.variants.parts.qk_maps import scaled_identities, score_factors
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.tensors import as_type, score_scale, wide

RIDGE = 1e-9
MOST_DEGREES = 32  # 1 / 34! is below what float32 has digits for
ROWS_PER_IMAGE = 128
LEAST_LEVEL = -700.0  # of the same, where all keys are masked: float64 ends at 709
LARGEST_LEVEL = 40.0  # of a row's mean weight, as a logarithm, up to which the fit follows it: float32 ends at 88


def feature_count(rank: int, degree: int) -> int:
    """How many monomials of at most `degree` there are in `rank` coordinates."""
    return math.comb(rank + degree, degree)


def monomials(x: Tensor, degree: int) -> Tensor:
    """All monomials of x [..., r] of at most `degree`, by degree: [..., C(r + degree, degree)].

    Within a degree those that start with coordinate i or later are a suffix, so each degree is r products of a
    coordinate with a suffix of the degree before.
    """
    rank = x.shape[-1]
    previous = torch.ones_like(x[..., :1])
    parts = [previous]
    for power in range(1, degree + 1):
        counts = [math.comb(rank - i + power - 2, power - 1) for i in range(rank)]
        width = previous.shape[-1]
        columns = [x[..., i : i + 1] * previous[..., width - count :] for i, count in enumerate(counts)]
        previous = torch.cat(columns, dim=-1)
        parts.append(previous)
    return torch.cat(parts, dim=-1)


def multinomials(rank: int, degree: int) -> tuple[Tensor, Tensor]:
    """For each monomial, its coefficient in (u . w)^m, and its degree m."""
    coefficients, degrees = [], []
    for power in range(degree + 1):
        for term in combinations_with_replacement(range(rank), power):
            repeats = math.prod(math.factorial(term.count(i)) for i in set(term))
            coefficients.append(math.factorial(power) / repeats)
            degrees.append(power)
    return torch.tensor(coefficients), torch.tensor(degrees)


class PolynomialForm(Form):
    """p(s) v / p(s) 1 with s = (q A_q) . ((k - mean k) A_k) of `rank` coordinates and p of `degree`, per head.

    Keys are centred, so softmax's own denominator is at least the number of keys (Jensen): the polynomial's is held
    there. Many tokens go through the monomials, few through the scores themselves; both give the same numbers.
    """

    query_map: nn.Parameter | None  # None where the projections hold them
    key_map: nn.Parameter | None
    repeats: Tensor
    expand: Tensor

    def __init__(self, heads: int, head_dim: int, rank: int, degree: int, scale: float, order: Order) -> None:
        super().__init__()
        self.rank, self.degree, self.scale, self.order = rank, degree, scale, order
        query, key = scaled_identities(head_dim, rank, scale)
        self.query_map = nn.Parameter(query.repeat(heads, 1, 1))
        self.key_map = nn.Parameter(key.repeat(heads, 1, 1))
        taylor = torch.tensor([1 / math.factorial(power) for power in range(degree + 1)])
        self.coefficients = nn.Parameter(taylor.repeat(heads, 1))
        if order == "qk":  # there may be more monomials than memory
            return
        repeats, degrees = multinomials(rank, degree)
        self.register_buffer("repeats", repeats, persistent=False)
        self.register_buffer("expand", torch.eye(degree + 1)[degrees].T.contiguous(), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = key_weights(bias)
        query, key = wide(query), centred(wide(key), weights)
        if self.query_map is not None and self.key_map is not None:
            query, key = query @ wide(self.query_map), key @ wide(self.key_map)
        attend = self._by_scores if self.order == "qk" else self._by_monomials
        return as_type(attend(query, key, wide(value), weights), value.dtype)

    def _by_scores(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
        shares = self._polynomial(query @ key.transpose(2, 3))
        shares = shares if weights is None else shares * weights.transpose(2, 3)
        return (shares @ value) / shares.sum(3, keepdim=True).clamp(min=key.shape[2])

    def _by_monomials(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
        factors = wide(self.coefficients) @ self.expand.to(query.dtype) * self.repeats.to(query.dtype)
        query = monomials(query, self.degree) * factors.unsqueeze(1)
        key = weighed(monomials(key, self.degree), weights)
        total = query @ key.mean(2, keepdim=True).transpose(2, 3)
        return mean_product(query, key, value, "kv") / total.clamp(min=1)

    def _polynomial(self, scores: Tensor) -> Tensor:
        """p(s) by Horner's rule, for scores [B, H, N, M]."""
        terms = wide(self.coefficients).unsqueeze(2).unsqueeze(3)
        result = terms[:, self.degree].expand_as(scores)
        for power in reversed(range(self.degree)):
            result = result * scores + terms[:, power]
        return result

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return received(self, heads)

    def foldable_maps(self) -> FoldableMaps | None:
        """Centring commutes with the maps, so that the projections can make the few coordinates themselves."""
        if self.query_map is None or self.key_map is None:
            return None
        form = copy.deepcopy(self)
        form.query_map = form.key_map = None
        return FoldableMaps(form, self.query_map.shape[0], per_head(self.query_map), per_head(self.key_map))

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """The best rank-r bilinear form for the scores met in calibration, then p by least squares on the softmax
        weights of a sample of rows: five numbers a head.
        """
        assert self.query_map is not None
        assert self.key_map is not None
        query_map, key_map, _ = score_factors(activations(), self.scale, self.rank)
        self.query_map.copy_(query_map)
        self.key_map.copy_(key_map)
        fit = LeastSquares()
        for heads in activations():
            weights = key_weights(heads.bias)
            key = centred(heads.key, weights)
            own = torch.ones_like(key[..., :1]) if weights is None else weights.expand(*key.shape[:3], 1)
            step = max(1, heads.query.shape[2] // ROWS_PER_IMAGE)
            for query, image, weight in zip(heads.query[:, :, ::step], key, own.double().mT, strict=True):
                exact = ((query * self.scale) @ image.transpose(1, 2)).double() + weight.log()
                near = ((query @ self.query_map) @ (image @ self.key_map).transpose(1, 2)).double()
                powers = torch.stack([near**power for power in range(self.degree + 1)], dim=3)
                level = (exact.logsumexp(2, keepdim=True) - math.log(exact.shape[2])).clamp(min=LEAST_LEVEL)
                share = (torch.exp(-level.clamp(max=LARGEST_LEVEL)) * weight).unsqueeze(3)
                fit.add((powers * share).flatten(1, 2), (exact - level).exp().flatten(1).unsqueeze(2))
        self.coefficients.copy_(fit.solve(RIDGE)[:, :, 0])

    def resolved(self) -> dict[str, Any]:
        return {"rank": self.rank, "degree": self.degree}

    def extra_repr(self) -> str:
        return f"rank={self.rank}, degree={self.degree}, order={self.order}"


@dataclass(frozen=True, kw_only=True)
class Polynomial(LinearVariant):
    """rank: reduced coordinates per head. degree: of the polynomial, even. max_features: lowers the rank until the
    monomials are no more. It has to be calibrated: uncalibrated, it keeps the first channels of each head.
    """

    rank: int = 4
    degree: int = 4
    max_features: int | None = None

    name = "polynomial"
    summary = "a polynomial of the scores' leading coordinates, fitted to softmax without gradients"
    no_key_bias = None
    source = "attnrewrite's own: centred keys, covariance-weighted factors, least-squares polynomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise InputError(f"polynomial: rank={self.rank} must be at least 1")
        if not 2 <= self.degree <= MOST_DEGREES or self.degree % 2:
            raise InputError(
                f"polynomial: degree={self.degree} must be even and from 2 to {MOST_DEGREES}: odd ones turn negative, "
                "and beyond, float32 has no number for the last coefficient, 1 / degree!"
            )
        if self.max_features is not None and self.max_features < feature_count(1, self.degree):
            least = feature_count(1, self.degree)
            raise InputError(f"polynomial: max_features={self.max_features} is under the {least} of rank 1")

    def form(self, site: AttentionSite) -> Form:
        rank, order = self._rank(site), self._order(site)
        return PolynomialForm(site.heads, site.head_dim, rank, self.degree, score_scale(site), order)

    def form_multiplies(self, site: AttentionSite) -> int:
        maps = (site.n_queries + site.n_keys) * site.head_dim * self._rank(site)
        return site.heads * (maps + self._multiplies(site)[self._order(site)])

    def _multiplies(self, site: AttentionSite) -> dict[Order, int]:
        """Of a head, by way: scores are products of `rank` coordinates and then Horner's rule, not all monomials."""
        rank = self._rank(site)
        tokens, features = site.n_queries + site.n_keys, feature_count(rank, self.degree)
        scores = site.n_queries * site.n_keys * (rank + self.degree + site.value_dim)
        return {"kv": tokens * features * (1 + site.value_dim), "qk": scores}

    def _rank(self, site: AttentionSite) -> int:
        ranks = range(1, min(self.rank, site.head_dim) + 1)
        limit = self.max_features or math.inf
        return max(rank for rank in ranks if feature_count(rank, self.degree) <= limit)

    def _order(self, site: AttentionSite) -> Order:
        if site.n_queries < 1 or site.n_keys < 1:
            return "kv"
        multiplies = self._multiplies(site)
        return min(multiplies, key=multiplies.__getitem__)
