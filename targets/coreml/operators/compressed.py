"""Core ML's operators that hold a constant in fewer bytes than its values take. Called as those of arithmetic are.

A palette and a sparse tensor are packed into bytes before iOS 18, bits from the least significant on, their `shape`
beside them; from iOS 18 on coremltools hands over one number for each value. Source: the operators' reference in
coremltools.converters.mil.mil.ops.defs, iOS16/constexpr_ops.py and iOS18/compression.py.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def constexpr_affine_dequantize(quantized_data: Tensor, zero_point: Tensor, scale: Tensor, axis: Tensor) -> Tensor:
    shape = [1] * quantized_data.dim()
    shape[int(axis)] = -1
    place, step = (each.float().reshape(shape if each.dim() else []) for each in (zero_point, scale))
    return (quantized_data.float() - place) * step


def constexpr_blockwise_shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    def spread(blocks: Tensor) -> Tensor:
        for axis, (whole, count) in enumerate(zip(data.shape, blocks.shape, strict=True)):
            blocks = blocks.repeat_interleave(whole // count, axis)
        return blocks.float()

    return (data.float() - (0 if offset is None else spread(offset))) * spread(scale)


def constexpr_lut_to_dense(
    indices: Tensor, lut: Tensor, shape: Tensor | None = None, vector_axis: Tensor | None = None
) -> Tensor:
    """Of one palette of numbers for the whole tensor, which is what we make; NotImplementedError for others."""
    if shape is not None:
        sizes = [int(size) for size in shape]
        indices = _unpacked(indices, int(math.log2(len(lut))), math.prod(sizes)).reshape(sizes)
    elif lut.numel() != lut.shape[-2]:
        raise NotImplementedError("a palette for each group, or of vectors, is not known here")
    return lut.reshape(-1)[indices.long()]


def constexpr_sparse_to_dense(nonzero_data: Tensor, mask: Tensor, shape: Tensor | None = None) -> Tensor:
    if shape is not None:
        sizes = [int(size) for size in shape]
        mask = _unpacked(mask, 1, math.prod(sizes)).reshape(sizes)
    dense = torch.zeros(mask.shape, dtype=nonzero_data.dtype)
    dense[mask != 0] = nonzero_data
    return dense


def constexpr_cast(source_val: Tensor, output_dtype: str) -> Tensor:
    return source_val.float()


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """`count` numbers of so many bits each, out of bytes."""
    flat = (packed.long()[:, None] >> torch.arange(8)) & 1
    return (flat.reshape(-1)[: count * bits].reshape(count, bits) << torch.arange(bits)).sum(1)


_FUNCTIONS = (
    constexpr_affine_dequantize,
    constexpr_blockwise_shift_scale,
    constexpr_lut_to_dense,
    constexpr_sparse_to_dense,
    constexpr_cast,
)

OPERATORS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}
