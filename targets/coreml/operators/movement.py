"""Core ML's operators that move data: shapes, slices, resampling. Called as those of arithmetic are."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.errors import InputError


def reshape(x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape.tolist())])


def transpose(x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(perm.tolist())


def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(axes.tolist())


def expand_dims(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def concat(values: list[Tensor], axis: Tensor, interleave: Tensor) -> Tensor:
    if bool(interleave):
        return torch.stack(values, int(axis) + 1).flatten(int(axis), int(axis) + 1)
    return torch.cat(values, int(axis))


def stack(values: list[Tensor], axis: Tensor) -> Tensor:
    return torch.stack(values, int(axis))


def split(x: Tensor, axis: Tensor, num_splits: Tensor | None = None, split_sizes: Tensor | None = None) -> Any:
    if split_sizes is not None:
        return x.split(split_sizes.tolist(), int(axis))
    assert num_splits is not None
    return x.chunk(int(num_splits), int(axis))


def slice_by_index(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    stride: Tensor | None = None,
    begin_mask: Tensor | None = None,
    end_mask: Tensor | None = None,
    squeeze_mask: Tensor | None = None,
) -> Tensor:
    from_start, to_end, squeezed = (
        [False] * x.dim() if mask is None else mask.tolist() for mask in (begin_mask, end_mask, squeeze_mask)
    )
    firsts, lasts = begin.tolist(), end.tolist()
    steps = [1] * x.dim() if stride is None else stride.tolist()
    for axis, step in reversed(list(enumerate(steps))):
        if squeezed[axis]:
            x = x.select(axis, firsts[axis])
            continue
        run = slice(None if from_start[axis] else firsts[axis], None if to_end[axis] else lasts[axis], step)
        if step > 0:
            x = x[(slice(None),) * axis + (run,)]
        else:  # which torch's slices refuse
            x = x.index_select(axis, torch.tensor(range(x.shape[axis])[run], dtype=torch.int64))
    return x


def slice_by_size(x: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    for axis, (first, length) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
        first %= x.shape[axis]
        x = x.narrow(axis, first, x.shape[axis] - first if length == -1 else length)
    return x


def pad(x: Tensor, pad: Tensor, mode: str, constant_val: Tensor) -> Tensor:
    pairs = pad.reshape(-1, 2).flip(0).flatten().tolist()
    if mode == "constant":
        return F.pad(x, pairs, mode, float(constant_val))
    # In these modes torch pads the last axes only.
    while pairs[-2:] == [0, 0]:
        del pairs[-2:]
    return F.pad(x, pairs, mode)


def crop(x: Tensor, crop_height: Tensor, crop_width: Tensor) -> Tensor:
    (top, bottom), (left, right) = crop_height.tolist(), crop_width.tolist()
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


def reverse(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.flip(list(range(x.dim())) if axes is None else axes.tolist())


def tile(x: Tensor, reps: Tensor) -> Tensor:
    return x.repeat(reps.tolist())


def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond.bool(), a, b)


def shape(x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int32)


def fill(shape: Tensor, value: Tensor) -> Tensor:
    return value.expand(shape.tolist()).clone()


def fill_like(ref_tensor: Tensor, value: Tensor) -> Tensor:
    return value.expand(ref_tensor.shape).clone()


def identity(x: Tensor) -> Tensor:
    return x


def band_part(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    x = x.triu(-int(lower)) if int(lower) >= 0 else x
    return x.tril(int(upper)) if int(upper) >= 0 else x


def pixel_shuffle(x: Tensor, upscale_factor: Tensor) -> Tensor:
    return F.pixel_shuffle(x, int(upscale_factor))


def pixel_unshuffle(x: Tensor, downscale_factor: Tensor) -> Tensor:
    return F.pixel_unshuffle(x, int(downscale_factor))


def upsample_nearest_neighbor(x: Tensor, scale_factor_height: Tensor, scale_factor_width: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=(float(scale_factor_height), float(scale_factor_width)), mode="nearest")


def upsample_bilinear(
    x: Tensor,
    scale_factor_height: Tensor,
    scale_factor_width: Tensor,
    align_corners: Tensor,
    half_pixel_centers: Tensor | None = None,
) -> Tensor:
    factors = (float(scale_factor_height), float(scale_factor_width))
    return F.interpolate(x, scale_factor=factors, mode="bilinear", align_corners=bool(align_corners))


def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: Tensor,
    coordinates_mode: str,
    align_corners: Tensor,
) -> Tensor:
    """Of the ways to say coordinates and what lies outside, those that torch has."""
    mirror = "reflection" if bool(align_corners) else "symmetric"  # at the centres of the last places, or their edges
    outside = {"constant": "zeros", "border": "border", mirror: "reflection"}.get(padding_mode)
    if coordinates_mode != "normalized_minus_one_to_one" or outside is None or float(padding_value):
        raise InputError(f"a resample by {coordinates_mode} with {padding_mode} padding cannot be checked here")
    return F.grid_sample(x, coordinates, sampling_mode, outside, bool(align_corners))


_FUNCTIONS = (
    reshape,
    transpose,
    squeeze,
    expand_dims,
    concat,
    stack,
    split,
    slice_by_index,
    slice_by_size,
    pad,
    crop,
    reverse,
    tile,
    select,
    shape,
    fill,
    fill_like,
    identity,
    band_part,
    pixel_shuffle,
    pixel_unshuffle,
    upsample_nearest_neighbor,
    upsample_bilinear,
    resample,
)

OPERATORS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}
