"""A kernel's steps as its rule puts them together: operands in the form that products read, then the product."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnrewrite.targets.tvm.schedules.cpu.elementwise import copying
from attnrewrite.targets.tvm.schedules.cpu.operands import (
    Gathered,
    Lying,
    Panels,
    gathered,
    panel_shape,
    panels,
)
from attnrewrite.targets.tvm.schedules.cpu.packing import Pack, packed, rounded
from attnrewrite.targets.tvm.schedules.cpu.product import Product
from attnrewrite.targets.tvm.schedules.cpu.register_tile import best_bands, packed_bands
from attnrewrite.targets.tvm.schedules.expression import (
    Apply,
    Arguments,
    Expression,
    Leaf,
    Load,
    Number,
    Result,
    joined,
    leaves,
    moved,
    ordered,
    substituted,
)
from attnrewrite.targets.tvm.schedules.graph import strided
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Function, Kernel, Step, Temporary
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous


class Assembly:
    """A kernel while its rule puts it together: its steps so far, and the variables whose operators they compute."""

    def __init__(self, covers: Sequence[Any]) -> None:
        self.steps: list[Step] = []
        self.covers = list(covers)

    def add(self, function: Function, arguments: Sequence[Any], written: Shape, dtype: str | None = None) -> Temporary:
        self.steps.append(Step(function, tuple(arguments), written, dtype))
        return Temporary(len(self.steps) - 1)

    def kernel(self) -> Kernel:
        return Kernel(tuple(self.steps), tuple(dict.fromkeys(self.covers)))

    def view(self, value: Expression, space: Shape) -> View:
        """A value that will be read more than once, as a view: arithmetic is computed by a step of its own first. The
        faster of the last two axes in its result is the one that is faster in its largest operand.
        """
        if isinstance(value, Leaf):
            return value.view
        largest = max((leaf.view.layout for leaf in leaves(value)), key=Layout.distinct, default=contiguous(space))
        if largest.strides[-1] <= largest.strides[-2]:
            return self.copy(value, space)
        swapped = (*range(len(space) - 2), -1, -2)
        made = self.copy(ordered(value, swapped), tuple(space[axis] for axis in swapped))
        return replace(made, layout=made.layout.permute(swapped))

    def copy(self, value: Expression, space: Shape) -> View:
        """A value computed by a step of its own, its elements one after the other."""
        arguments = Arguments()
        filled = copying(arguments.loading(value), space)
        return View(self.add(filled, arguments.bases, space), contiguous(space))

    def pack(
        self,
        value: Expression,
        batch: Shape,
        columns: int,
        depth: int,
        width: int,
        into: Arguments,
        profile: Profile,
        shared: bool = False,
    ) -> Panels:
        """An operand over [batch..., depth, columns] as panels, as `Pack` has them, those of a constant made now."""
        if isinstance(value, Leaf) and isinstance(value.view.base, np.ndarray):
            array = packed(rounded(strided(value.view.base, value.view.layout), profile.stored), width, shared)
            return panels(into.number(array), batch, depth, columns, width)
        read = Arguments()
        function = Pack(batch, depth, columns, width, read.loading(value), shared)
        made = self.add(function, read.bases, panel_shape(batch, depth, columns, width))
        return panels(into.number(made), batch, depth, columns, width)

    def product(
        self,
        left: Expression,
        right: Expression,
        depth: int,
        out: Layout,
        epilogue: Expression,
        profile: Profile,
        written: Shape,
    ) -> Temporary:
        """Add out = epilogue(left right), operands over [batch..., rows, depth] and [batch..., depth, columns].

        Several axes may make the depth and the columns of a right operand that is a view.
        """
        batch, columns, lead = out.shape[:-2], out.shape[-1], len(out.shape) - 2
        arguments = Arguments()
        after = arguments.loading(epilogue)
        if is_shared(right, lead):
            # One right operand for the whole batch: whose rows are then rows of a single product, where strides allow.
            right, batch, rows_of = without(right, lead), (), self.view(left, (*out.shape[:-1], depth))
            (left_layout, out), after = joined([rows_of.layout, out], after, lead + 1)
            left = Leaf(replace(rows_of, layout=left_layout))
        row_axes = 1 if batch else len(out.shape) - 1
        rows = math.prod(out.shape[-1 - row_axes : -1])
        is_gathered = isinstance(right, Leaf) and len(right.view.layout.shape) > len(batch) + 2
        whole = not is_gathered and not (isinstance(right, Leaf) and has_rows(right.view))
        bands = best_bands(profile, rows, columns, whole)
        first: Load | Panels
        flat = moved(left, lambda layout: layout.reshape((*batch, rows, depth)))
        made = not isinstance(left, Leaf) or isinstance(left.view.base, np.ndarray)
        if flat is not None and (other := packed_bands(profile, rows, bands, whole, made)):
            bands = other
            turned = ordered(flat, (*range(len(batch)), -1, -2))
            first = self.pack(turned, batch, rows, depth, bands[0].tile.rows, arguments, profile)
        else:
            first = arguments.load(_multiplied(self.view(left, (*out.shape[:-1], depth)), profile))
        second: Panels | Lying | Gathered
        if whole:
            second = self.pack(right, batch, columns, depth, bands[0].tile.columns, arguments, profile)
        else:
            assert isinstance(right, Leaf)
            loaded = arguments.load(right.view)
            second = gathered(loaded, len(batch), depth) if is_gathered else Lying(loaded.argument, loaded.layout)
        if batch:
            layouts, after = joined([first.layout, second.layout, out], after, lead)
            first, second = replace(first, layout=layouts[0]), replace(second, layout=layouts[1])
            out = layouts[2]
        product = Product(depth, first, second, out, after, bands, profile.stored, row_axes)
        return self.add(product, arguments.bases, written)


def _multiplied(view: View, profile: Profile) -> View:
    """An operand that is read as it lies, a constant in the type of products."""
    return replace(view, base=rounded(view.base, profile.stored)) if isinstance(view.base, np.ndarray) else view


def is_shared(value: Expression, lead: int) -> bool:
    """Whether a value is the same all along the first `lead` axes."""
    spaces = [leaf.view.layout for leaf in leaves(value)]
    return not any(
        stride for space in spaces for size, stride in zip(space.shape[:lead], space.strides, strict=False) if size > 1
    )


def without(value: Expression, lead: int) -> Expression:
    """A value that is the same all along the first `lead` axes, in a space without them."""
    cut = moved(value, lambda layout: Layout(layout.shape[lead:], layout.strides[lead:], layout.offset))
    assert cut is not None
    return cut


def has_rows(view: View) -> bool:
    """Whether a tile can read a tensor's rows as they lie: its columns are neighbours, and it is no constant."""
    return view.layout.strides[-1] == 1 and not isinstance(view.base, np.ndarray)


def expanded(value: Expression, space: Shape) -> Expression:
    """A value broadcast to an index space with more axes before its own."""
    made = moved(value, lambda layout: layout.expand(space))
    assert made is not None
    return made


def scaled(epilogue: Expression, factor: float) -> Expression:
    """An epilogue whose result is taken times a number first."""
    return epilogue if factor == 1 else substituted(epilogue, Apply("multiply", (Result(), Number(factor))))
