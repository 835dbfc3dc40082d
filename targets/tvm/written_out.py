"""Operators in others that TVM's importer reads rightly, for those that it lacks, misreads or has no good code for.

Where torch's own decompositions serve, nothing stands here.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.passes.fx.einsum import einsum_as_product
from attnrewrite.passes.fx.lacking import along_one_axis
from attnrewrite.passes.fx.resampling import (
    RESIZES,
    by_strides,
    patches,
    resized,
    summed_windows,
    transposed_convolution,
)

aten = torch.ops.aten


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Indexing along several axes as indexing along one that joins them."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if len(axes) < 2 or any(index.dtype == torch.bool for index in given):
        return NotImplemented
    place, joined, _, _ = along_one_axis(x, axes, given)
    found = joined.index_select(0, place.flatten()).reshape(*place.shape, *joined.shape[1:])
    # The new axes stand where the indexed ones did, or first where those are no neighbours.
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    new, kept = list(range(place.dim())), list(range(place.dim(), found.dim()))
    return found.permute(*kept[:first], *new, *kept[first:])


OF_TRUTHS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    operator.add: torch.logical_or,
    operator.mul: torch.logical_and,
}


def _in_one_type(operation: Callable[[Any, Any], Tensor], turned: bool = False) -> Callable[..., Tensor]:
    """Arithmetic whose operands have the type of its result, as the importer takes the operands' for it; that of truths
    by logic, as LLVM has none."""

    def compute(one: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
        dtype = torch.result_type(one, other)
        if dtype == torch.bool and operation in OF_TRUTHS:
            truth = other if isinstance(other, Tensor) else torch.full((), other, dtype=dtype, device=one.device)
            return OF_TRUTHS[operation](one, truth)
        if operation is operator.truediv and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        if alpha == 1 and all(x.dtype == dtype for x in (one, other) if isinstance(x, Tensor)):
            return NotImplemented
        first, second = (x.to(dtype) if isinstance(x, Tensor) else x for x in (one, other))
        if alpha != 1:
            first, second = (first * alpha, second) if turned else (first, second * alpha)
        return operation(second, first) if turned else operation(first, second)

    return compute


def _windows(x: Tensor, dim: int, size: int, step: int, dilation: int) -> Tensor:
    """An axis as [windows, elements of a window]."""
    count = (x.shape[dim] - dilation * (size - 1) - 1) // step + 1
    begins = torch.arange(count, device=x.device) * step
    places = begins[:, None] + torch.arange(size, device=x.device) * dilation
    return x.index_select(dim, places.flatten()).unflatten(dim, (count, size))


def _im2col(
    x: Tensor, size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    image = F.pad(x if x.dim() == 4 else x[None], (padding[1], padding[1], padding[0], padding[0]))
    rows = _windows(image, 2, size[0], stride[0], dilation[0])
    windows = _windows(rows, 4, size[1], stride[1], dilation[1])  # [batch, channels, down, high, right, wide]
    columns = windows.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).flatten(2)
    return columns if x.dim() == 4 else columns[0]


def _adaptive_mean(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Means over parts of a line or an image: pooling where they are of one size, else products with their shares."""
    axes = tuple(range(-len(output_size), 0))
    given = x.shape[axes[0] :]
    if any(old % new for old, new in zip(given, output_size, strict=True)):
        right = x @ _shares(x, -1, output_size[-1]).mT
        return right if len(axes) == 1 else _shares(x, -2, output_size[-2]) @ right
    if set(output_size) == {1}:
        return x.mean(axes, keepdim=True)
    size = [old // new for old, new in zip(given, output_size, strict=True)]
    return F.avg_pool1d(x, size, size) if len(axes) == 1 else F.avg_pool2d(x, size, size)


def _shares(x: Tensor, axis: int, count: int) -> Tensor:
    """[count, length]: the share of each element of an axis in the mean of each of `count` parts, which may overlap."""
    length = x.shape[axis]
    part, place = torch.arange(count, device=x.device)[:, None], torch.arange(length, device=x.device)
    inside = (place >= part * length // count) & (place < ((part + 1) * length + count - 1) // count)
    shares = inside.to(x.dtype)
    return shares / shares.sum(1, keepdim=True)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _repeated(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Copies side by side as one tensor read again and again."""
    sizes = (1,) * (len(repeats) - x.dim()) + tuple(x.shape)
    apart = [each for size in sizes for each in (1, size)]
    wide = [each for pair in zip(repeats, sizes, strict=True) for each in pair]
    return x.reshape(apart).expand(wide).reshape([count * size for count, size in zip(repeats, sizes, strict=True)])


def _line_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """A convolution along a line as one over an image of one row."""
    image, kernel = x.unsqueeze(-2), weight.unsqueeze(-2)
    around = padding if isinstance(padding, str) else (0, padding[0])
    return F.conv2d(image, kernel, bias, (1, stride[0]), around, (1, dilation[0]), groups).squeeze(-2)


def _line_mean(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    step = (stride or size)[0]
    image = F.avg_pool2d(x.unsqueeze(-2), (1, size[0]), (1, step), (0, padding[0]), ceil_mode, count_include_pad)
    return image.squeeze(-2)


def _solid_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """A convolution of a film: one product where windows lie side by side, as patches do; else, summed over the frames
    of a window, convolutions of images."""
    if x.dim() != 5:
        return NotImplemented
    parts = patches(x, weight, stride, padding, dilation, groups)
    if parts is not None:
        return F.linear(parts, weight.flatten(1), bias).movedim(-1, 1)
    film = F.pad(x, (0, 0, 0, 0, padding[0], padding[0])).transpose(1, 2)  # [batch, frames, channels, ...]
    reach = film.shape[1] - dilation[0] * (weight.shape[2] - 1)
    total: Tensor | None = None
    for place in range(weight.shape[2]):
        frames = film.narrow(1, place * dilation[0], reach)[:, :: stride[0]]
        plane = weight.select(2, place)
        images = F.conv2d(frames.flatten(0, 1), plane, None, stride[1:], padding[1:], dilation[1:], groups)
        total = images if total is None else total + images
    assert total is not None
    total = total if bias is None else total + bias[:, None, None]
    return total.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    slope = weight.reshape(-1, *(1,) * (x.dim() - 2)) if x.dim() > 1 else weight
    return x.clamp(min=0) + slope * x.clamp(max=0)


def _pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    *lead, channels, high, wide = x.shape
    each, batch = upscale_factor, len(lead)
    parts = x.reshape(*lead, channels // each**2, each, each, high, wide)
    kept = list(range(batch + 1))
    order = (*kept, batch + 3, batch + 1, batch + 4, batch + 2)
    return parts.permute(order).reshape(*lead, channels // each**2, high * each, wide * each)


def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Tensor:
    """Normalisation of each channel of each image by itself, which is that of groups of one channel."""
    _, _, own_statistics, _, epsilon, _ = options
    return F.group_norm(x, x.shape[1], weight, bias, epsilon) if own_statistics else NotImplemented


def _summed_as(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A sum of what is no number (of truth values, say) as a sum of numbers."""

    def compute(x: Tensor, *given: Any, **options: Any) -> Tensor:
        if x.dtype.is_floating_point or x.dtype == torch.int64:
            return NotImplemented
        return operation(x.to(torch.int64), *given, **options)

    return compute


def _extreme(value: Callable[..., Tensor], place: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is largest or smallest, and where, each by itself: most models read one, and the importer sorts for both."""
    return lambda x, dim, keepdim=False: (value(x, dim, keepdim), place(x, dim, keepdim))


ARITHMETIC: dict[Any, Callable[..., Tensor]] = {
    aten.add.Tensor: _in_one_type(operator.add),
    aten.add.Scalar: _in_one_type(operator.add),
    aten.sub.Tensor: _in_one_type(operator.sub),
    aten.sub.Scalar: _in_one_type(operator.sub),
    aten.mul.Tensor: _in_one_type(operator.mul),
    aten.mul.Scalar: _in_one_type(operator.mul),
    aten.div.Tensor: _in_one_type(operator.truediv),
    aten.div.Scalar: _in_one_type(operator.truediv),
    aten.rsub.Scalar: _in_one_type(operator.sub, turned=True),
}
WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _indexed,
    aten.as_strided.default: by_strides,
    aten.col2im.default: summed_windows,
    aten.im2col.default: _im2col,
    **{each: resized(each) for each in RESIZES},
    aten._adaptive_avg_pool2d.default: _adaptive_mean,
    aten.adaptive_avg_pool1d.default: _adaptive_mean,
    aten.adaptive_avg_pool2d.default: _adaptive_mean,
    aten.avg_pool1d.default: _line_mean,
    aten.conv1d.default: _line_convolution,
    aten.conv1d.padding: _line_convolution,
    aten.conv3d.default: _solid_convolution,
    aten.conv_transpose2d.input: transposed_convolution,
    aten.cumsum.default: _summed_as(aten.cumsum.default),
    aten.einsum.default: einsum_as_product,
    aten.instance_norm.default: _instance_norm,
    aten.max.dim: _extreme(torch.amax, torch.argmax),
    aten.min.dim: _extreme(torch.amin, torch.argmin),
    aten.prelu.default: _prelu,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.repeat.default: _repeated,
    aten.stack.default: _stacked,
    aten.sum.default: _summed_as(aten.sum.default),
    aten.sum.dim_IntList: _summed_as(aten.sum.dim_IntList),
    **ARITHMETIC,
}
# What the importer has and misreads, or reads as what no schedule of ours knows, and that is written out well.
MISREAD = {
    *RESIZES,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.avg_pool1d.default,
    aten.conv1d.default,
    aten.conv3d.default,
    aten.conv_transpose2d.input,
    aten.einsum.default,
    aten.instance_norm.default,
    aten.max.dim,
    aten.min.dim,
    aten.prelu.default,
    aten.pixel_shuffle.default,
    aten.repeat.default,
    aten.stack.default,
}
