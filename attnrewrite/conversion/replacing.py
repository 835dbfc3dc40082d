"""Softmax replaced by other forms: chosen where `auto` chooses, calibrated, each checked against itself in float64."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from attnrewrite.calibration.fit import MOST_TIMES
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.stage import StageInput, StageReport
from attnrewrite.calibration.stages import calibrate, split
from attnrewrite.conversion.proof import Proof, with_softmax
from attnrewrite.errors import CheckFailedError
from attnrewrite.frontends.capture import Captured
from attnrewrite.frontends.examples import one_image
from attnrewrite.images.pool import Pool
from attnrewrite.passes.draws import arithmetic_inputs
from attnrewrite.passes.fx.rewrite import with_variants
from attnrewrite.passes.verify import float64_errors
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.request import Execution
from attnrewrite.selection.problem import Auto, Extraction
from attnrewrite.selection.select import Selection, select
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Variant

log = logging.getLogger("attnrewrite")


@dataclass(frozen=True)
class Replaced:
    """The student, what stands at its sites, what each stage of calibration did, and each site's `float64_errors`."""

    student: GraphModule
    selection: Selection
    stages: tuple[StageReport, ...]
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Replacement:
    """What is replaced, in a model whose extraction is proven, and how: by `variant`, and calibrated on the images of
    `pool` (None: not at all), with so many `steps` of gradient descent.
    """

    captured: Captured
    scanned: Scanned[FxGraph]
    proof: Proof
    variant: Variant | Auto
    pool: Pool | None
    steps: int
    execution: Execution
    processes: Processes

    def at(self, sites: Sequence[AttentionSite], teacher: GraphModule) -> Replaced:
        """The model with forms at `sites`, where `teacher` is the same with softmax re-emitted.

        Raises:
            NothingMatchedError: `auto` finds no choice within its budget.
            CheckFailedError: a fit or a check fails; the error carries the site, where it is one's.
        """
        selection = self._selection(sites, teacher)
        if isinstance(self.variant, Auto):
            teacher = with_softmax(self.scanned, [site for site in sites if site.id in selection.standing])
        student = with_variants(self.scanned, selection.standing)
        stages: list[StageReport] = []
        if self.pool is not None:
            halves = split(self.pool)
            given = StageInput(self.captured.module, teacher, student, *halves, self.execution, self.processes)
            times = 1 if isinstance(self.variant, Auto) else MOST_TIMES  # as what was chosen was fitted and measured
            stages = calibrate(given, self.steps, times)
        return Replaced(student, selection, tuple(stages), float64_errors(student, arithmetic_inputs(self.proof.draws)))

    def at_those_that_pass(
        self, sites: Sequence[AttentionSite], teacher: GraphModule
    ) -> tuple[Replaced, dict[str, str]]:
        """As `at`, but a site whose check fails is left out, and all is done again without it; and what failed, by site
        id. Raises as `at` does where no site would be left, or what fails is not a single site's.
        """
        faults: dict[str, str] = {}
        while True:
            try:
                return self.at(sites, teacher), faults
            except CheckFailedError as error:
                left = [site for site in sites if site.id != error.site]
                if not left or error.site is None or len(left) == len(sites):
                    raise
                log.warning("%s stays as it is: %s", error.site, error)
                faults[error.site] = str(error)
                sites, teacher = left, with_softmax(self.scanned, left)

    def _selection(self, sites: Sequence[AttentionSite], teacher: GraphModule) -> Selection:
        """What stands where: the variant at every site, or what `auto` chooses."""
        if not isinstance(self.variant, Auto):
            return Selection(dict.fromkeys([site.id for site in sites], self.variant), {})
        assert self.pool is not None, "auto was accepted without images"
        captured = self.captured
        example = one_image(captured.module, captured.example_inputs)
        extraction = Extraction(captured.name, self.scanned, teacher, tuple(sites), example, captured.fixed_batch)
        return select(self.variant, extraction, self.pool, self.execution, self.processes)
