"""A model that takes one batch size, given any number of images; and whether it answers each image by itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from attnrewrite.errors import Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.draws import Draw
from attnrewrite.passes.verify import HALF, known_error, outputs, tensors
from attnrewrite.passes.wide import Wide

Answers = tuple[tuple[Tensor, ...], ...]  # the outputs for each of several draws

APART_TOLERANCE = 1e-4  # the same operations on more images at once, but for the order of the sums


class InBatches(nn.Module):
    """`module`, which takes `size` images at a time, for any number of them: the last batch is filled up.

    What of the inputs is as long as the batch along its first axis is the images'; others go into every call as they
    are. `axes`: along which axis each tensor of the output has them, None where it has none: then it is the last call's
    (without `axes`, the first where that is as long as the batch).
    """

    def __init__(self, module: nn.Module, size: int, axes: Sequence[int | None] | None = None) -> None:
        super().__init__()
        self.module, self.size, self.axes = module, size, axes

    def forward(self, *inputs: Tensor) -> Any:
        count = inputs[0].shape[0]
        results = []
        for start in range(0, count, self.size):
            places = torch.arange(start, start + self.size).clamp(max=count - 1)
            results.append(self.module(*_at_images(inputs, places)))
        axes = iter([self._first(leaf) for leaf in tensors(results[0])] if self.axes is None else self.axes)
        return tree_map(lambda *parts: self._joined(parts, count, axes), *results)

    def _first(self, output: Tensor) -> int | None:
        return 0 if output.shape[:1] == (self.size,) else None

    def _joined(self, parts: tuple[Any, ...], count: int, axes: Iterator[int | None]) -> Any:
        axis = next(axes, None) if isinstance(parts[0], Tensor) else None
        return parts[-1] if axis is None else torch.cat(parts, axis).narrow(axis, 0, count)


def with_images(inputs: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """`inputs` with `count` images: the first of them, or the same ones over and over. What is not as long as the first
    input that has an axis is of no image, and stays.
    """
    return _at_images(inputs, torch.arange(count) % max(1, _images(inputs)))


def _at_images(inputs: Sequence[Tensor], places: Tensor) -> tuple[Tensor, ...]:
    count = _images(inputs)
    return tuple(t[places.to(t.device)] if t.dim() and len(t) == count else t for t in inputs)


def _images(inputs: Sequence[Tensor]) -> int:
    return next((len(tensor) for tensor in inputs if tensor.dim()), 1)


@dataclass(frozen=True)
class Known:
    """What `model` answers to `draws` of its own batch size: asked once, however many graphs are held to it."""

    model: Callable[..., Any]
    draws: tuple[Draw, ...]

    @cached_property
    def answers(self) -> Answers | Refusal:
        """Its outputs for each draw, or why it takes none of them."""
        return self._asked(self.model)

    @cached_property
    def wide(self) -> Answers | Refusal:
        """The same in float64, of a graph."""
        assert isinstance(self.model, GraphModule)
        return self._asked(Wide(self.model).run)

    def _asked(self, model: Callable[..., Any]) -> Answers | Refusal:
        try:
            with torch.no_grad(), without_torch_logs():
                return tuple(tuple(outputs(model(*draw.inputs))) for draw in self.draws)
        except Exception as failure:  # a model refuses an input in its own words
            return Refusal("draw-refused", f"does not take inputs like its example: {first_line(failure)}")


def images_mixed(known: Known, opened: Callable[..., Any]) -> Refusal | None:
    """Whether `opened` answers an image otherwise than is known of the model. The first draw and one image of the last
    go in together, then that image alone.
    """
    return _decided(known, opened, _mixed)


def answers_otherwise(known: Known, opened: Callable[..., Any]) -> Refusal | None:
    """Whether `opened` answers the first draw otherwise than is known of the model."""
    return _decided(known, opened, lambda run, draws, answers: _off(run, draws[0].inputs, answers[0]))


def _decided(
    known: Known,
    opened: Callable[..., Any],
    differs: Callable[[Callable[..., Any], tuple[Draw, ...], Answers], Refusal | None],
) -> Refusal | None:
    """Rounding differs with the batch, and decides where a model chooses among what is nearly alike, such as its best
    queries: of graphs, float64 tells.
    """
    answers = known.answers
    found = answers if isinstance(answers, Refusal) else differs(opened, known.draws, answers)
    if found is None or found.code != "images-mixed":
        return found
    if not isinstance(known.model, GraphModule) or not isinstance(opened, GraphModule):
        return found
    wide = known.wide
    return wide if isinstance(wide, Refusal) else differs(Wide(opened).run, known.draws, wide)


def _mixed(opened: Callable[..., Any], draws: tuple[Draw, ...], answers: Answers) -> Refusal | None:
    first, last = draws[0].inputs, draws[-1].inputs
    known, other = answers[0], answers[-1]
    batch = first[0].shape[0]
    one = with_images(last, 1)
    more = tuple(
        torch.cat([mine, theirs[:1]]) if mine.dim() and mine.shape[0] == batch else mine
        for mine, theirs in zip(first, last, strict=True)
    )
    found = _given(opened, more)
    if isinstance(found, Refusal):
        return found
    if len(found) != len(known):
        return Refusal("no-batch-out", f"gives {len(known)} outputs for {batch} images and {len(found)} for one more")
    wanted, alone = [], []
    for index, (mine, theirs, both) in enumerate(zip(known, other, found, strict=True)):
        axis = _image_axis(mine, both, batch)
        if axis is None and not (mine.shape == both.shape and known_error(theirs, mine) <= allowed_apart(mine)):
            shape = list(mine.shape)
            return Refusal("no-batch-out", f"gives output {index} as {shape}, which holds no answer for each image")
        only = theirs if axis is None else theirs.narrow(axis, 0, 1)
        wanted.append(mine if axis is None else torch.cat([mine, only], axis))
        alone.append(only)
    return _apart(found, wanted, batch + 1) or _off(opened, one, alone)


def image_axes(model: Callable[..., Any], inputs: Sequence[Tensor], answer: Any) -> tuple[int | None, ...]:
    """Along which axis each tensor of `answer`, which a model gives for `inputs`, has the images: the first that is as
    long as there are of them with two and with three, where it takes both; else the first of all, where it is as long
    as the batch of `inputs`. None where there is no such axis, or a tensor for each image.
    """
    own = tensors(answer)
    two, three = (_taken(model, with_images(inputs, count)) for count in (2, 3))
    if isinstance(two, Refusal) or isinstance(three, Refusal):
        return tuple(0 if each.shape[:1] == (_images(inputs),) else None for each in own)
    few, more = tensors(two), tensors(three)
    if not len(few) == len(more) == len(own):
        return (None,) * len(own)
    return tuple(next(iter(_following(*pair, 2)), None) for pair in zip(few, more, strict=True))


def _image_axis(of_batch: Tensor, of_one_more: Tensor, batch: int) -> int | None:
    """The only axis of an output that follows the batch, if it is as long as a `batch`, and one longer for one image
    more.
    """
    pairs = zip(of_batch.shape, of_one_more.shape, strict=False)
    longer = sum(mine != both for mine, both in pairs)
    return next(iter(_following(of_batch, of_one_more, batch)), None) if longer == 1 else None


def _following(of_batch: Tensor, of_one_more: Tensor, batch: int) -> list[int]:
    """The axes of an output that are as long as a `batch`, and one longer for one image more."""
    if of_batch.dim() != of_one_more.dim():
        return []
    pairs = enumerate(zip(of_batch.shape, of_one_more.shape, strict=True))
    return [axis for axis, pair in pairs if pair == (batch, batch + 1)]


def _off(opened: Callable[..., Any], inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Refusal | None:
    found = _given(opened, inputs)
    return found if isinstance(found, Refusal) else _apart(found, wanted, len(inputs[0]))


def _given(opened: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | Refusal:
    """The outputs that it gives for the inputs, or that it takes no such batch."""
    taken = _taken(opened, inputs)
    return taken if isinstance(taken, Refusal) else tuple(outputs(taken))


@torch.no_grad()
def _taken(opened: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """What it gives for the inputs, or a Refusal where it takes no such batch."""
    try:
        with without_torch_logs():
            return opened(*inputs)
    except Exception as failure:  # operators raise many kinds
        return Refusal("batch-refused", f"takes no batch of {len(inputs[0])}: {first_line(failure)}")


def _apart(found: Sequence[Tensor], wanted: Sequence[Tensor], count: int) -> Refusal | None:
    """Whether outputs for `count` images are others than those that are wanted."""
    for index, (answer, known) in enumerate(zip(found, wanted, strict=True)):
        if answer.shape != known.shape:
            shapes = f"as {list(answer.shape)} for {count} images, not {list(known.shape)}"
            return Refusal("no-batch-out", f"gives output {index} {shapes}")
    error = max(map(known_error, found, wanted), default=0.0)
    allowed = max((allowed_apart(answer) for answer in wanted), default=APART_TOLERANCE)
    if error <= allowed:
        return None
    told = f"answers an image otherwise beside others (by {error:.2e}, allowed {allowed:.0e})"
    return Refusal("images-mixed", f"{told}: what it computes for one image follows the batch")


def allowed_apart(answer: Tensor) -> float:
    """How far apart the same operations in another order may be: half precision rounds on the way, every layer anew."""
    return float(torch.finfo(answer.dtype).eps ** 0.5) if answer.dtype in HALF else APART_TOLERANCE
