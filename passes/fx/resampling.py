"""Resizes, sliding windows and strides, in slices, sums and products with constants: what compilers read alike."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

RESIZES = (
    aten._upsample_nearest_exact2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)
# Those of lines and of volumes, and means over parts that may overlap, which are as linear.
OTHER_RESIZES = (
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact3d.vec,
    aten.adaptive_avg_pool3d.default,
    aten.upsample_linear1d.vec,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest3d.vec,
    aten.upsample_trilinear3d.vec,
)
# Those that weigh all that a new place covers: compilers that have them have others.
SMOOTHED = (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)


def windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """`Tensor.unfold` as slices, in as few as there are windows or places in one."""
    if not x.dim():
        return NotImplemented
    axis = dim % x.dim()
    count = (x.shape[axis] - size) // step + 1
    if count <= size:
        parts = torch.cat([x.narrow(axis, start * step, size) for start in range(count)], axis)
        return parts.unflatten(axis, (count, size)).movedim(axis + 1, -1)
    reach = (count - 1) * step + 1
    parts = torch.cat([aten.slice.Tensor(x, axis, place, place + reach, step) for place in range(size)], axis)
    return parts.unflatten(axis, (size, count)).movedim(axis, -1)


def patches(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor | None:
    """A convolution's windows [batch, places..., channels x elements], if they lie side by side and fill the image."""
    size = tuple(weight.shape[2:])
    beside = size == tuple(stride) and not any(padding) and groups == 1 and set(dilation) == {1}
    if not beside or any(old % each for old, each in zip(x.shape[2:], size, strict=True)):
        return None
    counts = [old // each for old, each in zip(x.shape[2:], size, strict=True)]
    parts = x.reshape(*x.shape[:2], *(length for pair in zip(counts, size, strict=True) for length in pair))
    places = range(2, parts.dim(), 2)
    return parts.permute(0, *places, 1, *(axis + 1 for axis in places)).flatten(1 + len(size))


def by_strides(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """`Tensor.as_strided` of a tensor that is all of its storage, in order: elements by their numbers."""
    if not x.is_contiguous() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        return NotImplemented
    places = torch.full((), storage_offset or 0, dtype=torch.int64, device=x.device)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length, device=x.device) * step
    return x.flatten().index_select(0, places.flatten()).reshape(tuple(size))


def resized_unless_whole(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As `resized`, but for enlargements by whole factors, which stay what they are."""
    products = resized(operation)

    def compute(x: Tensor, size: Sequence[int] | None, *options: Any) -> Tensor:
        factors = options[-1] or [made / given for given, made in zip(x.shape[2:], size or (), strict=True)]
        return NotImplemented if all(factor == int(factor) for factor in factors) else products(x, size, *options)

    return compute


def _of_each(units: Callable[[Tensor, int], Tensor], x: Tensor, axis: int) -> Tensor:
    """[old, new]: what each new place of a spatial axis takes of each old one.

    `units` resizes that axis of an image of one channel, of which a neighbouring axis tells one old place from another:
    torch's kernels misread images of many channels and one column.
    """
    rank, size = x.dim() - 2, x.shape[2 + axis]
    other = axis + 1 if axis + 1 < rank else axis - 1
    shape = [size if each in (axis, other) else 1 for each in range(-2, rank)]
    found = units(torch.eye(size, dtype=x.dtype, device=x.device).reshape(shape), axis)
    return found.reshape(-1, size).T if other > axis else found.reshape(size, -1)


def resized(operation: Any) -> Callable[..., Tensor]:
    """A resize of lines, images or volumes by `operation`, which is linear in each axis, as products with constants."""
    # Those that take the size made, and are themselves not written out.
    whole = aten._adaptive_avg_pool3d.default if operation is aten.adaptive_avg_pool3d.default else None
    whole = whole or operation.overloadpacket.default

    def compute(x: Tensor, size: Sequence[int] | None, *options: Any) -> Tensor:
        given = x.shape[2:]
        factors = options[-1] if options else None
        made = size or [int(length * factor) for length, factor in zip(given, factors or (), strict=True)]

        def units(image: Tensor, axis: int) -> Tensor:
            kept = [made[each] if each == axis else length for each, length in enumerate(image.shape[2:])]
            scales = [factors[each] if factors and each == axis else None for each in range(len(given))]
            return whole(image, kept, *options[:-1], *(scales if options else ()))

        weights = [_of_each(units, x, axis) for axis in range(len(given))]
        x = x @ weights.pop()
        if weights:
            x = weights.pop().T @ x
        return (x.movedim(2, -1) @ weights.pop()).movedim(-1, 2) if weights else x

    return compute


def summed_windows(
    x: Tensor,
    output: Sequence[int],
    size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """`F.fold`: windows summed where they overlap: each of their elements is an image spread over the output's grid."""
    columns = x if x.dim() == 3 else x[None]
    batch, high, wide = columns.shape[0], *size
    whole = [length + 2 * pad for length, pad in zip(output, padding, strict=True)]
    counts = [
        (length - reach * (each - 1) - 1) // step + 1
        for length, reach, each, step in zip(whole, dilation, size, stride, strict=True)
    ]
    parts = columns.reshape(batch, -1, high, wide, *counts)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for row in range(high):
        for column in range(wide):
            begin = (row * dilation[0], column * dilation[1])
            total = total + _spread(parts[:, :, row, column], begin, stride, whole)
    image = total[:, :, padding[0] : padding[0] + output[0], padding[1] : padding[1] + output[1]]
    return image if x.dim() == 3 else image[0]


def _spread(x: Tensor, begin: Sequence[int], stride: Sequence[int], whole: Sequence[int]) -> Tensor:
    """An image with `stride` - 1 zeros after each of its elements, at `begin` of a larger one of zeros."""
    lengths = [(count - 1) * step + 1 for count, step in zip(x.shape[2:], stride, strict=True)]
    image = _apart(_apart(x, 2, stride[0]), 3, stride[1])[:, :, : lengths[0], : lengths[1]]
    after = [size - first - length for size, first, length in zip(whole, begin, lengths, strict=True)]
    return F.pad(image, (begin[1], after[1], begin[0], after[0]))


def _apart(x: Tensor, dim: int, step: int) -> Tensor:
    """An axis with `step` - 1 zeros after each of its elements."""
    if step == 1:
        return x
    behind = [0, 0] * (x.dim() - dim - 1) + [0, step - 1]
    return F.pad(x.unsqueeze(dim + 1), behind).flatten(dim, dim + 1)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    output_padding: Sequence[int] = (0, 0),
    groups: int = 1,
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """A transposed convolution: where windows do not overlap, as one over single places whose results are put side by
    side; else as one over the image spread out, with its weights turned round.
    """
    stride, padding, output_padding, dilation = (
        (each[0], each[-1]) for each in (stride, padding, output_padding, dilation)
    )
    size, (batch, channels, high, wide) = tuple(weight.shape[2:]), x.shape
    made = weight.shape[1] * groups
    parts = weight.reshape(groups, channels // groups, weight.shape[1], *size)
    if size == stride and not any((*padding, *output_padding)) and dilation == (1, 1):
        places = parts.permute(0, 2, 3, 4, 1).reshape(made * math.prod(size), channels // groups, 1, 1)
        found = F.conv2d(x, places, None, groups=groups).reshape(batch, made, *size, high, wide)
        image = found.permute(0, 1, 4, 2, 5, 3).reshape(batch, made, high * size[0], wide * size[1])
        return image if bias is None else image + bias[:, None, None]
    turned = parts.flip(3, 4).transpose(1, 2).reshape(made, channels // groups, *size)
    before = [reach * (each - 1) - pad for reach, each, pad in zip(dilation, size, padding, strict=True)]
    whole = [
        (old - 1) * step + 1 + 2 * first + more
        for old, step, first, more in zip((high, wide), stride, before, output_padding, strict=True)
    ]
    return F.conv2d(_spread(x, before, stride, whole), turned, bias, 1, 0, dilation, groups)
