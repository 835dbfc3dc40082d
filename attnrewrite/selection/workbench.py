"""What a selection measures: candidates alone, their costs, whole choices. What takes long is kept for a restart."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.calibration.processes import Processes, placed
from attnrewrite.calibration.resume import State, resume_key
from attnrewrite.errors import InputError
from attnrewrite.evaluation.accuracy import check_classes
from attnrewrite.images.pool import Pool
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.plan import Placement, Plan
from attnrewrite.progress import Progress
from attnrewrite.selection.budget import Auto
from attnrewrite.selection.candidates import described
from attnrewrite.selection.costs import Bench, Costs, bench, estimated, measured
from attnrewrite.selection.cross_fit import cross_fitted
from attnrewrite.selection.loss_bound import Loss, LossMeter
from attnrewrite.selection.trials import trials
from attnrewrite.site import AttentionSite
from attnrewrite.targets.base import get_target
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

SCAN_FITTED, SCAN_HELD_OUT = 160, 256  # how many images fit a candidate that stands alone, and how many measure it
SCAN_BATCHES = 5  # of the fitted ones: as many as the fit needs to choose its ridge


@dataclass(frozen=True)
class Subject:
    """The model to convert: `scanned` as captured, `teacher` the same with softmax at `sites`, those that a candidate
    can stand at. `one` is an input of one image, or of the only batch that the model takes (`fixed_batch`).
    """

    name: str
    scanned: Scanned[FxGraph]
    teacher: GraphModule
    sites: tuple[AttentionSite, ...]
    one: tuple[Tensor, ...]
    fixed_batch: int | None

    @property
    def original(self) -> GraphModule:
        return self.scanned.graph.module

    def rewritten(self, plan: Plan) -> GraphModule:
        return FxRewrite(plan, self.scanned)(self.original)


@dataclass(frozen=True)
class Workbench:
    """One selection: what it is given, and what it measures. Every finding that takes long is kept in `state`."""

    auto: Auto
    subject: Subject
    images: Pool
    seed: int
    state: State
    processes: Processes
    progress: Progress | None

    @cached_property
    def judge(self) -> LossMeter:
        return LossMeter.of(self._original_logits, self.images.images.y)

    @cached_property
    def _original_logits(self) -> Tensor:
        with placed(self.processes.device, self.subject.teacher):
            logits = self.images.outputs(self.subject.teacher, self.processes.device).cpu()
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise InputError(
                f"--variant auto measures how often the class changes, and the output of {self.subject.name} is "
                f"{list(logits.shape)}: it needs a classifier, [images, classes]; choose a variant by name"
            )
        labels = self.images.images.y
        check_classes(
            self.subject.name, logits, None if labels is None else torch.from_numpy(labels), self.images.images
        )
        return logits

    @cached_property
    def scanned(self) -> dict[str, list[dict[str, Any]]]:
        """For each site, for each candidate: {"loss"} when it stands there alone, or {"reason"}."""
        return self._kept("candidates alone", self._scan)

    def _scan(self) -> dict[str, list[dict[str, Any]]]:
        fitted, apart, measuring = self._scan_images()
        labels = self.images.images.y
        softmax = get_variant("softmax")
        student = self.subject.rewritten(self._plan(dict.fromkeys((site.id for site in self.subject.sites), softmax)))
        judge = LossMeter(
            self.judge.original[torch.from_numpy(measuring)],
            None if labels is None else labels[measuring],
            self.judge.temperature,
        )
        found: dict[str, list[dict[str, Any]]] = {site.id: [] for site in self.subject.sites}
        with placed(self.processes.device, self.subject.teacher, student):
            tried = trials(
                self.subject.teacher, student, self.subject.sites, self.auto.candidates, fitted, apart,
                judge.original.to(self.processes.device), self.processes, self.progress,
            )  # fmt: skip
            for trial in tried:
                output = trial.output
                whole = output is not None and bool(torch.isfinite(output).all())
                found[trial.site].append(
                    {"loss": asdict(judge.loss(output.cpu()))}
                    if output is not None and whole
                    else {"reason": trial.reason or "its output is NaN or infinite"}
                )
        return found

    def _scan_images(self) -> tuple[Pool, Pool, np.ndarray]:
        """The images that fit a candidate alone, those that measure it, and the numbers of the latter."""
        count = len(self.images.images)
        indices = np.arange(count)
        fitting = indices[: min(SCAN_FITTED, max(1, count // 2))]
        measuring = indices[count // 2 :][:SCAN_HELD_OUT]
        batch = self.subject.fixed_batch or min(self.images.batch_size, max(1, len(fitting) // SCAN_BATCHES))

        def pool(at: np.ndarray) -> Pool:
            return replace(self.images, images=replace(self.images.images, x=self.images.images.x[at], y=None),
                           batch_size=batch)  # fmt: skip

        return pool(fitting), pool(measuring), measuring

    @cached_property
    def timing(self) -> Bench | str:
        """How plans are timed, or why they are not."""
        if self.auto.target is None:
            return "no target was named (--for)"
        return bench(get_target(self.auto.target), self.auto.threads)

    @cached_property
    def costs(self) -> Costs:
        return Costs(**self._kept("costs", lambda: self._owners(lambda: asdict(self._costs()))))

    def _costs(self) -> Costs:
        subject, candidates = self.subject, self.auto.candidates
        if isinstance(self.timing, str):
            softmax = get_variant("softmax")
            return estimated(subject.teacher, subject.one, subject.sites, candidates, softmax, self.timing)
        target = str(self.auto.target)
        return measured(
            self.timing, target, subject.original, subject.teacher, subject.one, subject.sites, candidates,
            self.progress,
        )  # fmt: skip

    def loss(self, standing: Mapping[str, Variant]) -> Loss:
        """What the model loses with these variants at its sites, every image measured by a model not fitted to it."""
        plan = self._plan(standing)

        def measure() -> dict[str, Any]:
            logits = cross_fitted(self.subject.scanned, plan, self.images, self.seed, self.processes, self.progress)
            return asdict(self.judge.loss(logits))

        return Loss(**self._kept(f"loss of {self._told(standing)}", measure))

    def ratio(self, standing: Mapping[str, Variant]) -> float:
        """The cost of the model with these variants at its sites over the original's: timed, or from the costs."""
        timing = self.timing
        if isinstance(timing, str):
            candidates = self.auto.candidates
            return self.costs.ratio({site: 1 + candidates.index(variant) for site, variant in standing.items()})
        subject, plan = self.subject, self._plan(standing)

        def measure() -> float:
            converted = subject.rewritten(plan)
            for site in rewritten_sites(converted).values():
                site.deploy()
            return timing.ratio(subject.original, converted, subject.one)

        return self._kept(f"time of {self._told(standing)}", lambda: self._owners(measure))

    def _plan(self, standing: Mapping[str, Variant]) -> Plan:
        sites = [site for site in self.subject.sites if site.id in standing]
        return Plan(self.subject.name, tuple(Placement.at(site, standing[site.id]) for site in sites))

    def _kept(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` found, now or before an interruption: for this model, these images, and what was asked."""
        file = f"selection {resume_key([], name)}"
        key = resume_key([self._original_logits, *self.subject.teacher.state_dict().values()], *self._asked(), name)
        owner = self.processes.rank == 0
        found = self.processes.from_owner(self.state.load(file, key) if owner else None, 0)
        if found is None:
            found = {"found": find()}
            if owner:
                self.state.save(file, key, found)
        return found["found"]

    def _asked(self) -> tuple[object, ...]:
        names = [described(variant) for variant in self.auto.candidates]
        budget = (self.auto.max_drop, self.auto.max_latency, self.auto.target, self.auto.threads)
        return names, budget, self.seed, len(self.images.images), [site.id for site in self.subject.sites]

    def _owners(self, find: Callable[[], Any]) -> Any:
        """What the first process finds: times differ between processes, and all must choose alike."""
        return self.processes.from_owner(find() if self.processes.rank == 0 else None, 0)

    def _told(self, standing: Mapping[str, Variant]) -> list[tuple[str, str]]:
        return [(site, described(variant)) for site, variant in standing.items()]
