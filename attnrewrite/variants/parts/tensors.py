"""How forms view tensors, and the small numerics they share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnrewrite.site import AttentionSite, Grid


def merge_heads(heads: Tensor) -> Tensor:
    """[B, H, N, d] -> [B, N, H * d]."""
    _, count, tokens, channels = heads.shape
    return heads.permute(0, 2, 1, 3).reshape(-1, tokens, count * channels)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """[B, N, H * d] -> [B, H, N, d]."""
    _, count, channels = tokens.shape
    return tokens.reshape(-1, count, heads, channels // heads).permute(0, 2, 1, 3)


def safe(epsilon: float, dtype: torch.dtype) -> float:
    """`epsilon`, or the smallest normal number of `dtype` where `epsilon` would round to zero."""
    return max(epsilon, torch.finfo(dtype).smallest_normal)


def wide(x: Tensor) -> Tensor:
    """`x`, half precision as float32: where products or sums would leave its range, as in torch's own softmax."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as `dtype`; where it is that already, nothing that an export would write down."""
    return x if x.dtype == dtype else x.to(dtype)


def unit(x: Tensor, axis: int) -> Tensor:
    """`x` of l2 norm one along `axis`. Means, not sums, of squares: a device's half precision has no room for sums."""
    size, whole = x.shape[axis], wide(x)
    mean = whole.square().mean(axis, keepdim=True).clamp(min=safe(1e-24 / size, whole.dtype))
    return as_type(whole / mean.sqrt() * size**-0.5, x.dtype)


def score_scale(site: AttentionSite) -> float:
    """What multiplies the product of the query and key that a form receives at `site`."""
    if site.core is None:
        raise ValueError(f"{site.name}: a site without a core has no scale; refuse it first")
    return site.core.scale


def image_grid(site: AttentionSite) -> Grid | None:
    """The grid that the site's queries and keys both lie on, or None when there is none.

    Cross-attention has none: where one side's grid lies in the other's image is not known.
    """
    grid = site.grid if site.kind == "self" else None
    return grid if grid and grid.tokens == site.n_queries == site.n_keys else None


def prefix_queries(site: AttentionSite) -> int:
    """How many of the site's queries come before the image's grid (class and register tokens)."""
    return site.grid.prefix if site.grid and site.grid.tokens == site.n_queries else 0


def take_heads(heads: Tensor, indices: Sequence[int]) -> Tensor:
    """The given heads of [B, H, ...], in the given order, by slices: a gather would leave the neural engine."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    parts = [heads[:, start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
