"""What every pass shares: a plan made into modules, and what a pass reports of its edits."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnrewrite.errors import InputError
from attnrewrite.passes.site_module import SiteModule, build_site
from attnrewrite.patterns.graph import GraphView
from attnrewrite.plan import Placement
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import refusal_of

log = logging.getLogger("attnrewrite")


@dataclass(frozen=True)
class Edit:
    """One site rewritten: the value that was replaced and the module that makes it now."""

    site: str
    replaced: str
    module: str


Precision = Callable[[SiteModule, AttentionSite], torch.dtype]  # what a graph computes a site in


def tell_of_gelus(site: str, replaced: int) -> None:
    """Say where relu=true changed nothing: who asked for it would take the model for SimA's."""
    if not replaced:
        log.warning("%s: relu=true finds no GELU behind the attention: no activation is changed there", site)


def place(graph: GraphView, site: AttentionSite, placement: Placement, precision: Precision) -> SiteModule:
    """The module of one placement in the graph's precision there, with the plan's weights where it has any.

    Raises:
        InputError: the variant refuses the site, or the plan's weights do not fit it.
    """
    reason = refusal_of(placement.variant, site)
    if reason is not None:
        raise InputError(
            f"{placement.variant.name} cannot stand at {site.id} ({site.name}): it {reason}; "
            "keep that site, or choose another variant"
        )
    rewritten = build_site(graph, site, placement.variant.build(site)).eval()
    rewritten.to(precision(rewritten, site))  # constants were read as float32 or wider
    if placement.weights:
        try:
            rewritten.load_state_dict(dict(placement.weights), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:300]
            raise InputError(
                f"the plan's weights do not fit {site.id} ({site.name}): {detail}; convert again"
            ) from error
    return rewritten
