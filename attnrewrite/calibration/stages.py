"""Calibration without labels: stages that bring a rewritten model (the student) back to its original (the teacher).

Teacher and student are the same graph with the same sites rewritten: to softmax in the teacher, to other forms in the
student. Stages are objects that change the student in place, and compose: each starts from what the last one left.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch.fx import GraphModule

from attnrewrite.calibration.distill import Distillation, SiteDistillation
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.processes import joined_processes, placed
from attnrewrite.calibration.resume import State
from attnrewrite.calibration.stage import Calibration, Stage, StageReport, distance, stage_report
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.dataset import Images
from attnrewrite.images.pool import Pool
from attnrewrite.images.preprocessing import Preprocessing, Size
from attnrewrite.progress import Progress

HELD_OUT_SHARE = 8  # one image in eight, within these bounds, measures and chooses; the others are fitted
HELD_OUT_LEAST, HELD_OUT_MOST = 2, 256


@dataclass(frozen=True)
class Copy:
    """The weights as they were carried over: nothing is changed, so that its report is the plain copy's."""

    name: str = "copy"

    def run(self, calibration: Calibration) -> tuple[str, ...]:
        return ()


def calibrate(
    teacher: GraphModule,
    student: GraphModule,
    *,
    images: Images,
    preprocessing: Preprocessing | None,
    input_size: Size,
    batch_size: int,
    steps: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
    state: Path | None = None,
) -> list[StageReport]:
    """Calibrate `student` in place on unlabelled images; what each stage did.

    Copy and Fit always run; with `steps` of distillation, the sites are distilled first. Deterministic for a seed.
    Interrupted and called again with the same arguments, it goes on from what lies in the folder `state`. Processes
    that torchrun started share the work; all end with the same student.

    Raises:
        CheckFailedError: a fit or a loss is not finite; the message names the site.
        InputError: the images do not fit the model.
    """
    images.x.check(preprocessing, input_size)
    fitted, apart = split(images)
    how = preprocessing, input_size, batch_size
    stages: tuple[Stage, ...] = (Copy(), Fit())
    if steps:
        stages += (SiteDistillation(), Distillation(steps))
    processes = joined_processes()
    with placed(processes.device, teacher, student):
        calibration = Calibration(
            teacher, student, Pool(fitted, *how), Pool(apart, *how), seed, progress, State(state), processes
        )
        return run(calibration, stages)


def run(calibration: Calibration, stages: Sequence[Stage]) -> list[StageReport]:
    """Run the stages in order. Raises CheckFailedError where a stage leaves the student's output not finite."""
    reports = []
    before = distance(calibration)
    for stage in stages:
        start = time.perf_counter()
        notes = stage.run(calibration)
        seconds = time.perf_counter() - start
        after = distance(calibration)
        if not after.error < float("inf"):
            raise CheckFailedError(f"{stage.name}: NaN or infinity in the model's output; nothing was written")
        reports.append(stage_report(stage.name, seconds, before, after, notes))
        before = after
    return reports


def split(images: Images) -> tuple[Images, Images]:
    """The images to fit, and those held out; the same ones for both, where there are too few to do without."""
    if len(images) < HELD_OUT_SHARE:
        return images, images
    held = min(HELD_OUT_MOST, max(HELD_OUT_LEAST, len(images) // HELD_OUT_SHARE))
    indices = np.arange(len(images))
    return _take(images, indices[held:]), _take(images, indices[:held])


def _take(images: Images, indices: np.ndarray) -> Images:
    return replace(images, x=images.x[indices], y=None)
