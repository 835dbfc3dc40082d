"""Tensors as the Neural Engine holds them: [batch, channels, 1, tokens], or [batch, channels, rows, columns].

A model's [batch, tokens, channels] and [batch, rows, columns, channels] *enter* that layout and *leave* it. What has
left and enters again is the same tensor: it is found through the movement between, which is then dead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.targets.coreml.passes import views

Places = dict[int, int]  # for each axis of a tensor with its channels last, the one that it is in the layout


def places(shape: Sequence[int]) -> Places | None:
    """The layout of a tensor with its channels last; None for a rank that does not enter it.

    [tokens, 1, channels] and [tokens, channels], as nn.MultiheadAttention has them, are the tokens of a batch of one.
    """
    if len(shape) == 2 and shape[0] > 1:
        return {0: 3, 1: 1}
    if len(shape) == 3:
        return {0: 3, 1: 0, 2: 1} if shape[1] == 1 < shape[0] else {0: 0, 1: 3, 2: 1}
    return {0: 0, 1: 2, 2: 3, 3: 1} if len(shape) == 4 else None


def first(index: Tensor, moved: Places) -> Tensor:
    """A tensor with its channels last as it is in the layout, of rank 4."""
    shape = [1, 1, 1, 1]
    for axis, place in moved.items():
        shape[place] = index.shape[axis]
    return index.permute(sorted(moved, key=moved.__getitem__)).reshape(shape)


def is_held(variable: Any) -> bool:
    """Whether the variable has a rank that enters the layout."""
    return views.is_static(variable) and places(variable.shape) is not None


def view_of(variable: Any) -> tuple[views.View, Any] | None:
    """The variable in the layout as a view of what computed it; None where it is none."""
    moved = places(variable.shape) if views.is_static(variable) else None
    if moved is None:
        return None
    found = views.unmoved(variable)
    seen = None if found is None else views.view(first(found.index, moved))
    return None if found is None or seen is None else (seen, found.base)


def is_free(variable: Any) -> bool:
    """Whether entering the layout takes no transpose: the variable has left it, or comes from a convolution."""
    if variable.op is None or variable.op.op_type not in views.MOVES:  # it has its channels last
        return is_held(variable) and 1 in (variable.shape[-1], math.prod(variable.shape[:-1]))
    found = view_of(variable)
    if found is None:
        return False
    strides = [stride for _, stride in found[0].axes]
    return strides == sorted(strides, reverse=True)


def is_turned(variable: Any) -> bool:
    """Whether the variable is tokens in another order, as of windows: it takes a transpose to enter, or to stay out."""
    part = _part_of(variable)
    whole = variable if part is None else part[0]
    return is_held(whole) and view_of(whole) is not None and tokens_of(whole) is not None


def _part_of(variable: Any) -> tuple[Any, list[int]] | None:
    """What a slice of an image [batch, rows, columns, channels] is of, and where it begins."""
    if variable.op is None or variable.op.op_type != "slice_by_index" or variable.rank != 4:
        return None
    whole = variable.op.inputs["x"]
    found = views.origin(variable, lambda each: each is whole) if whole.rank == 4 and is_held(whole) else None
    if found is None or not found.index.numel():
        return None
    begin = [int(each) for each in np.unravel_index(int(found.index.flatten()[0]), whole.shape)]
    box = tuple(slice(start, start + size) for start, size in zip(begin, variable.shape, strict=True))
    index = torch.arange(math.prod(whole.shape)).reshape(tuple(whole.shape))[box]
    return (whole, begin) if torch.equal(index, found.index) else None


@dataclass(frozen=True)
class Tokens:
    """The tokens of `base`, [batch, channels, rows, columns], at flat `places` of its first channel."""

    base: Any
    places: Tensor


def tokens_of(variable: Any) -> Tokens | None:
    """What a variable [.., channels] has in the layout, in whatever order; None where it is not all of that."""
    found = views.unmoved(variable) if views.is_static(variable) else None
    if found is None or found.base.rank != 4 or found.base.shape[1] != variable.shape[-1]:
        return None
    _, count, *image = found.base.shape
    of_first = found.index[..., :1]
    if found.index.numel() != math.prod(found.base.shape):
        return None
    if not torch.equal(found.index, of_first + math.prod(image) * torch.arange(count)):
        return None
    return Tokens(found.base, of_first)


def as_tokens(tokens: Tokens, count: int) -> views.View | None:
    """A tensor like the tokens' base, but of `count` channels, in the order of the tokens with the channels last."""
    _, before, *image = tokens.base.shape
    size = math.prod(image)
    picture, place = tokens.places // (before * size), tokens.places % (before * size)
    return views.view(picture * count * size + place + size * torch.arange(count))


def entered(variable: Any, before: Any) -> Any:
    """The variable in the layout. Those for which `view_of` finds a view come straight from what computed them."""
    moved = places(variable.shape)
    assert moved is not None
    part = _part_of(variable)
    if part is not None and is_turned(variable):  # all of them are moved once
        return _cut(entered(part[0], before), part[1], variable.shape, moved, before)
    found = view_of(variable)
    made = None if found is None else views.write(found[0], found[1], before)
    if made is not None:
        return made
    shape = first(torch.empty(tuple(variable.shape), device="meta"), moved).shape
    turned = views.transposed(variable, sorted(moved, key=moved.__getitem__), before)
    return views.reshaped(turned, tuple(shape), before)


def _cut(twin: Any, begin: Sequence[int], sizes: Sequence[int], moved: Places, before: Any) -> Any:
    from coremltools.converters.mil.mil import Builder

    axes = sorted(moved, key=moved.__getitem__)
    return Builder.slice_by_index(
        x=twin, begin=[begin[axis] for axis in axes], end=[begin[axis] + sizes[axis] for axis in axes], before_op=before
    )


def left(twin: Any, moved: Places, before: Any) -> Any:
    """What is in the layout with the channels last again."""
    order = sorted(moved, key=moved.__getitem__)
    kept = views.reshaped(twin, [twin.shape[moved[axis]] for axis in order], before)
    return views.transposed(kept, [order.index(axis) for axis in range(len(order))], before)


def constant(value: np.ndarray, moved: Places) -> np.ndarray:
    """A constant operand of tensors with their channels last, for those in the layout."""
    padded = np.array(value).reshape((1,) * (len(moved) - value.ndim) + value.shape)
    return np.ascontiguousarray(first(torch.from_numpy(padded), moved).numpy())
