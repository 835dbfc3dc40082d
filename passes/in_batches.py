"""A model that takes one batch size, given any number of images; and whether it answers each image by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attnrewrite.errors import Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.draws import Draw
from attnrewrite.passes.verify import HALF, known_error, outputs

APART_TOLERANCE = 1e-4  # the same operations on more images at once, but for the order of the sums


class InBatches(nn.Module):
    """`module`, which takes `size` images at a time, for any number of them: the last batch is filled up.

    What of the inputs and outputs is as long as the batch along its first axis is the images'; other inputs go into
    every call as they are, other outputs are the last call's.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.module, self.size = module, size

    def forward(self, *inputs: Tensor) -> Any:
        count = inputs[0].shape[0]
        results = []
        for start in range(0, count, self.size):
            places = torch.arange(start, start + self.size).clamp(max=count - 1)
            results.append(self.module(*_at_images(inputs, places)))
        return tree_map(lambda *parts: self._joined(parts, count), *results)

    def _joined(self, parts: tuple[Any, ...], count: int) -> Any:
        if not isinstance(parts[0], Tensor) or parts[0].shape[:1] != (self.size,):
            return parts[-1]
        return torch.cat(parts)[:count]


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


def images_mixed(fixed: Callable[..., Any], opened: Callable[..., Any], draws: Sequence[Draw]) -> Refusal | None:
    """Whether `opened` answers an image otherwise than `fixed` does, of whose own batch size the draws are.

    The first draw and one image of the last go in together, then that image alone.
    """
    first, last = draws[0].inputs, draws[-1].inputs
    batch = first[0].shape[0]
    with torch.no_grad():
        known, other = outputs(fixed(*first)), outputs(fixed(*last))
    for index, tensor in enumerate(known):
        if tensor.shape[:1] != (batch,):
            shape = list(tensor.shape)
            return Refusal("no-batch-out", f"gives output {index} as {shape}, which holds no answer for each image")
    one = with_images(last, 1)
    more = tuple(
        torch.cat([mine, theirs[:1]]) if mine.dim() and mine.shape[0] == batch else mine
        for mine, theirs in zip(first, last, strict=True)
    )
    wanted = [torch.cat([mine, theirs[:1]]) for mine, theirs in zip(known, other, strict=True)]
    return _off(opened, more, wanted) or _off(opened, one, [theirs[:1] for theirs in other])


def answers_otherwise(
    model: Callable[..., Any], opened: Callable[..., Any], inputs: Sequence[Tensor]
) -> Refusal | None:
    """Whether `opened` answers `inputs` otherwise than `model` does."""
    with torch.no_grad():
        return _off(opened, inputs, outputs(model(*inputs)))


@torch.no_grad()
def _off(opened: Callable[..., Any], inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Refusal | None:
    count = inputs[0].shape[0]
    try:
        with without_torch_logs():
            found = outputs(opened(*inputs))
    except Exception as failure:  # operators raise many kinds
        return Refusal("batch-refused", f"takes no batch of {count}: {first_line(failure)}")
    for index, (answer, known) in enumerate(zip(found, wanted, strict=True)):
        if answer.shape != known.shape:
            shapes = f"as {list(answer.shape)} for {count} images, not {list(known.shape)}"
            return Refusal("no-batch-out", f"gives output {index} {shapes}")
    error = max(map(known_error, found, wanted), default=0.0)
    allowed = max((_allowed(answer) for answer in wanted), default=APART_TOLERANCE)
    if error <= allowed:
        return None
    told = f"answers an image otherwise beside others (by {error:.2e}, allowed {allowed:.0e})"
    return Refusal("images-mixed", f"{told}: what it computes for one image follows the batch")


def _allowed(answer: Tensor) -> float:
    """How far apart the same operations on more images may be: half precision rounds on the way, every layer anew."""
    return float(torch.finfo(answer.dtype).eps ** 0.5) if answer.dtype in HALF else APART_TOLERANCE
