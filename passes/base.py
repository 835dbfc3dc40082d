"""What every pass shares: a plan made into modules, and what a pass reports of its edits."""

from dataclasses import dataclass

from attnrewrite.errors import InputError
from attnrewrite.passes.rewritten import RewrittenSite, build_site
from attnrewrite.patterns.graph import GraphView
from attnrewrite.plan import Placement
from attnrewrite.site import AttentionSite


@dataclass(frozen=True)
class Edit:
    """One site rewritten: the value that was replaced and the module that makes it now."""

    site: str
    replaced: str
    module: str


def place(graph: GraphView, site: AttentionSite, placement: Placement) -> RewrittenSite:
    """The module of one placement, with the plan's weights where it has any.

    Raises:
        InputError: the variant refuses the site, or the plan's weights do not fit it.
    """
    reason = placement.variant.refuse(site)
    if reason is not None:
        raise InputError(
            f"{placement.variant.name} cannot stand at {site.id} ({site.name}): it {reason}; "
            "keep that site, or choose another variant"
        )
    rewritten = build_site(graph, site, placement.variant.build(site)).eval()
    if placement.weights:
        try:
            rewritten.load_state_dict(dict(placement.weights), strict=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:300]
            raise InputError(
                f"the plan's weights do not fit {site.id} ({site.name}): {detail}; convert again"
            ) from error
    return rewritten
