"""What a selection measures: candidates alone, their costs, whole choices. What takes long is kept for a restart."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.calibration.processes import Processes, placed
from attnrewrite.calibration.resume import State, resume_key
from attnrewrite.calibration.room import sized
from attnrewrite.calibration.stage import StageInput
from attnrewrite.errors import InputError
from attnrewrite.evaluation.accuracy import check_classes
from attnrewrite.images.pool import Pool
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.request import Execution
from attnrewrite.selection.costs import Costs, Timer, estimated, measured, priced, timer_of
from attnrewrite.selection.cross_fit import CrossFit
from attnrewrite.selection.loss_bound import Loss, LossMeter
from attnrewrite.selection.problem import Auto, Extraction, described
from attnrewrite.selection.trials import trials
from attnrewrite.targets.base import get_target
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

SCAN_FITTED, SCAN_HELD_OUT = 96, 128  # how many images fit a candidate that stands alone, and how many measure it


@dataclass(frozen=True)
class Measurements:
    """One selection: what it is given, and what it measures. What takes long is kept in the state folder."""

    auto: Auto
    extraction: Extraction
    images: Pool
    execution: Execution
    processes: Processes

    @cached_property
    def meter(self) -> LossMeter:
        return LossMeter.of(self._original_logits, self.images.images.y)

    @cached_property
    def _original_logits(self) -> Tensor:
        with placed(self.processes.device, self.extraction.original):
            forward = torch.no_grad()(self.extraction.original.forward)
            device = self.processes.device
            images = sized(self.images, "measuring the model", forward, self.execution, device)
            logits = images.outputs(self.extraction.original, device).cpu()
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise InputError(
                f"--variant auto measures how often the class changes, and the output of {self.extraction.name} is "
                f"{list(logits.shape)}: it needs a classifier, [images, classes]; choose a variant by name"
            )
        labels = self.images.images.y
        if labels is None and not FxGraph(self.extraction.original).gives_logits:
            raise InputError(
                f"--variant auto measures how often the class changes, and the output of {self.extraction.name}, "
                f"{list(logits.shape)}, is taken for an embedding, as no linear map with a bias gives it: choose a "
                "variant by name, or give images with labels if it is a classifier"
            )
        check_classes(
            self.extraction.name, logits, None if labels is None else torch.from_numpy(labels), self.images.images
        )
        return logits

    @cached_property
    def scanned(self) -> dict[str, list[dict[str, Any]]]:
        """For each site, for each candidate: {"loss"} when it stands there alone, or {"reason"}."""
        return self._kept("candidates alone", self._scan)

    def _scan(self) -> dict[str, list[dict[str, Any]]]:
        fitted, held_out, measuring = self._scan_images()
        extraction = self.extraction
        student = extraction.rewritten(self._softmax)
        meter = self.meter.of_images(measuring)
        found: dict[str, list[dict[str, Any]]] = {site.id: [] for site in extraction.sites}
        with placed(self.processes.device, extraction.original, extraction.teacher, student):
            given = StageInput(
                extraction.original, extraction.teacher, student, fitted, held_out, self.execution, self.processes
            )
            for trial in trials(given, extraction.sites, self.auto.candidates):
                output = trial.output
                whole = output is not None and bool(torch.isfinite(output).all())
                found[trial.site].append(
                    {"loss": asdict(meter.loss(output.cpu()))}
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
        return self.images.take(fitting), self.images.take(measuring), measuring

    @cached_property
    def timer(self) -> Timer | str:
        """How plans are timed, or why they are not."""
        target = self.auto.budget.target
        if target is None:
            return "no target was named (--for)"
        return timer_of(get_target(target), self._threads)

    @property
    def _threads(self) -> int:
        return self.execution.threads or 1

    @cached_property
    def costs(self) -> Costs:
        return Costs(**self._kept("costs", lambda: self._owners(lambda: asdict(self._costs()))))

    def _costs(self) -> Costs:
        if isinstance(self.timer, str):
            target = None if self.auto.budget.target is None else get_target(self.auto.budget.target)
            asked = self.extraction, self.auto.candidates
            if target is None:
                return estimated(*asked, self.timer)
            prices = priced(target, *asked, self.execution, self.timer)
            return prices if isinstance(prices, Costs) else estimated(*asked, f"{self.timer}; {prices.sentence}")
        return measured(self.timer, self.extraction, self.auto.candidates, self.execution)

    @cached_property
    def _cross_fit(self) -> CrossFit:
        return CrossFit(self.extraction, self.images, self.execution, self.processes)

    def _as_if_all(self, seen: np.ndarray, logits: Tensor) -> Loss:
        """What is lost if the images that were not measured lose as much as those `seen`, whose logits these are."""
        every = np.resize(np.arange(len(seen)), len(self.images.images))
        loss = self.meter.of_images(seen[every]).loss(logits[torch.from_numpy(every)])
        return replace(loss, images=len(seen))

    def _at_least(self, seen: np.ndarray, logits: Tensor) -> Loss:
        """What is lost if the images that were not measured lose nothing."""
        every = self.meter.original.clone()
        every[torch.from_numpy(seen)] = logits.to(every)
        return self.meter.loss(every)

    def loss(self, standing: Mapping[str, Variant]) -> Loss:
        """What the model loses with these variants at its sites, every image measured by a model not fitted to it; on a
        part of the images, and as if all were like those, where that is more than --max-drop allows even if the others
        lose nothing.
        """
        everywhere, budget = {**self._softmax, **standing}, self.auto.budget.max_drop

        def measure() -> dict[str, Any]:
            seen, logits = np.zeros(0, int), self.meter.original[:0]
            for numbers, found in self._cross_fit.outputs(everywhere):
                seen, logits = np.concatenate([seen, numbers]), torch.cat([logits, found])
                if budget is not None and self._at_least(seen, logits).bound > budget:
                    break
            return asdict(self._as_if_all(seen, logits))

        return Loss(**self._kept(f"loss of {self._described(standing)}", measure))

    def ratio(self, standing: Mapping[str, Variant]) -> float:
        """The cost of the model with these variants at its sites over the original's: timed, or from the costs."""
        timer = self.timer
        if isinstance(timer, str):
            candidates = self.auto.candidates
            return self.costs.ratio({site: 1 + candidates.index(variant) for site, variant in standing.items()})
        extraction = self.extraction

        def measure() -> float:
            converted = extraction.rewritten(standing)
            for site in rewritten_sites(converted).values():
                site.deploy()
            return timer.ratio(extraction.original, converted, extraction.example)

        return self._kept(f"time of {self._described(standing)}", lambda: self._owners(measure))

    @property
    def _softmax(self) -> dict[str, Variant]:
        return {site.id: get_variant("softmax") for site in self.extraction.sites}

    def _kept(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` found, now or before an interruption: for this model, these images, and what was asked."""
        file = f"selection {resume_key([], name)}"
        key = resume_key(self.extraction.teacher.state_dict().values(), *self._asked(), name)
        owner, state = self.processes.rank == 0, State(self.execution.state)
        found = self.processes.from_owner(state.load(file, key) if owner else None, 0)
        if found is None:
            found = {"found": find()}
            if owner:
                state.save(file, key, found)
        return found["found"]

    def _asked(self) -> tuple[object, ...]:
        names = [described(variant) for variant in self.auto.candidates]
        budget = self.auto.budget
        asked = (budget.max_drop, budget.max_latency, budget.target, self._threads)
        return names, asked, self.execution.seed, self.images.digest, [site.id for site in self.extraction.sites]

    def _owners(self, find: Callable[[], Any]) -> Any:
        """What the first process finds: times differ between processes, and all must choose alike."""
        return self.processes.from_owner(find() if self.processes.rank == 0 else None, 0)

    def _described(self, standing: Mapping[str, Variant]) -> list[tuple[str, str]]:
        return [(site, described(variant)) for site, variant in standing.items()]
