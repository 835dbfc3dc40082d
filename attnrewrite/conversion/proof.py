"""What is proven of a model before anything is replaced: it is its graph, and softmax re-emitted is its attention."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError
from attnrewrite.frontends.capture import Captured
from attnrewrite.frontends.sources import Source
from attnrewrite.passes.draws import Draw, drawn, in_one_batch
from attnrewrite.passes.fx.rewrite import with_variants
from attnrewrite.passes.in_batches import InBatches
from attnrewrite.passes.original import CheckedStateless, agreement
from attnrewrite.passes.roundings import rewriting_error
from attnrewrite.passes.verify import SiteError, compared_values, site_errors
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.request import Progress
from attnrewrite.site import AttentionSite
from attnrewrite.variants.registry import get_variant


@dataclass(frozen=True)
class Proof:
    """`teacher` is the original with softmax re-emitted at the sites that proved right; `faults` say what is wrong at
    the others, by site id. `errors` are of all sites, `report` what report.json says of the checks.
    """

    teacher: GraphModule
    errors: Mapping[str, SiteError]
    faults: Mapping[str, str]
    draws: tuple[Draw, ...]
    report: Mapping[str, Any]


def prove(
    source: Source,
    captured: Captured,
    scanned: Scanned[FxGraph],
    sites: Sequence[AttentionSite],
    keep_bad: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Check the captured graph against the model, then each of `sites`, on the example and on inputs drawn beside it.

    Raises:
        CheckFailedError: the graph is not the model; a site is not what was extracted (with `keep_bad`: every one).
        InputError: the model is not a function of its inputs alone, or takes none of the inputs drawn.
    """
    graph, teacher = scanned.graph.module, with_softmax(scanned, sites)
    started = time.perf_counter()
    model: nn.Module = CheckedStateless(source.name, _runnable(source))
    if captured.models_batch is not None:
        model = InBatches(model, captured.models_batch, scanned.graph.image_axes)
    values = compared_values(teacher, scanned.scan)
    draws = in_one_batch(drawn(graph, source.example_inputs))
    agreed = agreement(source.name, model, graph, draws, values, partial(progress, "check the graph"))
    errors = site_errors(graph, teacher, scanned.scan, agreed.runs, partial(progress, "check the sites"))
    faults = {site: each.fault for site, each in errors.items() if each.fault is not None}
    if faults and (not keep_bad or len(faults) == len(sites)):
        site, fault = next(iter(faults.items()))
        raise CheckFailedError(fault, site=site)
    if faults:
        teacher = with_softmax(scanned, [site for site in sites if site.id not in faults])
    rewriting = rewriting_error(graph, teacher, agreed.runs[-1])
    taken = tuple(run.draw for run in agreed.runs)
    report = {
        "seconds": round(time.perf_counter() - started, 3),
        "draws": [draw.name for draw in taken],
        "draws_refused": dict(agreed.refused),
        "graph_error": agreed.error,
        "rewriting_error": rewriting,
    }
    return Proof(teacher, errors, faults, taken, report)


def with_softmax(scanned: Scanned[FxGraph], sites: Sequence[AttentionSite]) -> GraphModule:
    """The captured model with softmax re-emitted at `sites`: to be read alone, as it shares its weights."""
    return with_variants(scanned, dict.fromkeys([site.id for site in sites], get_variant("softmax")), Tensor.detach)


def _runnable(source: Source) -> nn.Module:
    if source.model is not None:
        return source.model
    assert source.program is not None
    return source.program.module(check_guards=False)
