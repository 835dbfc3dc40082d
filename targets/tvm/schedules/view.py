"""Tensors as strided views of others: most operators that only move data are index arithmetic in their readers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor of `shape` lie in a flat buffer: at `offset` plus the indices times `strides`."""

    shape: Shape
    strides: Shape
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def distinct(self) -> int:
        """How many elements of the buffer are read, where those of a broadcast count once."""
        return math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride)

    def permute(self, axes: Sequence[int]) -> "Layout":
        """The layout with its axes in another order; `axes` may be negative, as in torch."""
        axes = [axis % len(self.shape) for axis in axes]
        return Layout(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def reshape(self, shape: Sequence[int]) -> "Layout | None":
        """The same elements in the same order with another shape, or None where no strides say that."""
        try:
            strides = torch.empty_strided(self.shape, self.strides, device="meta").view(tuple(shape)).stride()
        except RuntimeError:
            return None
        return Layout(tuple(shape), tuple(strides), self.offset)

    def expand(self, shape: Sequence[int]) -> "Layout":
        """The layout broadcast to `shape`, as numpy does it."""
        missing = len(shape) - len(self.shape)
        strides = (0,) * missing + tuple(
            stride if size == wanted else 0
            for size, stride, wanted in zip(self.shape, self.strides, shape[missing:], strict=True)
        )
        return Layout(tuple(shape), strides, self.offset)

    def narrow(self, axis: int, begin: int, length: int, step: int = 1) -> "Layout":
        """Every `step`-th of the indices of `axis` from `begin` on, `length` of them."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + begin * strides[axis]
        shape[axis], strides[axis] = length, strides[axis] * step
        return Layout(tuple(shape), tuple(strides), offset)

    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other from the start of the buffer on."""
        return self.offset == 0 and self.without_ones() == contiguous(self.shape).without_ones()

    def without_ones(self) -> "Layout":
        kept = [axis for axis, size in enumerate(self.shape) if size != 1]
        return Layout(tuple(self.shape[a] for a in kept), tuple(self.strides[a] for a in kept), self.offset)


def contiguous(shape: Sequence[int]) -> Layout:
    """A buffer that holds exactly the elements of `shape`, the last axis running fastest."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Layout(tuple(shape), tuple(strides))


@dataclass(frozen=True, eq=False)
class View:
    """A tensor as a layout over the buffer of `base`: a Relax variable, or a constant as a numpy array."""

    base: Any
    layout: Layout
    sole: bool = True  # nothing but this view reads what lies between it and its base, nor the base


def merged(layouts: Sequence[Layout], lead: int) -> list[Layout]:
    """Layouts with their first `lead` axes, of the same sizes in all, joined wherever every layout allows it.

    Axes of one element go; one axis remains of those that were.
    """
    sizes = layouts[0].shape[:lead]
    axes = [axis for axis in range(lead) if sizes[axis] != 1] or list(range(min(lead, 1)))
    groups: list[list[int]] = []
    for axis in axes:
        if groups and all(layout.strides[groups[-1][-1]] == layout.strides[axis] * sizes[axis] for layout in layouts):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    return [
        Layout(
            (*shape, *layout.shape[lead:]),
            (*(layout.strides[group[-1]] for group in groups), *layout.strides[lead:]),
            layout.offset,
        )
        for layout in layouts
    ]


def inverse(place: Layout, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The order of axes in which `place` runs through a buffer of `shape` from its start to its end, or None.

    Permuting `place` so and reshaping it gives the buffer's own layout; what is done to `place` may be done to every
    layout of its shape, which leads from one index space to the other.
    """
    order = tuple(
        sorted(range(len(place.shape)), key=lambda axis: -place.strides[axis] if place.shape[axis] > 1 else 0)
    )
    ordered = place.permute(order)
    if place.size != math.prod(shape) or not ordered.is_contiguous():
        return None
    return order


def unravel(shape: Sequence[int]) -> list[tuple[int, int]]:
    """For each axis the divisor and modulus that take its index out of a flat one."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return list(zip(steps, shape, strict=True))
