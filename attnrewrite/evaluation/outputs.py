"""How far what a model gives is from what a reference gives, where that is no logits: maps, boxes, hidden states."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.evaluation.batches import Batch, batches
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.images.dataset import Images
from attnrewrite.images.preprocessing import Preprocessing, Size
from attnrewrite.passes.in_batches import image_axes
from attnrewrite.passes.spread import Spread, squared_norm
from attnrewrite.passes.verify import tensors
from attnrewrite.request import Progress


@torch.no_grad()
def evaluate_outputs(
    modules: Mapping[str, Callable[..., Any]],
    images: Images,
    preprocessing: Preprocessing | None,
    *,
    reference: str,
    input_size: Size | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """Hold `modules` against one of them, the reference, over all images, as `batches` runs them: by all outputs in
    floating point that follow the images (`image_axes`) and differ between them. A note tells of others.

    Raises:
        InputError: the images do not fit, a model gives nothing that could be compared, other outputs than the
            reference, or NaN where that gives numbers.
    """
    spreads: dict[int, Spread] = {}
    squares: dict[str, dict[int, float]] = {name: {} for name in modules if name != reference}
    axes: tuple[int | None, ...] = ()
    done = 0
    for batch in batches(
        modules, images, preprocessing, input_size=input_size, batch_size=batch_size, progress=progress
    ):
        axes = axes or image_axes(modules[reference], batch.inputs, batch.outputs[reference])
        wanted = _of_images(reference, batch, axes)
        for place, tensor in wanted.items():
            spreads.setdefault(place, Spread()).add(tensor)
        for name, sums in squares.items():
            found = _of_images(name, batch, axes)
            _require_alike(name, found, reference, wanted)
            for place, tensor in wanted.items():
                sums[place] = sums.get(place, 0.0) + squared_norm(found[place] - tensor)
        done += batch.own
    counted = [place for place, spread in spreads.items() if not spread.constant]
    _tell(reference, images, len(counted), len(axes))
    errors = {name: _mean([sums[place] / spreads[place].energy for place in counted]) for name, sums in squares.items()}
    for name, error in errors.items():
        if error is not None and not math.isfinite(error):
            raise InputError(f"{name} answers NaN or infinity where {reference} gives numbers: its own overflow there")
    return {name: Evaluation(name, done, None, None, None, errors.get(name)) for name in modules}


def _of_images(name: str, batch: Batch, axes: Sequence[int | None]) -> dict[int, Tensor]:
    """What a model gives for each image of its own, [images, ...], by the place among its tensors, which have the
    images along `axes`.
    """
    output = batch.outputs[name]
    given = tensors(output)
    if given and len(given) != len(axes):
        raise InputError(
            f"{name} gives {len(given)} outputs and not the {len(axes)} of the model that it is held against: give "
            "models of the same outputs"
        )
    found = {
        place: tensor.movedim(axis, 0)[: batch.own]
        for place, (tensor, axis) in enumerate(zip(given, axes, strict=False))
        if tensor.is_floating_point() and axis is not None and tensor.shape[axis : axis + 1] == (batch.size,)
    }
    if not found:
        shapes = [list(tensor.shape) for tensor in given] or type(output).__name__
        raise InputError(
            f"{name} gives no numbers for each of {batch.size} images that could be compared: its output is {shapes}"
        )
    return found


def _require_alike(name: str, found: Mapping[int, Tensor], reference: str, wanted: Mapping[int, Tensor]) -> None:
    shapes, others = ([list(each.shape[1:]) for each in given.values()] for given in (found, wanted))
    if found.keys() != wanted.keys() or shapes != others:
        raise InputError(
            f"{name} gives {shapes} for an image and {reference} {others}, and cannot be held against it: give models "
            "of the same outputs"
        )


def _mean(values: Sequence[float]) -> float | None:
    """Their mean; None where there are none."""
    return sum(values) / len(values) if values else None


def _tell(reference: str, images: Images, counted: int, given: int) -> None:
    """Say what of the outputs, and of the data, is not compared."""
    log = logging.getLogger("attnrewrite")
    if counted < given:
        log.warning(
            "%s is compared by %d of its %d outputs: the others are no floating-point numbers, do not follow the "
            "images, or are alike for all images", reference, counted, given
        )  # fmt: skip
    if images.y is not None:
        log.warning("the labels are not used: %s gives no logits [images, classes]", reference)
