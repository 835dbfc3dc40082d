"""Accuracy, and agreement with a reference: several models over the same batches, in one pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.evaluation.batches import Batch, batches
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.images.dataset import Images
from attnrewrite.images.pool import first_tensor
from attnrewrite.images.preprocessing import Preprocessing, Size
from attnrewrite.request import Progress


@torch.no_grad()
def evaluate_modules(
    modules: Mapping[str, Callable[..., Any]],
    images: Images,
    preprocessing: Preprocessing | None,
    *,
    input_size: Size | None = None,
    reference: str | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """Run `modules` over all images, as `batches` does; the first tensor of the output is the logits [b, classes].

    Raises:
        InputError: the images do not fit, a label or a class folder has no logit, or the outputs are no logits.
    """
    if reference is not None and reference not in modules:
        raise unknown_name("reference model", reference, modules)
    totals = {name: _Total() for name in modules}
    for batch in batches(
        modules, images, preprocessing, input_size=input_size, batch_size=batch_size, progress=progress
    ):
        logits = {name: _logits(name, output, batch)[: batch.own] for name, output in batch.outputs.items()}
        for name, given in logits.items():
            check_classes(name, given, batch.labels, images)
            if reference is not None:
                _require_alike(name, given, reference, logits[reference])
            totals[name].add(given, batch.labels, None if reference in (None, name) else logits[reference])
    return {
        name: Evaluation(name, total.images, *total.means(images.y is not None, reference not in (None, name)))
        for name, total in totals.items()
    }


@torch.no_grad()
def gives_logits(module: Callable[..., Any], inputs: Sequence[Tensor]) -> bool:
    """Whether what a model gives is a classifier's by its form: its first tensor is [images, classes]."""
    logits = _first(module(*inputs))
    return logits is not None and logits.dim() == 2


class _Total:
    """Running sums over the images of one model."""

    def __init__(self) -> None:
        self.images = self.right = self.agreed = 0
        self.numbers, self.squares = 0, 0.0

    def add(self, logits: Tensor, labels: Tensor | None, reference: Tensor | None) -> None:
        best = logits.argmax(1)
        self.images += len(logits)
        if labels is not None:
            self.right += int((best == labels).sum())
        if reference is not None:
            self.agreed += int((best == reference.argmax(1)).sum())
            self.squares += float((logits.double() - reference.double()).square().sum())
            self.numbers += logits.numel()

    def means(self, labelled: bool, compared: bool) -> tuple[float | None, float | None, float | None]:
        return (
            100 * self.right / self.images if labelled else None,
            100 * self.agreed / self.images if compared else None,
            self.squares / self.numbers if compared else None,
        )


def _first(output: Any) -> Tensor | None:
    try:
        return first_tensor(output)
    except (TypeError, StopIteration, RecursionError):  # no tensor is in it; a text is made of texts
        return None


def _logits(name: str, output: Any, batch: Batch) -> Tensor:
    logits = _first(output)
    if logits is None or logits.dim() != 2:
        shape = type(output).__name__ if logits is None else list(logits.shape)
        raise InputError(
            f"{name} is not a classifier: its output is {shape}, and [images, classes] is needed to measure "
            "accuracy; evaluate holds a converted model of other outputs against its original, where that is known "
            "or given (--original)"
        )
    if len(logits) != batch.size:
        raise InputError(f"{name} gives {len(logits)} answers for {batch.size} images: give the batch that it takes")
    if bool(logits.isnan().any()):
        count = int(logits.isnan().any(1).sum())
        raise InputError(
            f"{name} answers NaN for {count} of {len(logits)} images, which is no class: its numbers overflow there; "
            "leave it out, or give a model that answers every image"
        )
    return logits


def _require_alike(name: str, logits: Tensor, reference: str, others: Tensor) -> None:
    if logits.shape != others.shape:
        raise InputError(
            f"{name} answers with {logits.shape[1]} classes and {reference} with {others.shape[1]}, and cannot be held "
            "against it: give models of the same classes, or evaluate each by itself"
        )


def check_classes(name: str, logits: Tensor, labels: Tensor | None, images: Images) -> None:
    count = logits.shape[1]
    if images.classes and len(images.classes) != count:
        raise InputError(
            f"{name} has {count} classes and the data {len(images.classes)} class folders, so that the labels (folders "
            "in order) would be wrong: add empty folders for the classes that are absent, or give an .npz with y"
        )
    if labels is not None and int(labels.max()) >= count:
        raise InputError(
            f"{name} has {count} classes and the data a label {int(labels.max())}: is it the model's own data?"
        )
