"""Operators that some compiler reads wrongly or not at all, written out in others.

TVM's importer drops attention's explicit scale in silence, refuses masks of bool, other ranks than 2 and 4 and grouped
queries, makes a gather of a select, and can fill neither a mask nor an integer tensor; its schedules for GPUs add to a
product over a single element what is added to it once more; coremltools takes every gelu for the exact one, makes
twenty gathers of a roll, and has no alias, no where on numbers, no bicubic resize, no sliding windows, no scatter
between types and no one_hot of int64, and misreads resizes by other than whole factors, reciprocals, steep softplus,
statistics of whole tensors and those that were learnt, and root mean squares of small numbers. Shapes are fixed by
then, so that a tensor like another is a constant. What compilers fail at rather than misread is in `lacking`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.passes.fx.lacking import LACKING, number
from attnrewrite.passes.fx.resampling import (
    RESIZES,
    SMOOTHED,
    by_strides,
    resized,
    resized_unless_whole,
    summed_windows,
    windows,
)

aten = torch.ops.aten


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (heads.repeat_interleave(groups, -3) for heads in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-1, -2)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed, barred = (
            torch.full((), added, dtype=scores.dtype, device=scores.device) for added in (0.0, -torch.inf)
        )
        attn_mask = torch.where(attn_mask, allowed, barred)
    if attn_mask is not None:
        # A sum, as most masks are constants: what is added is then one, too. It is made in the scores' own type.
        scores = scores + attn_mask.to(scores.dtype)
    return torch.softmax(scores, -1) @ value


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, (0,)).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: str = "valid",
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    if padding == "same":
        overlap = [reach * (size - 1) for reach, size in zip(dilation, weight.shape[2:], strict=True)]
        # The odd one goes to the end, as in torch.
        pairs = [(total // 2, total - total // 2) for total in reversed(overlap)]
        x = F.pad(x, [amount for pair in pairs for amount in pair])
    return F.conv2d(x, weight, bias, tuple(stride), 0, tuple(dilation), groups)


def _full_like(x: Tensor, value: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _new_full(x, x.shape, value, dtype)


def _new_full(x: Tensor, size: Sequence[int], value: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.full(tuple(size), value, dtype=dtype or x.dtype, device=x.device)


def _alias(x: Tensor) -> Tensor:
    return x


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return NotImplemented
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def _where(condition: Tensor, one: Tensor | float, other: Tensor | float) -> Tensor:
    dtype = torch.result_type(one, other)
    # Filled, not literal: torch 2.13 loses track of tensors that a decomposition brings along.
    one, other = (
        value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=condition.device)
        for value in (one, other)
    )
    return torch.where(condition, one, other)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if right.dim() == 1 < left.dim():
        return (left @ right.unsqueeze(-1)).squeeze(-1)
    if left.dim() == 1 < right.dim():
        return (left.unsqueeze(0) @ right).squeeze(-2)
    return left * right if left.dim() > 1 and left.shape[-1] == 1 else NotImplemented


def _one_hot(places: Tensor, classes: int = -1) -> Tensor:
    if classes < 0:
        return NotImplemented
    return (places.unsqueeze(-1) == torch.arange(classes, device=places.device)).to(torch.int64)


def _variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    axes = tuple(dim) if dim else tuple(range(x.dim()))
    count = math.prod(x.shape[axis] for axis in axes)
    freedom = count - (1 if correction is None else correction)
    squares = (x - x.mean(axes, keepdim=True)).square().mean(axes, keepdim=keepdim)
    return squares * (count / freedom if freedom > 0 else math.nan)


def _over_root_mean_square(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    squares = (x * x).mean(tuple(range(-len(shape), 0)), keepdim=True)
    normal = x * torch.rsqrt(squares + (torch.finfo(x.dtype).eps if eps is None else eps))
    return normal if weight is None else normal * weight


def _deviation(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _variance(x, dim, **options).sqrt()


def _and_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        axes = list(dim) if dim else list(range(x.dim()))
        return spread(x, dim, **options), x.mean(axes, keepdim=bool(options.get("keepdim")))

    return compute


def _place_in_all(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Where the extreme of a whole tensor stands."""

    def compute(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None or not x.dim():
            return NotImplemented
        place = operation(x.flatten(), 0)
        return place.reshape((1,) * x.dim()) if keepdim else place

    return compute


def _of_truths(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Whether any or all of numbers are not zero."""

    def compute(x: Tensor, *given: Any, **options: Any) -> Tensor:
        return NotImplemented if x.dtype == torch.bool else operation(x != 0, *given, **options)

    return compute


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if (beta, threshold) == (1, 20):
        return NotImplemented
    return torch.where(x * beta > threshold, x, F.softplus(x * beta) / beta)


def _by_its_size(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pooling whose windows lie side by side, which is what it means to leave their step out."""

    def compute(x: Tensor, size: Sequence[int], stride: Sequence[int] = (), *given: Any, **options: Any) -> Tensor:
        return NotImplemented if stride else operation(x, size, size, *given, **options)

    return compute


def _mean_of_windows(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if stride and divisor_override is None:
        return NotImplemented
    if divisor_override is None:
        return aten.avg_pool2d.default(x, size, size, padding, ceil_mode, count_include_pad)
    if ceil_mode:
        return NotImplemented
    count = size[0] * size[-1]
    return aten.avg_pool2d.default(x, size, stride or size, padding) * (count / divisor_override)


def _padded(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """What is cut off by a negative number, and what is taken from the other end, in slices."""
    pairs = {x.dim() - 1 - place // 2: (pad[place], pad[place + 1]) for place in range(0, len(pad), 2)}
    if mode == "circular":
        for axis, (before, after) in pairs.items():
            size = x.shape[axis]
            kept = x.narrow(axis, max(-before, 0), size + min(before, 0) + min(after, 0))
            ends = x.narrow(axis, size - max(before, 0), max(before, 0)), x.narrow(axis, 0, max(after, 0))
            x = torch.cat([part for part in (ends[0], kept, ends[1]) if part.shape[axis]], axis)
        return x
    if mode != "constant" or min(pad, default=0) >= 0:
        return NotImplemented
    for axis, (before, after) in pairs.items():
        cut = min(before, 0) + min(after, 0)
        x = x.narrow(axis, max(-before, 0), x.shape[axis] + cut) if cut else x
    more = [max(amount, 0) for amount in pad]
    return F.pad(x, more, value=value) if any(more) else x


def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Tensor:
    """Normalisation of each channel by statistics that are given, which is that of batches."""
    mean, variance, own_statistics, momentum, epsilon, _ = options
    if own_statistics:
        return NotImplemented
    return F.batch_norm(x, mean, variance, weight, bias, False, momentum, epsilon)


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    return x.narrow(dim, index % x.shape[dim], 1).squeeze(dim)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    return _slice_scatter(x, source.unsqueeze(dim), dim, index % x.shape[dim], index % x.shape[dim] + 1)


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(x.shape[dim])
    parts = [x.narrow(dim, 0, first), source.to(x.dtype), x.narrow(dim, last, x.shape[dim] - last)]
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _bicubic(
    x: Tensor, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None = None
) -> Tensor:
    if output_size is None:
        assert scale_factors is not None
        output_size = [int(size * factor) for size, factor in zip(x.shape[2:], scale_factors, strict=True)]
    steps = [None if scale_factors is None else 1 / factor for factor in scale_factors or (1.0, 1.0)]
    rows, columns = (
        _cubic_weights(x, given, made, align_corners, step)
        for given, made, step in zip(x.shape[2:], output_size, steps, strict=True)
    )
    return rows @ x @ columns.T


def _cubic_weights(x: Tensor, given: int, made: int, align_corners: bool, step: float | None) -> Tensor:
    """What each of `made` places takes of each of `given` ones: Keys' kernel, a = -0.75, edges repeated."""
    places = torch.arange(made, dtype=x.dtype, device=x.device)
    if align_corners:
        places = places * ((given - 1) / (made - 1) if made > 1 else 0.0)
    else:
        places = (places + 0.5) * (given / made if step is None else step) - 0.5
    left = places.floor()
    numbers = torch.arange(given, dtype=x.dtype, device=x.device)
    weights = torch.zeros((made, given), dtype=x.dtype, device=x.device)
    for neighbour in (-1, 0, 1, 2):
        distance = (places - left - neighbour).abs()
        near = (1.25 * distance - 2.25) * distance * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weight = near if neighbour in (0, 1) else far
        taken = (left + neighbour).clamp(0, given - 1)
        weights = weights + weight[:, None] * (taken[:, None] == numbers).to(x.dtype)
    return weights


# what compilers are not given
WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.roll.default: _roll,
    aten.one_hot.default: _one_hot,
    aten.alias.default: _alias,
    aten.affine_grid_generator.default: torch._decomp.decompositions.affine_grid_generator,
    aten.all.default: _of_truths(torch.all),
    aten.all.dim: _of_truths(torch.all),
    aten.any.default: _of_truths(torch.any),
    aten.any.dim: _of_truths(torch.any),
    aten.argmax.default: _place_in_all(torch.argmax),
    aten.argmin.default: _place_in_all(torch.argmin),
    aten.as_strided.default: by_strides,
    aten.col2im.default: summed_windows,
    aten.unfold.default: windows,
    **{each: resized_unless_whole(each) for each in RESIZES},
    aten.bmm.default: _product,
    aten.conv2d.padding: _convolution,
    aten.full_like.default: _full_like,
    aten.gelu.default: _gelu,
    aten.matmul.default: _product,
    aten.masked_fill.Scalar: lambda x, mask, value: _where(mask, value, x),
    aten.new_full.default: _new_full,
    aten.new_ones.default: lambda x, size, **options: _new_full(x, size, 1, options.get("dtype")),
    aten.new_zeros.default: lambda x, size, **options: _new_full(x, size, 0, options.get("dtype")),
    aten.ones_like.default: lambda x, **options: _full_like(x, 1, options.get("dtype")),
    aten.reciprocal.default: lambda x: number(x if x.is_floating_point() else x.float(), 1) / x,
    aten.select.int: _select,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.upsample_bicubic2d.vec: _bicubic,
    aten.zeros_like.default: lambda x, **options: _full_like(x, 0, options.get("dtype")),
    aten.avg_pool1d.default: _by_its_size(aten.avg_pool1d.default),
    aten.avg_pool2d.default: _mean_of_windows,
    aten.avg_pool3d.default: _by_its_size(aten.avg_pool3d.default),
    aten.max_pool1d.default: _by_its_size(aten.max_pool1d.default),
    aten.max_pool2d.default: _by_its_size(aten.max_pool2d.default),
    aten.max_pool3d.default: _by_its_size(aten.max_pool3d.default),
    aten.pad.default: _padded,
    aten.instance_norm.default: _instance_norm,
    aten.rms_norm.default: _over_root_mean_square,
    aten.softplus.default: _softplus,
    aten.std.correction: _deviation,
    aten.std_mean.correction: _and_mean(_deviation),
    aten.var.correction: _variance,
    aten.var_mean.correction: _and_mean(_variance),
    aten.index_put.default: LACKING[aten.index_put.default],
    aten.max_pool2d_with_indices.default: LACKING[aten.max_pool2d_with_indices.default],
    aten.nan_to_num.default: LACKING[aten.nan_to_num.default],
    **{each: resized(each) for each in SMOOTHED},
    aten.where.Scalar: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
}
