"""Query and key re-cut for a form: per-head linear maps, which a projection could hold as well, fitted in closed form.

A form sees scores through its own features only, so which coordinates of a head it is given matters as much as the
form: the same scores q . k have many factors. The best of rank r for the queries and keys met in calibration are the
leading singular vectors of the score form, weighted by both covariances.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.variants.parts.foldable import Affine, per_head
from attnrewrite.variants.parts.form import Heads
from attnrewrite.variants.parts.key_masks import key_weights, token_mean, weighed
from attnrewrite.variants.parts.tensors import wide


class QKMaps(nn.Module):
    """query A_q and key A_k + shift, for query and key [B, H, N, d]; half precision comes out as float32, for features
    and exponentials of it. The maps start as identities that together multiply the product by `scale`.
    """

    def __init__(self, heads: int, head_dim: int, scale: float = 1.0) -> None:
        super().__init__()
        query, key = scaled_identities(head_dim, head_dim, scale)
        self.query = nn.Parameter(query.repeat(heads, 1, 1))
        self.key = nn.Parameter(key.repeat(heads, 1, 1))
        self.shift = nn.Parameter(torch.zeros(heads, 1, head_dim))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return wide(query) @ wide(self.query), wide(key) @ wide(self.key) + wide(self.shift)

    def taken_out(self) -> tuple[Affine, Affine]:
        """What this does to query and key, for their projections to do."""
        return per_head(self.query), per_head(self.key, self.shift)

    @torch.no_grad()
    def fit(self, batches: Iterator[Heads], scale: float, arrange: Callable[[Tensor], Tensor]) -> None:
        """Give the form the leading coordinates of the scores, keys around their mean, arranged by `arrange`.

        `arrange` takes maps [H, d, d], most important coordinate first, to maps of the same shape.
        """
        query, key, mean = score_factors(batches, scale, self.query.shape[2])
        self.query.copy_(arrange(query))
        self.key.copy_(arrange(key))
        self.shift.copy_(-(mean.to(self.key) @ self.key))


def scaled_identities(head_dim: int, size: int, scale: float) -> tuple[Tensor, Tensor]:
    """Maps [head_dim, size] of query and key to their first coordinates, whose product is `scale` times theirs.

    Each has the root of the scale; the query has the sign, too.
    """
    key = torch.eye(head_dim, size) * math.sqrt(abs(scale))
    return key * math.copysign(1, scale), key


class NoMaps(QKMaps):
    """Query and key that projections have cut: what stands in the place of a QKMaps that was taken out."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return wide(query), wide(key)


def signed_pairs(maps: Tensor, size: int, gain: float = 1.0) -> Tensor:
    """The leading size / 2 coordinates with both signs, [u, -u], over and over: maps [H, d, d] -> [H, d, d].

    Positive features of u and of -u together are even where a product of scores should be, and lose no sign. What does
    not fill a group of `size` is zero.
    """
    half = maps[:, :, : size // 2] * gain
    group = F.pad(torch.cat([half, -half], dim=2), (0, size % 2))
    repeats = maps.shape[2] // size
    return F.pad(group.repeat(1, 1, repeats), (0, maps.shape[2] - size * repeats))


def score_factors(batches: Iterator[Heads], scale: float, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps A_q, A_k [H, d, rank] that minimise the mean of (scale q . k - (q A_q) . (k A_k))^2 over the queries and
    the centred keys met, and the mean key [H, 1, d]. Softmax does not see what centring takes off the keys.

    Each side's coordinates have the singular values as their mean squares, in order.
    """
    query, key, mean = (torch.zeros(1, dtype=torch.float64) for _ in range(3))
    images = 0
    for heads in batches:
        weights = key_weights(heads.bias)
        centre = token_mean(heads.key, weights)
        root = None if weights is None else weights.sqrt()
        images += len(centre)
        share = len(centre) / images  # of all images so far: batches need not be alike
        query = query.to(centre.device) + (_moment(heads.query) - query.to(centre.device)) * share
        key = key.to(centre.device) + (_moment(weighed(heads.key - centre, root)) - key.to(centre.device)) * share
        mean = mean.to(centre.device) + (centre.double().mean(0) - mean.to(centre.device)) * share
    (query_root, query_inverse), (key_root, key_inverse) = _roots(query), _roots(key)
    left, energy, right = torch.linalg.svd(query_root @ key_root * scale)
    root_energy = energy[:, :rank].sqrt().unsqueeze(1)
    return query_inverse @ left[:, :, :rank] * root_energy, key_inverse @ right.mT[:, :, :rank] * root_energy, mean


def _moment(tokens: Tensor) -> Tensor:
    """The mean over images and tokens of x x^T, [H, d, d]."""
    rows = tokens.double().transpose(0, 1).flatten(1, 2)
    return rows.mT @ rows / rows.shape[1]


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of [H, d, d] second moments, and its inverse where there is energy."""
    energy, basis = torch.linalg.eigh(moment)
    floor = energy.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * 1e-10
    inverse = torch.where(energy > floor, energy.clamp(min=floor).rsqrt(), 0.0)
    root = energy.clamp(min=0).sqrt()
    return (basis * root.unsqueeze(1)) @ basis.mT, (basis * inverse.unsqueeze(1)) @ basis.mT


def qk_map_multiplies(queries: int, keys: int, head_dim: int) -> int:
    """Multiply-adds of both maps for one head."""
    return (queries + keys) * head_dim**2
