"""What a choice loses on the calibration images, each measured by a model that was not fitted to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from attnrewrite.calibration.answers import LOGITS
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.importance import FINE_DRAWS, Importance, importance
from attnrewrite.calibration.processes import Processes, placed
from attnrewrite.calibration.stage import StageInput
from attnrewrite.calibration.stages import split
from attnrewrite.images.pool import Pool
from attnrewrite.request import Execution
from attnrewrite.selection.problem import Extraction
from attnrewrite.variants.base import Variant

FOLDS = 2


@dataclass(frozen=True)
class CrossFit:
    """The images, dealt into FOLDS: each fold goes through a model that was fitted, in closed form, to the others. What
    the original's tokens count is found once for all of them.
    """

    extraction: Extraction
    images: Pool
    execution: Execution
    processes: Processes

    def outputs(self, standing: Mapping[str, Variant]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """For each fold, the numbers of its images and their logits, float64 [images, classes], of the original with
        these variants at its sites, one for every site.
        """
        original, teacher = self.extraction.original, self.extraction.teacher
        for fold in self._folds:
            student = self.extraction.rewritten(standing)
            with placed(self.processes.device, original, teacher, student):
                given = StageInput(
                    original, teacher, student, *split(self.images.take(fold.fitting)), self.execution, self.processes,
                    fold.importance,
                )  # fmt: skip
                Fit(times=1, name="fit for the selection").run(given)  # for time: a selection fits often
                batch = given.answers.pool.batch_size  # what memory has room for
                measuring = replace(self.images.take(fold.measuring), batch_size=batch)
                yield fold.measuring, measuring.outputs(student, self.processes.device).cpu()

    @cached_property
    def _folds(self) -> "tuple[_Fold, ...]":
        number = np.arange(len(self.images.images)) % FOLDS
        return tuple(
            _Fold(self.extraction, self.processes, np.flatnonzero(number != index), np.flatnonzero(number == index))
            for index in range(FOLDS)
        )


@dataclass(frozen=True)
class _Fold:
    """The numbers of the images to fit and of those to measure, and what the tokens of the former count."""

    extraction: Extraction
    processes: Processes
    fitting: np.ndarray
    measuring: np.ndarray
    _known: dict[int, Importance] = field(default_factory=dict)

    def importance(self, images: Pool) -> Importance:
        """What the tokens of `images`, those to fit, count. A number for each token stays in memory."""
        if images.batch_size not in self._known:
            self._known[images.batch_size] = importance(
                self.extraction.teacher, images, LOGITS, self.processes, draws=FINE_DRAWS
            )
        return self._known[images.batch_size]
