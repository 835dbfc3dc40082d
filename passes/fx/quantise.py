"""Linear layers on integers of eight bits: weights rounded channel by channel now, activations row by row as they come.

The result computes on the integers in float32, as any graph does: it is the reference of what it means to quantise a
model, and a compiler with instructions for such integers knows a product of them by what its operands are made of.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from attnrewrite.passes.base import Pipeline
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.fold_constants import FoldConstants
from attnrewrite.passes.fx.merge_equal import MergeEqual
from attnrewrite.passes.fx.resampling import patches
from attnrewrite.passes.fx.weights_as_linear import WeightsAsLinear

MOST = 127  # of the integers, and of their negatives
LEAST = 2.0**-100  # a row whose largest number is smaller is taken for one of that size: its own has no reciprocal


def integers(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """`x` in integers, symmetric about zero, and the unit along `axis` in which they are its numbers, times 127.

    Halves are rounded to even.
    """
    largest = x.abs().amax(axis, keepdim=True)
    factor = MOST / largest.clamp_min(LEAST)
    return (x * factor).round().clamp(-MOST, MOST), largest


def quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., channels] times weight [outputs, channels], both in integers, and then in their units."""
    rows, size = integers(x, -1)
    columns, unit = integers(weight, -1)
    made = torch.matmul(rows, columns.t()) * size * (unit.t() / MOST**2)
    return made if bias is None else made + bias


def quantised_patches(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """A convolution whose windows lie side by side, as of patches and of single places, as a linear layer of each."""
    parts = patches(x, weight, stride, padding, dilation, groups)
    if parts is None:
        return NotImplemented
    made = quantised_linear(parts.flatten(1, -2), weight.flatten(1), bias)
    return made.transpose(1, 2).unflatten(2, parts.shape[1:-1])


TABLE = {torch.ops.aten.linear.default: quantised_linear, torch.ops.aten.conv2d.default: quantised_patches}
QUANTISED: Pipeline[ExportedProgram] = Pipeline(
    (WeightsAsLinear(), Decompose(TABLE), FoldConstants(), MergeEqual()), name="quantised"
)
