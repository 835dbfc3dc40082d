"""What a window sees as it slides over an image: views, and a border around the image where the window needs one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly
from attnrewrite.targets.tvm.schedules.cpu.elementwise import padded
from attnrewrite.targets.tvm.schedules.expression import Arguments, Expression
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Size, stride, dilation and padding (top, left, bottom, right) of a window."""

    size: Pair
    stride: Pair
    dilation: Pair
    padding: tuple[int, int, int, int]

    def over(self, image: Layout, out: Pair) -> Layout:
        """[batch, channels, height, width] as [batch, channels, window..., out...]: each window's elements."""
        batch, channels = image.shape[:2]
        *first, down, right = image.strides
        steps = (down * self.dilation[0], right * self.dilation[1], down * self.stride[0], right * self.stride[1])
        return Layout((batch, channels, *self.size, *out), (*first, *steps), image.offset)

    def reach(self, out: Pair) -> Pair:
        """How many rows and columns of the padded image the windows of an output see."""
        down, right = (
            (count - 1) * stride + (size - 1) * dilation + 1
            for count, stride, size, dilation in zip(out, self.stride, self.size, self.dilation, strict=True)
        )
        return down, right

    def counts(self, space: Pair, out: Pair, border: bool) -> np.ndarray:
        """[height, width]: how many elements of each window lie in the image, or, with `border`, in its padding too."""
        inside = []
        for axis in range(2):
            before, after = self.padding[axis], self.padding[axis + 2]
            element = np.arange(self.size[axis]) * self.dilation[axis]
            place = np.arange(out[axis])[:, None] * self.stride[axis] + element - before
            first, end = (-before, space[axis] + after) if border else (0, space[axis])
            inside.append(((first <= place) & (place < end)).sum(1))
        return np.outer(*inside)

    def image(self, assembly: Assembly, value: Expression, space: Shape, out: Pair, border: float) -> View:
        """The image as a view, `border` around it where windows pass its edge; arithmetic is computed first."""
        top, left, bottom, right = self.padding
        high, wide = self.reach(out)
        # Where the output is rounded up, the last windows pass the padding, too.
        bottom, right = max(bottom, high - space[2] - top), max(right, wide - space[3] - left)
        if not any((top, left, bottom, right)):
            return assembly.view(value, space)
        arguments = Arguments()
        pads = ((0, 0), (0, 0), (top, bottom), (left, right))
        function, whole = padded(space, pads, arguments.loading(value), border)
        return View(assembly.add(function, arguments.bases, whole), contiguous(whole))


def pair(values: Sequence[Any]) -> Pair:
    first, second = relax_graph.integers(values)
    return first, second


def sides(values: Sequence[Any]) -> tuple[int, int, int, int]:
    top, left, bottom, right = relax_graph.integers(values)
    return top, left, bottom, right
