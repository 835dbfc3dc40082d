"""What a plan loses on every calibration image, each measured by a model that was not fitted to it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.processes import Processes, placed
from attnrewrite.calibration.stage import StageInput
from attnrewrite.calibration.stages import split
from attnrewrite.images.pool import Pool
from attnrewrite.plan import Plan
from attnrewrite.request import Execution
from attnrewrite.selection.problem import Extraction
from attnrewrite.variants.registry import get_variant

FOLDS = 2


def cross_fitted(
    extraction: Extraction, plan: Plan, images: Pool, execution: Execution, processes: Processes
) -> Tensor:
    """The logits [images, classes] of the original rewritten by `plan`, in float64.

    The images are dealt into FOLDS; each fold goes through a model that was fitted, in closed form, to the others.
    """
    softmax = Plan(plan.model, tuple(replace(each, variant=get_variant("softmax")) for each in plan.placements))
    outputs: dict[int, Tensor] = {}
    for fitting, measuring in _folds(len(images.images)):
        teacher, student = extraction.rewritten(softmax), extraction.rewritten(plan)
        with placed(processes.device, extraction.original, teacher, student):
            given = StageInput(
                extraction.original, teacher, student, *split(images.take(fitting)), execution, processes
            )
            Fit(name="fit for the selection").run(given)
            batch = given.measuring.batch_size  # what memory has room for
            found = replace(images.take(measuring), batch_size=batch).outputs(student, processes.device)
        outputs |= dict(zip(measuring.tolist(), found.cpu(), strict=True))
    return torch.stack([outputs[index] for index in range(len(images.images))])


def _folds(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each fold, the numbers of the images to fit and of those to measure."""
    fold = np.arange(count) % FOLDS
    for index in range(FOLDS):
        yield np.flatnonzero(fold != index), np.flatnonzero(fold == index)
