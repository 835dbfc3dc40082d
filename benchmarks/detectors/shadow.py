"""Which image and which channel every element of a tensor is, followed through a model while it runs.

A tensor's *shadow* has the tensor's shape; an element is IMAGE * image + channel. The image is set on the model's
inputs (axis 0), the channel by every linear map (last axis) and convolution (axis 1); both count from 1, and 0 is none,
as of a class token. Data movement is applied to the shadow as it is to the tensor; what is elementwise keeps it.
Parameters, and what is made from them by no linear map, have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

IMAGE = 2.0**20
CONVOLUTIONS = {f"conv{transposed}{rank}d" for transposed in ("", "_transpose") for rank in (1, 2, 3)}
MOVEMENT = {
    "reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "t",
    "adjoint", "__get__", "contiguous", "clone", "expand", "chunk", "split", "tensor_split", "unbind", "__getitem__",
    "select", "narrow", "index_select", "squeeze", "unsqueeze", "roll", "flip", "unfold", "repeat", "repeat_interleave",
    "tile", "cat", "concat", "stack", "gather", "take_along_dim", "pad", "pixel_shuffle", "pixel_unshuffle", "view_as",
    "expand_as", "reshape_as", "hsplit", "vsplit", "split_with_sizes", "broadcast_to", "rot90",
}  # fmt: skip


def shadow(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, "_shadow", None)


def put(tensor: Tensor, its: Tensor | None) -> None:
    tensor._shadow = its  # type: ignore[attr-defined]


def mark_images(tensor: Tensor) -> None:
    """Give a model's input its shadow: its first axis is the image."""
    images = torch.arange(1.0, tensor.shape[0] + 1, dtype=torch.float64).view(-1, *[1] * (tensor.dim() - 1))
    put(tensor, (images * IMAGE).expand(tensor.shape))


def image_changes(tensor: Tensor, axes: tuple[int, ...]) -> bool:
    return _changes(tensor, axes, _image)


def channel_changes(tensor: Tensor, axes: tuple[int, ...]) -> bool:
    return _changes(tensor, axes, _channel)


def _changes(tensor: Tensor, axes: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> bool:
    its = shadow(tensor)
    if its is None:
        return False
    numbers = part(its)
    least = torch.where(numbers > 0, numbers, torch.inf)
    return any(bool((numbers.amax(axis) > least.amin(axis)).any()) for axis in axes)


@dataclass(frozen=True)
class Sum:
    """What a product of two tensors sums: the axes in either, and those that `left` and `right` alone keep."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, left: Tensor, right: Tensor, equation: str | None = None) -> "Sum":
        """`equation` as in einsum; None for a matrix product."""
        if equation is None:
            rows = (left.dim() - 2,) if left.dim() > 1 else ()
            columns = (right.dim() - 1,) if right.dim() > 1 else ()
            return cls((left.dim() - 1,), (max(right.dim() - 2, 0),), rows, columns)
        terms, _, out = equation.replace(" ", "").partition("->")
        first, second = (
            _letters(term, tensor.dim()) for term, tensor in zip(terms.split(","), (left, right), strict=True)
        )
        kept = set(out.replace("...", "")) | {letter for letter in first + second if letter.isdigit()}
        return cls(
            tuple(axis for axis, letter in enumerate(first) if letter not in kept and letter in second),
            tuple(axis for axis, letter in enumerate(second) if letter not in kept and letter in first),
            tuple(axis for axis, letter in enumerate(first) if letter in kept and letter not in second),
            tuple(axis for axis, letter in enumerate(second) if letter in kept and letter not in first),
        )


def _letters(term: str, rank: int) -> list[str]:
    """One letter for each axis; the axes under an ellipsis are counted from the last."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(str(hidden - place) for place in range(hidden)), *after]


def cast(name: str, func: Callable[..., Any], args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
    """Give the results `made` of a call, which is no product, their shadows. `name` is its name without underscores."""
    if name == "linear" or name in CONVOLUTIONS:
        put(made[0], _new_channels(given[0], made[0], made[0].dim() - 1 if name == "linear" else 1))
    elif name in MOVEMENT:
        moved = func(*pytree.tree_map_only(Tensor, _or_zero, args[:1]), *args[1:], **kwargs)
        for tensor, its in zip(made, (s for s in pytree.tree_leaves(moved) if isinstance(s, Tensor)), strict=True):
            put(tensor, its)
    else:
        for tensor in made:
            put(tensor, carried(given, tensor))


def cast_product(
    product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, sums: Sum, made: Tensor
) -> None:
    """The image of the row and the channel of the column, each where the summed index is 0."""

    def only_first(tensor: Tensor, axes: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> Tensor | None:
        its = shadow(tensor)
        if its is None:
            return None
        numbers = part(its).clone()
        for axis in axes:
            numbers.narrow(axis, 1, numbers.shape[axis] - 1).zero_()
        return numbers

    ones_left, ones_right = (torch.ones(tensor.shape, dtype=torch.float64) for tensor in (left, right))

    def over(part: Callable[[Tensor], Tensor], rows_first: bool) -> Tensor:
        first, second = only_first(left, sums.left, part), only_first(right, sums.right, part)
        if first is not None and (rows_first or second is None):
            return product(first, ones_right)
        assert second is not None
        return product(ones_left, second)

    put(made, over(_image, True) * IMAGE + over(_channel, False))


def _image(its: Tensor) -> Tensor:
    return its // IMAGE


def _channel(its: Tensor) -> Tensor:
    return its % IMAGE


def _or_zero(tensor: Tensor) -> Tensor:
    its = shadow(tensor)
    return torch.zeros(tensor.shape, dtype=torch.float64) if its is None else its.contiguous()


def _new_channels(source: Tensor, made: Tensor, axis: int) -> Tensor:
    """`made`'s shadow, a linear map's or a convolution's of `source`: its images, and channels counted along `axis`."""
    its = shadow(source)
    images = torch.zeros(()) if its is None else _image(its)
    if its is not None:
        first = images.flatten(1)[:, :1].view(-1, *[1] * (made.dim() - 1))
        images = images[..., :1] if axis == made.dim() - 1 else first
    channels = torch.arange(1.0, made.shape[axis] + 1, dtype=torch.float64).view(-1, *[1] * (made.dim() - 1 - axis))
    return (images * IMAGE + channels).expand(made.shape)


def carried(given: list[Tensor], made: Tensor) -> Tensor | None:
    """The first shadow that `made`'s shape can take."""
    for its in (shadow(tensor) for tensor in given):
        if its is None:
            continue
        if its.dim() == made.dim() + 1:  # complex from pairs
            its = its[..., 0]
        if its.dim() == made.dim():  # pooled or resampled: the first elements stand for the rest
            for axis, size in enumerate(made.shape):
                its = its.narrow(axis, 0, 1 if its.shape[axis] < size else size)
        try:
            return its.expand(made.shape)
        except RuntimeError:
            continue
    return None
