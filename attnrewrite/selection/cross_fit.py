"""What a plan loses on every calibration image, each measured by a model that was not fitted to it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.processes import Processes, placed
from attnrewrite.calibration.stage import Calibration
from attnrewrite.calibration.stages import split
from attnrewrite.images.dataset import Images
from attnrewrite.images.pool import Pool
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.plan import Plan
from attnrewrite.progress import Progress
from attnrewrite.variants.registry import get_variant

FOLDS = 2


def cross_fitted(
    scanned: Scanned[FxGraph],
    plan: Plan,
    images: Pool,
    seed: int,
    processes: Processes,
    progress: Progress | None = None,
) -> Tensor:
    """The logits [images, classes] of the scanned model rewritten by `plan`, in float64.

    The images are dealt into FOLDS; each fold goes through a model that was fitted, in closed form, to the others.
    """
    softmax = Plan(plan.model, tuple(replace(each, variant=get_variant("softmax")) for each in plan.placements))
    outputs: dict[int, Tensor] = {}
    for fitting, measuring in _folds(len(images.images)):
        teacher, student = (FxRewrite(each, scanned)(scanned.graph.module) for each in (softmax, plan))
        fitted, apart = split(_at(images.images, fitting))
        with placed(processes.device, teacher, student):
            given = Calibration(
                teacher, student, replace(images, images=fitted), replace(images, images=apart), seed, progress,
                processes=processes,
            )  # fmt: skip
            Fit(name="fit for the selection").run(given)
            found = replace(images, images=_at(images.images, measuring)).outputs(student, processes.device)
        outputs |= dict(zip(measuring.tolist(), found.cpu(), strict=True))
    return torch.stack([outputs[index] for index in range(len(images.images))])


def _folds(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each fold, the numbers of the images to fit and of those to measure."""
    fold = np.arange(count) % FOLDS
    for index in range(FOLDS):
        yield np.flatnonzero(fold != index), np.flatnonzero(fold == index)


def _at(images: Images, indices: np.ndarray) -> Images:
    return replace(images, x=images.x[indices], y=None)
