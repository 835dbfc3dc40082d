"""Which constants of a graph are its batch, told by following the images from the inputs to the outputs.

Where windows were folded into the batch, an axis is images times windows: it has the images as its slower part, and
`inner` elements for each. A reshape keeps the order of the elements, so that the axis which holds the images behind it
is known; of a batch of one, which has no length, it may be any of several, and each is tried.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.fx.batch_symbols import LostError, Symbolic, described, follows, open_axes
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.fx.operators import operator_name

aten = torch.ops.aten

_SIZED = frozenset({"view", "_unsafe_view", "reshape"})
_ORDERED = _SIZED | {"flatten", "unflatten", "squeeze", "unsqueeze"}  # keep the elements in their order
_MADE = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})  # read the type of an operand alone
_JOINS = frozenset({"cat", "concat", "concatenate"})
_PARTS = {  # what takes parts of an axis: its operands
    "slice": ("dim", "start", "end", "step"),
    "split": ("split_size", "dim"),
    "split_with_sizes": ("split_sizes", "dim"),
}
_LAST = 2**63 - 1  # the end of a slice that takes all


@dataclass(frozen=True)
class ImageAxis:
    """Where a tensor holds the images: along `axis`, with `inner` elements of that axis for each image."""

    axis: int
    inner: int = 1


@dataclass
class Guesses:
    """Which of several places a reshape takes the image to, by what it reshapes; and how many there were to choose."""

    chosen: Mapping[Any, int] = field(default_factory=dict)
    met: dict[Any, int] = field(default_factory=dict)


def follow(module: GraphModule, inputs: Sequence[Tensor], batch: int, size: Node, guesses: Guesses) -> Refusal | None:
    """Write sizes that follow the batch of symbolic `inputs` wherever `module` has those of `batch` images, in place.
    `size` is a node of `module` that makes the batch.
    """
    run = _Followed(module, inputs, batch, size, guesses)
    for node in list(module.graph.nodes):
        try:
            with without_torch_logs():
                run.take(node)
        except LostError as lost:
            return lost.refusal(node)
        except Exception as error:  # operators raise many kinds
            return Refusal("batch-refused", f"takes no other batch at {described(node)}: {first_line(error)}")
    return None


class _Followed(Symbolic):
    def __init__(
        self, module: GraphModule, inputs: Sequence[Tensor], images: int, size: Node, guesses: Guesses
    ) -> None:
        super().__init__(module, inputs)
        self.graph_view = FxGraph(module)
        self.images, self.size, self.guesses = images, size, guesses
        self.image_axes: dict[Node, ImageAxis] = {}

    def take(self, node: Node) -> None:
        """Change the arguments of `node` where they hold the batch, and find its value."""
        if node.op in ("placeholder", "get_attr") or node is self.size:
            value = self.value(node)
            if follows(value):
                self.image_axes[node] = ImageAxis(0)
            return
        if node.op == "output":
            return
        read = [operand for operand in node.all_input_nodes if operand in self.image_axes]
        if not read or operator_name(node) in _MADE:
            self.value(node)
            return
        known = self._known_place(node)
        value = self._mended(node, read)
        self._note(node, value, read, known)

    def _known_place(self, node: Node) -> ImageAxis | None:
        """Where an operation on the order of the elements takes the image to; its sizes are changed for that."""
        name, source = operator_name(node), node.args[0] if node.args else None
        if name in _JOINS and isinstance(source, list | tuple):
            return self._joined(node, source)
        if not isinstance(source, Node) or source not in self.image_axes:
            return None
        image_axis = self.image_axes[source]
        if name == "expand":
            node.args = (source, _kept(node.args[1], image_axis.axis - len(_old(source))), *node.args[2:])  # type: ignore[arg-type]
            return ImageAxis(image_axis.axis + len(_old(node)) - len(_old(source)), image_axis.inner)
        if name == "getitem":
            return image_axis
        if name in _PARTS:
            return self._part(node, source, image_axis)
        if name == "index_select":
            return self._selected(node, source, image_axis)
        if name not in _ORDERED:
            return None
        place = self._place(_old(source), image_axis, _old(node))
        if name in _SIZED or name == "unflatten":
            sizes = [-1 if axis == place.axis else length for axis, length in enumerate(_old(node))]
            node.target, node.args, node.kwargs = aten.reshape.default, (source, sizes), {}
        return place

    def _joined(self, node: Node, parts: Sequence[Any]) -> ImageAxis | None:
        """The image where parts are joined along the axis that it is in: as far behind as in each of them."""
        places = {self.image_axes.get(part) for part in parts}
        dim = int(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)) % len(_old(node))  # type: ignore[arg-type]
        image_axis = places.pop() if len(places) == 1 else None
        return image_axis if image_axis is not None and image_axis.axis == dim else None

    def _part(self, node: Node, source: Node, image_axis: ImageAxis) -> ImageAxis:
        """Let what takes parts of an axis along which the images are take the same parts of any number of them."""
        given: dict[str, Any] = dict(zip(_PARTS[operator_name(node)], node.args[1:], strict=False)) | node.kwargs
        axis, length = int(given.get("dim", 0)) % len(_old(source)), _old(source)[image_axis.axis]
        if axis != image_axis.axis:
            return image_axis
        if "split_sizes" in given or "split_size" in given:
            sizes = given.get("split_sizes") or [given["split_size"]] * -(-length // given["split_size"])
            node.target = aten.split_with_sizes.default
            node.args, node.kwargs = (source, [self._of_any(node, each, image_axis) for each in sizes], axis), {}
            return image_axis
        bounds = given.get("start") or 0, _LAST if given.get("end") is None else given["end"]
        start, end = (each + length if each < 0 else each for each in bounds)
        if given.get("step", 1) != 1:
            raise LostError("batch-split", "takes some of the images")
        ends = [self._of_any(node, start, image_axis), _LAST if end >= length else self._of_any(node, end, image_axis)]
        node.args, node.kwargs = (source, axis, *ends), {}
        return image_axis

    def _selected(self, node: Node, source: Node, image_axis: ImageAxis) -> ImageAxis:
        """Let constant places along the axis of the images, the same in each, be those of any number of images."""
        _, dim, index = node.args
        inner = _old(source)[image_axis.axis] // self.images
        if int(dim) % len(_old(source)) != image_axis.axis:  # type: ignore[arg-type]
            return image_axis
        assert isinstance(index, Node)
        places = self._constant(node, index)
        own, rest = divmod(len(places), self.images)
        first = torch.arange(self.images).repeat_interleave(own) * inner
        if rest or inner != image_axis.inner or bool((places - first != places[:own].repeat(self.images)).any()):
            raise LostError("images-differ", f"reads {index.name}, which takes other parts of each image")
        with node.graph.inserting_before(node):
            one = node.graph.call_function(aten.slice.Tensor, (index, 0, 0, own))
            counted = node.graph.call_function(aten.arange.default, (self.size,))
            firsts = node.graph.call_function(aten.mul.Tensor, (counted, inner))
            column = node.graph.call_function(aten.reshape.default, (firsts, [-1, 1]))
            many = node.graph.call_function(aten.add.Tensor, (column, one))
            row = node.graph.call_function(aten.reshape.default, (many, [-1]))
        for made in (one, counted, firsts, column, many, row):
            made.meta = {**index.meta}
            self.value(made)
        node.args = (source, dim, row)
        return ImageAxis(image_axis.axis, own)

    def _of_any(self, node: Node, count: int, image_axis: ImageAxis) -> Node | int:
        """`count` elements of an axis, which are all images so many times, for as many images as there are."""
        times, rest = divmod(count, self.images * image_axis.inner)
        if rest:
            raise LostError("batch-split", "takes some of the images")
        if times == 0:
            return 0
        with node.graph.inserting_before(node):
            made = node.graph.call_function(operator.mul, (self.size, times * image_axis.inner))
        self.value(made)
        return made

    def _place(self, before: Sequence[int], image_axis: ImageAxis, after: Sequence[int]) -> ImageAxis:
        """The axis of `after`, the same elements as `before`, that the image is in now."""
        behind = image_axis.inner * math.prod(before[image_axis.axis + 1 :])
        beside = before[image_axis.axis + 1] if image_axis.axis + 1 < len(before) and image_axis.inner == 1 else None
        found: list[tuple[int, ImageAxis]] = []
        for axis, length in enumerate(after):
            whole, rest = divmod(behind, max(1, math.prod(after[axis + 1 :])))
            if whole and not rest and length % (whole * self.images) == 0:
                found.append((_unlikely(length // self.images, whole, beside), ImageAxis(axis, whole)))
        if not found:
            raise LostError("batch-split", f"makes {list(after)} of {list(before)}, which takes images apart")
        found.sort(key=lambda each: each[0])
        if len(found) == 1 or (found[0][0] == 0 and found[1][0] > 0):
            return found[0][1]
        key = (tuple(before), image_axis, tuple(after))
        self.guesses.met[key] = len(found)
        return found[self.guesses.chosen.get(key, 0)][1]

    def _mended(self, node: Node, read: Sequence[Node]) -> Any:
        """The value of `node`; operands that were made for the batch, equal for all images, are made for any."""
        try:
            value = self.value(node)
        except Exception as error:
            if not self._make_for_any(node, read):
                if isinstance(error, LostError):
                    raise
                raise LostError("batch-refused", f"takes no other batch ({first_line(error)})") from error
            return self.value(node)
        if not follows(value) and self._make_for_any(node, read):
            return self.value(node)  # it had the batch of such an operand
        return value

    def _make_for_any(self, node: Node, read: Sequence[Node]) -> bool:
        """Whether some operand of `node` that does not follow the batch was replaced by one that does."""
        follower = max(read, key=lambda each: len(_old(each)))
        image_axis, size = self.image_axes[follower], _old(follower)
        joins = operator_name(node) in (*_JOINS, "stack")
        indices = _indices(node, follower)
        changed = False
        for operand in list(node.all_input_nodes):
            if operand in self.image_axes or not _old(operand):
                continue
            axis = image_axis.axis if joins else image_axis.axis - len(size) + len(_old(operand))
            axis = 0 if operand in indices else axis
            if axis < 0 or axis >= len(_old(operand)) or _old(operand)[axis] != size[image_axis.axis]:
                continue
            numbers = operand in indices[image_axis.axis : image_axis.axis + 1]
            length = size[image_axis.axis]
            many = (
                self._numbered(node, operand)
                if numbers
                else self._for_any(node, operand, axis, length, image_axis.inner)
            )
            node.replace_input_with(operand, many)
            changed = True
        return changed

    def _numbered(self, node: Node, operand: Node) -> Node:
        """The number of each image, for as many as there are, in place of a constant [images, 1, ..] that holds it."""
        numbers = self._constant(node, operand)
        if bool((numbers.movedim(0, -1) != torch.arange(self.images)).any()):
            raise LostError("images-differ", f"reads {operand.name}, which puts images in another order")
        with node.graph.inserting_before(node):
            counted = node.graph.call_function(aten.arange.default, (self.size,))
            many = node.graph.call_function(aten.reshape.default, (counted, [-1, *[1] * (numbers.dim() - 1)]))
        for made in (counted, many):
            made.meta = {**operand.meta}
            self.value(made)
        self.image_axes[many] = ImageAxis(0)
        return many

    def _constant(self, node: Node, operand: Node) -> Tensor:
        if not self.graph_view.is_constant(operand.name):
            raise LostError("batch-in-input", f"reads {operand.name}, which follows another input and no image")
        return torch.from_numpy(self.graph_view.constant(operand.name))

    def _for_any(self, node: Node, operand: Node, axis: int, length: int, inner: int) -> Node:
        """A constant [.., length, ..] that says the same for every image, for as many images as there are."""
        part = length // self.images
        values = self._constant(node, operand)
        images = values.unflatten(axis, (-1, part))
        if inner != part or not bool((images == images.narrow(axis, 0, 1)).all()):
            raise LostError("images-differ", f"reads {operand.name}, whose numbers differ from image to image")
        rank, graph = len(_old(operand)), node.graph
        with graph.inserting_before(node):
            one = graph.call_function(aten.slice.Tensor, (operand, axis, 0, part)) if self.images > 1 else operand
            if part == 1:
                sizes = [self.size if each == axis else -1 for each in range(rank)]
                many = graph.call_function(aten.expand.default, (one, sizes))
            else:
                times = [self.size if each == axis else 1 for each in range(rank)]
                many = graph.call_function(aten.repeat.default, (one, times))
        for made in (one, many):
            if made is not operand:
                made.meta = {**operand.meta}
                self.value(made)
        self.image_axes[many] = ImageAxis(axis, part)
        return many

    def _note(self, node: Node, value: Any, read: Sequence[Node], known: ImageAxis | None) -> None:
        """Remember where the image is in `value`, having seen that nothing but the batch changed in its size."""
        if not isinstance(value, Tensor):
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not leaves or not all(open_axes(leaf) for leaf in leaves):
                raise LostError("batch-split", "takes images apart")
            self.image_axes[node] = known or self._carried(open_axes(leaves[0])[0], _olds(node)[0], read)
            return
        axes, old = open_axes(value), _old(node)
        if not axes:
            raise LostError("batch-dropped", "keeps no answer for each image")
        if len(axes) > 1:
            raise LostError("images-mixed", "pairs images with each other")
        if value.dim() != len(old):
            raise LostError("batch-dropped", "takes away the axis of its images")
        grown = [axis for axis in range(len(old)) if axis not in axes and value.shape[axis] != old[axis]]
        if grown or old[axes[0]] % self.images:
            raise LostError("batch-split", "gives sizes that do not follow the batch")
        if known is not None and known.axis == axes[0]:
            self.image_axes[node] = known
        else:
            self.image_axes[node] = self._carried(axes[0], old, read)

    def _carried(self, axis: int, old: Sequence[int], read: Sequence[Node]) -> ImageAxis:
        """The image where no order changed: as in an operand whose axis is as long, outermost where there is none."""
        part = old[axis] // self.images
        alike = (self.image_axes[each].inner for each in read if _old(each)[self.image_axes[each].axis] == old[axis])
        return ImageAxis(axis, min(part, next(alike, part)))


def _olds(node: Node) -> list[list[int]]:
    """The sizes of a node's values with the batch that the graph was captured with."""
    return [[int(n) for n in leaf.shape] for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _old(node: Node) -> list[int]:
    return next(iter(_olds(node)), [])


def _kept(sizes: Any, axis_from_end: int) -> list[Any]:
    """The sizes of an expand, the axis of the batch left as it is."""
    place = len(sizes) + axis_from_end
    return [-1 if index == place else length for index, length in enumerate(sizes)]


def _indices(node: Node, source: Node) -> list[object]:
    """What `node` indexes `source` with, axis by axis; none where it does something else."""
    indexes = operator_name(node) == "index" and node.args[0] is source
    return list(node.args[1]) if indexes else []  # type: ignore[arg-type]


def _unlikely(rest: int, inner: int, beside: int | None) -> int:
    """How unlikely an axis is to be meant for the image: one of its own; folded into an axis behind it that was made
    just now; into one before it; into one that stood behind it already (`beside`).
    """
    if rest == 1:
        return 0
    if inner == 1:
        return 2
    return 3 if rest == inner == beside else 1
