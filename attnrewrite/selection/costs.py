"""What each candidate costs at each site: timed on the target where this machine can, else a count of multiply-adds."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import AttnRewriteError, InputError
from attnrewrite.evaluation.compare import CompareModel, cost
from attnrewrite.evaluation.latency import measure
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.verify import recorded, rewritten_sites
from attnrewrite.site import AttentionSite
from attnrewrite.targets.base import Run, Target
from attnrewrite.targets.devices.host import Host
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.variants.base import Variant

ROUNDS, BUDGET_S = 40, 60.0
WHOLE = "the whole model"

Call = Callable[[], object]


@dataclass(frozen=True)
class Costs:
    """For each site, the cost of softmax and then of each candidate (infinite where it has none), and the cost of the
    whole original, all in `unit`.

    `status` is measured or estimated, `how` says by what and, where it was not measured, why not.
    """

    status: Literal["measured", "estimated"]
    unit: Literal["ms", "multiply-adds"]
    how: str
    whole: float
    sites: Mapping[str, tuple[float, ...]]

    def ratio(self, chosen: Mapping[str, int]) -> float:
        """The cost of the model with these candidates, over the original's."""
        saved = sum(self.sites[site][0] - self.sites[site][candidate] for site, candidate in chosen.items())
        return (self.whole - saved) / self.whole


@dataclass(frozen=True)
class Bench:
    """What can be timed here for a target: `call` makes a module ready to run in the runtime `name`."""

    name: str
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Call]

    def ratio(self, original: nn.Module, converted: nn.Module, inputs: tuple[Tensor, ...]) -> float:
        """The median time of `converted` over that of `original`, timed in turns."""
        calls = {"original": self.prepare(original, inputs), "converted": self.prepare(converted, inputs)}
        found = measure(calls, repeats=ROUNDS, budget_s=BUDGET_S)
        return found["converted"].p50_ms / found["original"].p50_ms


def bench(target: Target, threads: int) -> Bench | str:
    """How `target` is timed on this machine, or why it cannot be.

    On the host that is onnxruntime, where it is installed, else torch; on another target its first runtime that runs.
    """
    if isinstance(target, Host):
        if find_spec("onnxruntime") and find_spec("onnxscript"):
            return Bench("onnxruntime", lambda module, inputs: onnx_runtime.prepare(module, inputs, threads)[0])
        return Bench("torch eager", lambda module, inputs: _first_run(target, module, inputs, threads))
    reason = target.availability().measure
    if reason is not None:
        return reason.sentence
    return Bench(target.name, lambda module, inputs: _first_run(target, module, inputs, threads))


def estimated(
    teacher: GraphModule,
    inputs: tuple[Tensor, ...],
    sites: Sequence[AttentionSite],
    candidates: Sequence[Variant],
    softmax: Variant,
    why: str,
) -> Costs:
    """Multiply-adds for one image; `teacher` is the original with softmax written out, so that all of it is counted."""
    _, whole = cost(CompareModel("the original", teacher, inputs))
    columns = {
        site.id: tuple(
            math.inf if variant.refuse(site) else float(variant.multiplies(site)) for variant in (softmax, *candidates)
        )
        for site in sites
    }
    return Costs("estimated", "multiply-adds", f"multiply-adds for one image; {why}", float(whole), columns)


def measured(
    timing: Bench,
    target: str,
    original: GraphModule,
    teacher: GraphModule,
    inputs: tuple[Tensor, ...],
    sites: Sequence[AttentionSite],
    candidates: Sequence[Variant],
    progress: Callable[[str, int, int], None] | None = None,
) -> Costs:
    """Each site's module by itself, with softmax and with every candidate, on what it reads for `inputs`; and the whole
    original. All take turns. Sites of the same sizes share their times.
    """
    with recorded(teacher) as calls:
        teacher(*inputs)
    modules = rewritten_sites(teacher)
    ready: dict[str, Call] = {WHOLE: timing.prepare(original, inputs)}
    names: dict[str, list[str | None]] = {}
    for done, site in enumerate(sites, 1):
        given = calls[site.id][0]
        names[site.id] = []
        for number, variant in enumerate((None, *candidates)):
            if variant is not None and variant.refuse(site):
                names[site.id].append(None)
                continue
            name = f"{number} at {_sizes(site, given)}"
            if name not in ready:
                call = _prepared(timing, modules[site.id], site, variant, given)
                if call is not None:
                    ready[name] = call
            names[site.id].append(name if name in ready else None)
        if progress is not None:
            progress("build", done, len(sites))
    rounds = None if progress is None else lambda done, total: progress("measure", done, total)
    found = measure(ready, repeats=ROUNDS, budget_s=BUDGET_S, progress=rounds)
    columns = {
        site: tuple(math.inf if name is None else found[name].p50_ms for name in row) for site, row in names.items()
    }
    how = f"median times on {target} ({timing.name}), each site's module by itself, all in turns"
    return Costs("measured", "ms", how, found[WHOLE].p50_ms, columns)


def _prepared(
    timing: Bench, module: SiteModule, site: AttentionSite, variant: Variant | None, given: tuple[Tensor, ...]
) -> Call | None:
    """The site's module with `variant` (softmax: None), ready to run; None where the runtime cannot take it."""
    alone = copy.deepcopy(module).eval()
    if variant is not None:
        alone.form = variant.build(site).eval()
    alone.deploy()
    try:
        return timing.prepare(alone, given)
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
