"""What passes that carry out a plan share: a scan that is made once, whether the plan fits, and the sites' modules."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from attnrewrite.errors import InputError, Refusal, told
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.site_module import SiteModule, build_site
from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.plan import Placement, Plan, misfit
from attnrewrite.site import AttentionSite, OutputProjection, Projection, Scan
from attnrewrite.variants.base import FollowUp, refusal_of

log = logging.getLogger("attnrewrite")

G = TypeVar("G")
V = TypeVar("V", bound=GraphView)

Precision = Callable[[SiteModule, AttentionSite], torch.dtype]  # what a graph computes a site in

# What to say where a follow-up changed nothing: who asked for it would take the model for the paper's.
_NOTHING_FOUND: dict[FollowUp, str] = {
    "relu-for-gelu": "%s: relu=true finds no GELU behind the attention: no activation is changed there",
}


@dataclass(frozen=True)
class SiteEdit(Edit):
    """One site rewritten: the value that was replaced, and the module that makes it now."""

    site: str = ""

    @property
    def module(self) -> str:
        assert self.by is not None
        return self.by


@dataclass(frozen=True)
class PlanPass(Pass[G], Generic[G, V]):
    """A pass that carries out `plan`. `scanned` is the graph as it was scanned; without it, the pass scans it, once."""

    plan: Plan
    scanned: Scanned[V] | None = None

    def scan(self, graph: G) -> Scanned[V]:
        """The graph and its attention."""
        raise NotImplementedError

    def joined(self, graph: G) -> tuple[G, Scanned[V]]:
        """The graph with the heads joined that the plan has joined, and its attention."""
        return graph, self.scan(graph)

    def fitted(self, found: Scan) -> Plan:
        """The plan with its placements at this graph's sites."""
        return self.plan

    def known(self, graph: G) -> Scanned[V]:
        """What was found in the graph, now or before."""
        return self.scan(graph) if self.scanned is None else self.scanned

    def requires(self, graph: G) -> Refusal | None:
        """That the graph has the plan's sites, by their weights, and that every variant can stand at its own."""
        found = self.known(graph).scan
        plan = self.fitted(found)
        refusal = misfit(plan, found)
        if refusal is not None:
            return refusal
        sites = {site.id: site for site in found.sites}
        reasons = (_no_place(placement, sites[placement.site]) for placement in plan.placements)
        return next((reason for reason in reasons if reason is not None), None)

    def apply(self, graph: G) -> PassResult[G]:
        """As every pass, the graph scanned once. Raises as `Pass.apply` does."""
        if self.scanned is None:
            graph, scanned = self.joined(graph)
            return replace(self, scanned=scanned).apply(graph)
        return super().apply(graph)


def _no_place(placement: Placement, site: AttentionSite) -> Refusal | None:
    reason = refusal_of(placement.variant, site)
    if reason is None:
        return None
    name = placement.variant.name
    return Refusal(
        "refused-site",
        f"has a site that the variant refuses: {name} cannot stand at {site.id} ({site.name}): it {reason}; "
        "keep that site, or choose another variant",
        site=site.id,
    )


def place(graph: GraphView, site: AttentionSite, placement: Placement, precision: Precision) -> SiteModule:
    """The module of one placement in the graph's precision there, with the plan's weights where it has any.

    Raises:
        InputError: the plan's weights do not fit the site.
        CheckFailedError: the variant fails to build its form.
    """
    site = _as_planned(site, placement)
    try:
        form = placement.variant.build(site)
    except Exception as error:  # a variant of another package raises what it likes
        raise told(f"variant {placement.variant.name!r} at {site.id}", error, site=site.id) from error
    rewritten = build_site(graph, site, form).eval()
    rewritten.to(precision(rewritten, site))  # constants were read as float32 or wider
    rewritten.settle()
    if placement.weights:
        try:
            rewritten.load_state_dict(dict(placement.weights), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:300]
            raise InputError(
                f"the plan's weights do not fit {site.id} ({site.name}): {detail}; convert again", site=site.id
            ) from error
    return rewritten


def _as_planned(site: AttentionSite, placement: Placement) -> AttentionSite:
    """`site` with those projections inside it that the plan has weights for: what images share, as learned queries, one
    graph projects once outside it, and another for each image.
    """
    shown = {role: getattr(site, role) for role in ("query", "key", "value", "output")}
    outside: dict[str, Any] = {
        role: replace(part, direct=False)
        for role, part in shown.items()
        if isinstance(part, Projection | OutputProjection) and f"{role}.weight" not in placement.weights
    }
    return replace(site, **outside) if placement.weights else site


def tell_of_nothing_found(site: str, asked: FollowUp, edits: tuple[Edit, ...]) -> None:
    """Say where what a variant asks for around its site changed nothing."""
    if not edits:
        log.warning(_NOTHING_FOUND[asked], site)
