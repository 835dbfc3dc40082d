"""Calibration without labels: stages that bring a rewritten model (the student) back to its original (the teacher).

Teacher and student are the same graph with the same sites rewritten: to softmax in the teacher, to other forms in the
student. Stages are objects that change the student in place, and compose: each starts from what the last one left.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnrewrite.calibration.distill import Distillation
from attnrewrite.calibration.fit import MOST_TIMES, Fit
from attnrewrite.calibration.processes import placed
from attnrewrite.calibration.reconstruct import Reconstruction
from attnrewrite.calibration.stage import Distance, Stage, StageInput, StageReport, StageResult, distance, peak_memory
from attnrewrite.calibration.store import counted
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.pool import Pool

HELD_OUT_SHARE = 8  # one image in eight, within these bounds, measures and chooses; the others are fitted
HELD_OUT_LEAST, HELD_OUT_MOST = 2, 256


@dataclass(frozen=True)
class Copy:
    """The weights as they were carried over: nothing is changed, so that its report is the plain copy's."""

    name: str = "copy"

    def run(self, given: StageInput, before: Distance | None = None) -> StageResult:
        before = before or distance(given)
        notes = [given.answer.note] if given.answer.note else []
        if len(given.answer.scales) == len(given.answers.shape) == 1 and not given.answer.logits:
            notes.append(
                f"no agreement is measured, as the output [images, {given.answers.shape[0]}] is taken for an "
                "embedding: no linear map with a bias gives it, and no labels are of as many classes"
            )
        return StageResult(before, tuple(notes))


def calibrate(given: StageInput, steps: int = 0, times: int = MOST_TIMES) -> list[StageReport]:
    """Calibrate the student in place on unlabelled images; what each stage did.

    Copy and Fit, to each image at most so many `times`, always run; with `steps`, blocks are reconstructed and the
    whole is distilled, in so many each.
    Deterministic for a seed. Interrupted and called again with the same arguments, it goes on from what lies in the
    state folder. Several processes share the work; all end with the same student.

    Raises:
        CheckFailedError: a fit or a loss is not finite; the message names the site.
    """
    stages: tuple[Stage, ...] = (Copy(), Fit(times=times))
    if steps:
        stages += (Reconstruction(steps), Distillation(steps))
    with placed(given.processes.device, given.original, given.teacher, given.student):
        return run(given, stages)


def run(given: StageInput, stages: Sequence[Stage]) -> list[StageReport]:
    """Run the stages in order. Raises CheckFailedError where a stage leaves the student's output not finite."""
    reports = []
    before = distance(given)
    for stage in stages:
        start, cpu = time.perf_counter(), time.process_time()
        with counted() as spilled:
            result = stage.run(given, before)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        after = result.after
        if not after.error < float("inf"):
            raise CheckFailedError(f"{stage.name}: NaN or infinity in the model's output; nothing was written")
        reports.append(
            StageReport(
                stage.name, seconds, before.error, after.error, before.kl, after.kl, before.agreement, after.agreement,
                peak_memory(), result.notes, spilled.bytes, cpu_seconds,
            )
        )  # fmt: skip
        before = after
    return reports


def split(pool: Pool) -> tuple[Pool, Pool]:
    """The images to fit, and those held out; the same ones for both, where there are too few to do without."""
    count = len(pool.images)
    if count < HELD_OUT_SHARE:
        return pool, pool
    held = min(HELD_OUT_MOST, max(HELD_OUT_LEAST, count // HELD_OUT_SHARE))
    indices = np.arange(count)
    return pool.take(indices[held:]), pool.take(indices[:held])
