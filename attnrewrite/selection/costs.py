"""What each candidate costs at each site: timed on the target where this machine can, else as the target prices it (by
a model of its device's costs, by executed instructions), else a count of multiply-adds.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal, TypeVar

from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError, Refusal
from attnrewrite.evaluation.compare import CompareModel, cost
from attnrewrite.evaluation.latency import measure
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.verify import recorded, rewritten_sites
from attnrewrite.request import Execution
from attnrewrite.selection.problem import Extraction
from attnrewrite.site import AttentionSite
from attnrewrite.targets.base import Run, Target
from attnrewrite.targets.devices.host import Host
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

ROUNDS, BUDGET_S = 40, 60.0
WHOLE = "the whole model"

Call = Callable[[], object]


@dataclass(frozen=True)
class Costs:
    """For each site, the cost of softmax and then of each candidate (infinite where it has none), and the cost of the
    whole original, all in `unit`.

    `unit` is ms, multiply-adds, or what a target prices in (estimated time, instructions). `status` is measured or
    estimated, `how` says by what and, where it was not measured, why not.
    """

    status: Literal["measured", "estimated"]
    unit: str
    how: str
    whole: float
    sites: Mapping[str, tuple[float, ...]]

    def ratio(self, chosen: Mapping[str, int]) -> float:
        """The cost of the model with these candidates, over the original's."""
        saved = sum(self.sites[site][0] - self.sites[site][candidate] for site, candidate in chosen.items())
        return (self.whole - saved) / self.whole


@dataclass(frozen=True)
class Timer:
    """How a target is timed here: `prepare` makes a module ready to be called on its inputs in `runtime`."""

    target: str
    runtime: str
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Call]

    def ratio(self, original: nn.Module, converted: nn.Module, inputs: tuple[Tensor, ...]) -> float:
        """The median time of `converted` over that of `original`, timed in turns."""
        calls = {"original": self.prepare(original, inputs), "converted": self.prepare(converted, inputs)}
        found = measure(calls, repeats=ROUNDS, budget_s=BUDGET_S)
        return found["converted"].p50_ms / found["original"].p50_ms


def timer_of(target: Target, threads: int) -> Timer | str:
    """How `target` is timed on this machine, or why it cannot be.

    On the host that is onnxruntime, where it is installed, else torch; on another target its first runtime that runs.
    """
    if isinstance(target, Host):
        if find_spec("onnxruntime") and find_spec("onnxscript"):
            onnx = lambda module, inputs: onnx_runtime.prepare(module, inputs, threads)[0]  # noqa: E731
            return Timer(target.name, "onnxruntime", onnx)
        return Timer(target.name, "torch eager", lambda module, inputs: _first_run(target, module, inputs, threads))
    reason = target.availability().measure
    if reason is not None:
        return reason.sentence
    return Timer(target.name, target.name, lambda module, inputs: _first_run(target, module, inputs, threads))


def estimated(extraction: Extraction, candidates: Sequence[Variant], why: str) -> Costs:
    """Multiply-adds for one image. Those of the whole original are counted on the teacher, where softmax is written out
    and nothing hides in a fused operator; `why` says why no time is measured.
    """
    _, whole = cost(CompareModel("the original", extraction.teacher, extraction.example))
    variants = (get_variant("softmax"), *candidates)
    columns = {
        site.id: tuple(math.inf if variant.refuse(site) else float(variant.multiplies(site)) for variant in variants)
        for site in extraction.sites
    }
    return Costs("estimated", "multiply-adds", f"multiply-adds for one image; {why}", float(whole), columns)


def measured(timer: Timer, extraction: Extraction, candidates: Sequence[Variant], execution: Execution) -> Costs:
    """Each site's module by itself, with softmax and with every candidate, on what it reads for the example input; and
    the whole original. All take turns. Sites of the same sizes share their times.
    """
    ready, names = _ready(timer.prepare, extraction, candidates, execution)
    found = measure(ready, repeats=ROUNDS, budget_s=BUDGET_S, progress=partial(execution.report, "measure"))
    how = f"median times on {timer.target} ({timer.runtime}), each site's module by itself, all in turns"
    times = {name: latency.p50_ms for name, latency in found.items()}
    return Costs("measured", "ms", how, times[WHOLE], _columns(names, times))


def priced(
    target: Target, extraction: Extraction, candidates: Sequence[Variant], execution: Execution, why: str
) -> Costs | Refusal:
    """The same modules as the target prices them, or why it does not. `why` says why they are not timed."""
    pricing = target.pricing()
    if isinstance(pricing, Refusal):
        return pricing
    try:
        prices, names = _ready(pricing.of, extraction, candidates, execution)
    except InputError as error:
        return Refusal("no-prices", f"{pricing.how}: {error}")
    how = f"{pricing.how}, each site's module by itself; {why}"
    return Costs("estimated", pricing.unit, how, prices[WHOLE], _columns(names, prices))


Found = TypeVar("Found")


def _ready(
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Found],
    extraction: Extraction,
    candidates: Sequence[Variant],
    execution: Execution,
) -> tuple[dict[str, Found], dict[str, list[str | None]]]:
    """What `prepare` makes of the whole original and of each site's module with softmax and with every candidate, by
    names that sites of the same sizes share; and these names for each site, None where a candidate does not stand.
    """
    with recorded(extraction.teacher) as calls:
        extraction.teacher(*extraction.example)
    modules = rewritten_sites(extraction.teacher)
    ready = {WHOLE: prepare(extraction.original, extraction.example)}
    names: dict[str, list[str | None]] = {}
    for done, site in enumerate(extraction.sites, 1):
        given = calls[site.id][0]
        names[site.id] = []
        for number, variant in enumerate((None, *candidates)):
            if variant is not None and variant.refuse(site):
                names[site.id].append(None)
                continue
            name = f"{number} at {_sizes(site, given)}"
            if name not in ready:
                made = _prepared(prepare, modules[site.id], site, variant, given)
                if made is not None:
                    ready[name] = made
            names[site.id].append(name if name in ready else None)
        execution.report("build", done, len(extraction.sites))
    return ready, names


def _columns(names: Mapping[str, list[str | None]], costs: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    return {site: tuple(math.inf if name is None else costs[name] for name in row) for site, row in names.items()}


def _prepared(
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Found],
    module: SiteModule,
    site: AttentionSite,
    variant: Variant | None,
    given: tuple[Tensor, ...],
) -> Found | None:
    """The site's module with `variant` (softmax: None), prepared; None where the target cannot take it."""
    alone = copy.deepcopy(module).eval()
    if variant is not None:
        alone.form = variant.build(site).eval()
    alone.deploy()
    try:
        return prepare(alone, given)
    except AttnRewriteError:
        if variant is None:
            raise
        return None


def _sizes(site: AttentionSite, given: tuple[Tensor, ...]) -> tuple[object, ...]:
    """What a site's time depends on."""
    shapes = tuple(tuple(tensor.shape) for tensor in given)
    return site.heads, site.head_dim, site.value_dim, site.n_queries, site.n_keys, site.windows, site.grid, shapes


def _first_run(target: Target, module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> Call:
    runs: tuple[Run, ...] = target.runs("a site", module, inputs, threads=threads)
    for run in runs:
        if run.call is not None:
            return run.call
    raise InputError(f"{target.name} runs nothing here: {'; '.join(str(run.reason) for run in runs)}")
