"""Resizes, sliding windows and strides, in slices, sums and products with constants: what compilers read alike."""

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


def _by_units(x: Tensor, resize: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A resize of images as two products: with what each new column takes of the old ones, and each new row.

    What they take is what `resize` makes of unit images of one column (axis 0) or one row (axis 1): constants.
    """
    if x.dim() != 4 or 1 in x.shape[2:]:
        return NotImplemented
    high, wide = (torch.eye(size, dtype=x.dtype, device=x.device) for size in x.shape[2:])
    rows, columns = resize(high[None, ..., None], 0)[0, :, :, 0], resize(wide[None, :, None], 1)[0, :, 0]
    return rows.T @ (x @ columns)


def _kept(values: Sequence[Any] | None, axis: int, other: Any) -> list[Any] | None:
    """A pair with `other` in the place of what is not for `axis`."""
    return None if values is None else [value if each == axis else other for each, value in enumerate(values)]


def resized(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A resize of images by `operation` as two products with constants."""

    def compute(x: Tensor, size: Sequence[int] | None, *options: Any) -> Tensor:
        *given, factors = options
        return _by_units(
            x, lambda units, axis: operation(units, _kept(size, axis, 1), *given, _kept(factors, axis, 1.0))
        )

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
            total = total + spread(parts[:, :, row, column], begin, stride, whole)
    image = total[:, :, padding[0] : padding[0] + output[0], padding[1] : padding[1] + output[1]]
    return image if x.dim() == 3 else image[0]


def spread(x: Tensor, begin: Sequence[int], stride: Sequence[int], whole: Sequence[int]) -> Tensor:
    """An image with `stride` - 1 zeros after each of its elements, at `begin` of a larger one of zeros."""
    batch, channels, *counts = x.shape
    apart = F.pad(x[:, :, :, None, :, None], (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    lengths = [(count - 1) * step + 1 for count, step in zip(counts, stride, strict=True)]
    image = apart.reshape(batch, channels, counts[0] * stride[0], counts[1] * stride[1])
    image = image[:, :, : lengths[0], : lengths[1]]
    after = [size - first - length for size, first, length in zip(whole, begin, lengths, strict=True)]
    return F.pad(image, (begin[1], after[1], begin[0], after[0]))
