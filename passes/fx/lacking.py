"""Operators in others, for those that a compiler lacks and torch does not write out, or in what no compiler reads.

Each function takes what its operator takes; it returns NotImplemented for what it does not cover.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.passes.fx.resampling import OTHER_RESIZES, resized, transposed_convolution

aten = torch.ops.aten


def number(x: Tensor, value: float) -> Tensor:
    """A number as `x` has them. Filled, not literal: torch 2.13 loses track of what a decomposition brings along."""
    return torch.full((), value, dtype=x.dtype, device=x.device)


# Order


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _ranked(x, (x.shape[dim] - 1) // 2 + 1, dim, keepdim)


def _ranked(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The `k`-th smallest along an axis, and where it stands."""
    values, places = torch.sort(x, dim=dim)
    values, places = (each.narrow(dim, k - 1, 1) for each in (values, places))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _middle(x: Tensor) -> Tensor:
    return _median(x.flatten(), 0)[0]


def _running(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """What `combine` makes of all up to each place of an axis, in as many steps as doubling takes."""

    def compute(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        for shift in _doubling(x, dim):
            head, rest = x.narrow(dim, 0, shift), x.narrow(dim, shift, x.shape[dim] - shift)
            x = torch.cat([head, combine(x.narrow(dim, 0, x.shape[dim] - shift), rest)], dim)
        return x

    return compute


def _doubling(x: Tensor, dim: int) -> list[int]:
    return [2**step for step in range((x.shape[dim] - 1).bit_length())] if x.dim() else []


def _running_extreme(beyond: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The running extreme along an axis and its place, the last one among equals."""

    def compute(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        shape = [-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]
        places = torch.arange(x.shape[dim], device=x.device).view(shape).expand(x.shape)
        for shift in _doubling(x, dim):
            count = x.shape[dim] - shift
            before, at = ([each.narrow(dim, first, count) for each in (x, places)] for first in (0, shift))
            earlier = beyond(before[0], at[0])
            x, places = (
                torch.cat([whole.narrow(dim, 0, shift), torch.where(earlier, one, other)], dim)
                for whole, one, other in zip((x, places), before, at, strict=True)
            )
        return x, places

    return compute


def _log_of_sum(one: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(one, other) + torch.log(1 + torch.exp(-(one - other).abs()))


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _searchsorted(
    edges: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Where a value would stand among edges: how many of them are below it (or not above)."""
    if sorter is not None:
        return NotImplemented
    edges = edges.unsqueeze(-2) if edges.dim() > 1 else edges
    below = edges <= x.unsqueeze(-1) if right or side == "right" else edges < x.unsqueeze(-1)
    return below.to(torch.int32 if out_int32 else torch.int64).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


# Places


def _repeated(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Numbers from 0, each as often as `repeats` says."""
    if output_size is None:
        return NotImplemented
    places = torch.arange(output_size, device=repeats.device)
    return (places.unsqueeze(-1) >= repeats.cumsum(0)).to(torch.int64).sum(-1)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    mask = mask.expand(x.shape)
    places = (mask.flatten().to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten().index_select(0, places).reshape(x.shape), x)


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Values put at places: a choice where the places are said by truth values, else a scattering along one axis."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return _put_where(x, indices, values, accumulate)
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    place, joined, shape, back = along_one_axis(x, axes, given)
    # Values are spread as the result of indexing would be, whose new axes come first here.
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    kept = x.dim() - len(axes)
    values = values.to(x.dtype).expand(*joined.shape[1 : 1 + first], *place.shape, *joined.shape[1 + first :])
    values = values.movedim(list(range(first, first + place.dim())), list(range(place.dim())))
    values = values.reshape(place.numel(), *joined.shape[1:])
    places = place.flatten().view(-1, *[1] * kept).expand(values.shape)
    scatter = joined.scatter_add if accumulate else joined.scatter
    return scatter(0, places, values).reshape(shape).permute(back)


def _put_where(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    mask = indices[0]
    if len(indices) > 1 or mask is None or values.numel() > 1:
        return NotImplemented
    mask = mask.to(torch.bool).view(*mask.shape, *[1] * (x.dim() - mask.dim()))
    values = values.to(x.dtype).reshape(())
    return torch.where(mask, x + values if accumulate else values, x)


def along_one_axis(
    x: Tensor, axes: Sequence[int], indices: Sequence[Tensor]
) -> tuple[Tensor, Tensor, tuple[int, ...], list[int]]:
    """Places along several axes as places along one that joins them.

    The places, not negative; `x` as [joined axes, other axes]; what shape and permutation make `x` of that again.
    """
    others = [axis for axis in range(x.dim()) if axis not in axes]
    order = [*axes, *others]
    sizes = [x.shape[axis] for axis in axes]
    place = torch.where(indices[0] < 0, indices[0] + sizes[0], indices[0])
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    ordered = x.permute(order)
    joined = ordered.reshape(math.prod(sizes), *(x.shape[axis] for axis in others))
    return place, joined, tuple(ordered.shape), [order.index(axis) for axis in range(x.dim())]


def _scatter_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """What stands at each place together with what is given there: a reduction over all that is given, masked."""
    if not x.dim():
        return NotImplemented
    dim %= x.dim()
    if any(x.shape[axis] != index.shape[axis] for axis in range(x.dim()) if axis != dim):
        return NotImplemented
    source = source[tuple(slice(size) for size in index.shape)].unsqueeze(-1)
    marked = index.unsqueeze(-1) == torch.arange(x.shape[dim], device=x.device)
    counts = marked.to(x.dtype).sum(dim).movedim(-1, dim)
    start, together, combine = _REDUCTIONS[reduce]
    found = together(torch.where(marked, source, number(x, start)), dim).movedim(-1, dim)
    if include_self:
        found = combine(x, found)
    elif reduce != "mean":
        found = torch.where(counts > 0, found, x)
    if reduce != "mean":
        return found
    return torch.where(counts > 0, found / (counts + include_self).clamp(1), x)


_REDUCTIONS: dict[str, tuple[float, Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0.0, lambda x, dim: x.sum(dim), torch.add),
    "mean": (0.0, lambda x, dim: x.sum(dim), torch.add),
    "prod": (1.0, lambda x, dim: x.prod(dim), torch.mul),
    "amax": (-torch.inf, lambda x, dim: x.amax(dim), torch.maximum),
    "amin": (torch.inf, lambda x, dim: x.amin(dim), torch.minimum),
}


# Distances


def _distances(one: Tensor, other: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    apart = (one.unsqueeze(-2) - other.unsqueeze(-3)).abs()
    if p == 2:
        return apart.square().sum(-1).sqrt()
    if p == 0:
        return (apart != 0).to(one.dtype).sum(-1)
    if math.isinf(p):
        return apart.amax(-1)
    return apart.sum(-1) if p == 1 else apart.pow(p).sum(-1).pow(1 / p)


def _pairwise_distances(x: Tensor, p: float = 2.0) -> Tensor:
    rows, columns = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return _distances(x, x, p).flatten().index_select(0, rows * len(x) + columns)


# Numbers


def _without_nan(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.is_floating_point():
        return x * 1
    limits = torch.finfo(x.dtype)
    kept = torch.where(x == torch.inf, number(x, limits.max if posinf is None else posinf), x)
    kept = torch.where(x == -torch.inf, number(x, limits.min if neginf is None else neginf), kept)
    return torch.where(x == x, kept, number(x, 0.0 if nan is None else nan))


def _of_numbers(extreme: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The larger or smaller of two, and the other one where one is not a number."""
    return lambda x, y: torch.where(x == x, torch.where(y == y, extreme(x, y), x), y)


def _rest(x: Tensor, divisor: Tensor | float) -> Tensor:
    """What division that rounds to zero leaves."""
    return x - torch.div(x, divisor, rounding_mode="trunc") * divisor


def _product(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.prod(x.flatten(), 0, dtype=dtype)


def _products(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Halves of an axis multiplied until one place is left."""
    x = (x if x.is_floating_point() else x.to(torch.int64)) if dtype is None else x.to(dtype)
    if not x.shape[dim]:
        return NotImplemented
    while (size := x.shape[dim]) > 1:
        half, odd = size // 2, [x.narrow(dim, size - 1, 1)] if size % 2 else []
        x = torch.cat([x.narrow(dim, 0, half) * x.narrow(dim, half, half), *odd], dim)
    return x if keepdim else x.squeeze(dim)


def _of_truth(truths: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A bitwise operator as the logical one, where it is of truth values."""

    def compute(*given: Any) -> Tensor:
        tensors = [each for each in given if isinstance(each, Tensor)]
        return truths(*given) if all(each.dtype == torch.bool for each in tensors) else NotImplemented

    return compute


def _trilinear(
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of products of three, each spread along axes of the others."""
    factors = []
    for factor, axes in ((one, expand1), (two, expand2), (three, expand3)):
        for axis in sorted(axes):
            factor = factor.unsqueeze(axis)
        factors.append(factor)
    return (factors[0] * factors[1] * factors[2]).sum(list(sumdim))


# Windows


def _largest_and_places(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest of each window of an image, and its place in the image by rows."""
    if ceil_mode or x.dim() != 4:
        return NotImplemented
    size, stride, padding, dilation = ((*each, *each)[:2] for each in (size, stride or size, padding, dilation))
    edges = [pad for pad in reversed(padding) for _ in range(2)]
    image = F.pad(x, edges, value=-torch.inf) if any(edges) else x
    lengths = [
        (length - reach * (each - 1) - 1) // step * step + 1
        for length, each, step, reach in zip(image.shape[2:], size, stride, dilation, strict=True)
    ]
    places = torch.arange(x.shape[2] * x.shape[3], device=x.device).view(1, 1, *x.shape[2:])
    numbers = F.pad(places.to(x.dtype), edges)
    found: list[tuple[Tensor, Tensor]] = []
    for down in range(size[0]):
        for right in range(size[1]):
            begins = (down * dilation[0], right * dilation[1])
            parts = []
            for part in (image, numbers):
                for axis, begin, length, step in zip((2, 3), begins, lengths, stride, strict=True):
                    part = aten.slice.Tensor(part, axis, begin, begin + length, step)
                parts.append(part)
            found.append((parts[0], parts[1].expand_as(parts[0])))
    values, where = found[0]
    for value, place in found[1:]:  # the first of equals, as in torch
        larger = value > values
        values, where = torch.where(larger, value, values), torch.where(larger, place, where)
    return values, where.to(torch.int64)


def _unpooled(x: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Values put back at their places of an image of zeros."""
    flat = torch.zeros(*x.shape[:-2], math.prod(output_size), dtype=x.dtype, device=x.device)
    return flat.scatter(-1, indices.flatten(-2), x.flatten(-2)).unflatten(-1, tuple(output_size))


def _adaptive_largest(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest of parts that may overlap, axis by axis; where they stand is not said."""
    for axis, count in enumerate(output_size, start=x.dim() - len(output_size)):
        size = x.shape[axis]
        bounds = [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]
        x = torch.cat([x.narrow(axis, first, last - first).amax(axis, True) for first, last in bounds], axis)
    return x, torch.zeros(x.shape, dtype=torch.int64, device=x.device)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Each place of a diagonal comes a row and one column after the one before."""
    high, wide = x.shape[dim1], x.shape[dim2]
    count = min(high + min(offset, 0), wide - max(offset, 0))
    if count < 1:
        return NotImplemented
    begin = offset if offset >= 0 else -offset * wide
    flat = x.movedim((dim1, dim2), (-2, -1)).flatten(-2)
    return aten.slice.Tensor(flat, flat.dim() - 1, begin, begin + (count - 1) * (wide + 1) + 1, wide + 1)


LACKING: dict[Any, Callable[..., Any]] = {
    **{each: resized(each) for each in OTHER_RESIZES},
    aten.__lshift__.Scalar: lambda x, bits: x * 2**bits,
    aten.__rshift__.Scalar: lambda x, bits: torch.div(x, 2**bits, rounding_mode="floor"),
    aten._cdist_forward.default: _distances,
    aten._pdist_forward.default: _pairwise_distances,
    aten.acosh.default: lambda x: torch.log(x + (x * x - 1).sqrt()),
    aten._trilinear.default: _trilinear,
    aten.addbmm.default: lambda x, a, b, *, beta=1, alpha=1: x * beta + (a @ b).sum(0) * alpha,
    aten.adaptive_max_pool1d.default: _adaptive_largest,
    aten.adaptive_max_pool3d.default: _adaptive_largest,
    aten.asinh.default: lambda x: x.sign() * torch.log(x.abs() + (x * x + 1).sqrt()),
    aten.bitwise_and.Tensor: _of_truth(torch.logical_and),
    aten.bitwise_not.default: _of_truth(torch.logical_not),
    aten.bitwise_or.Tensor: _of_truth(torch.logical_or),
    aten.bitwise_xor.Tensor: _of_truth(torch.logical_xor),
    aten.bucketize.Tensor: _bucketize,
    aten.cdist.default: _distances,
    aten.cummax.default: _running_extreme(torch.gt),
    aten.cummin.default: _running_extreme(torch.lt),
    aten.cumprod.default: _running(torch.mul),
    aten.diagonal.default: _diagonal,
    aten.erfc.default: lambda x: 1 - torch.erf(x),
    aten.fmax.default: _of_numbers(torch.maximum),
    aten.fmin.default: _of_numbers(torch.minimum),
    aten.fmod.Scalar: _rest,
    aten.fmod.Tensor: _rest,
    aten.hypot.default: lambda x, other: (x * x + other * other).sqrt(),
    aten.index_put.default: _put,
    aten.kthvalue.default: _ranked,
    aten.logcumsumexp.default: _running(_log_of_sum),
    aten.masked_scatter.default: _masked_scatter,
    aten.max_pool2d_with_indices.default: _largest_and_places,
    aten.max_unpool2d.default: _unpooled,
    aten.median.default: _middle,
    aten.median.dim: _median,
    aten.min.dim: lambda x, dim, keepdim=False: (x.amin(dim, keepdim), x.argmin(dim, keepdim)),
    aten.nan_to_num.default: _without_nan,
    aten.prod.default: _product,
    aten.prod.dim_int: _products,
    aten.repeat_interleave.Tensor: _repeated,
    aten.scatter_reduce.two: _scatter_reduced,
    aten.searchsorted.Tensor: _searchsorted,
    aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: torch.sort(x, dim, descending),
    aten.trunc.default: lambda x: x.sign() * x.abs().floor(),
}
# What compilers have, and fail at with some arguments.
FALLBACKS: dict[Any, Callable[..., Any]] = {aten.conv_transpose2d.input: transposed_convolution}
