"""Which sites of a model are converted, why the others are not, and what reports say of each."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnrewrite.conversion.record import site_notes
from attnrewrite.errors import InputError, NothingMatchedError, Refusal, unknown_name
from attnrewrite.passes.verify import SiteError
from attnrewrite.patterns.weights import pick
from attnrewrite.plan import Placement, Plan
from attnrewrite.request import names
from attnrewrite.selection.problem import Auto
from attnrewrite.site import AttentionSite, Grid, Scan
from attnrewrite.variants.base import Variant, refusal_of
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.registry import get_variant, option_values

_OTHERWISE = Refusal("other-in-file", "the file shows other maps around it than the graph that it is imported as")


def as_in_file(found: Scan, own: Scan | None) -> Scan:
    """`found` in the graph that a file was imported as, with what the file's `own` graph calls the sites of the same
    weights; and without a core, or a grid, that is not seen in the file: no form that needs it could be written there.
    """
    if own is None:
        return found
    free, sites = list(own.sites), []
    for site in found.sites:
        same = pick(site.id, site.fingerprint, free)
        if same is not None:
            free.remove(same)
            site = replace(site, name=same.name, grid=site.grid if same.grid else None)
        reason = _OTHERWISE if same is None else same.core_reason if same.core is None else None
        sites.append(site if reason is None or site.core is None else replace(site, core=None, core_reason=reason))
    return replace(found, sites=tuple(sites))


def fates_of(found: Scan, variant: Variant | Auto, kept: frozenset[str]) -> dict[str, Refusal | None]:
    """For each site, why it stays as it is, or None when it is converted (with auto: may be)."""
    on_request = Refusal("kept", "kept on request")
    return {site.id: on_request if site.id in kept else refusal(variant, site) for site in found.sites}


def refusal(variant: Variant | Auto, site: AttentionSite) -> Refusal | None:
    """Why `variant`, or each of the candidates of `auto`, cannot stand at `site`; None when it can."""
    if not isinstance(variant, Auto):
        return refusal_of(variant, site)
    if reason := get_variant("softmax").refuse(site):
        return reason
    reasons = [refusal_of(candidate, site) for candidate in variant.candidates]
    return None if None in reasons else Refusal("no-candidate", f"no candidate can stand there ({reasons[0]})")


def kept_sites(found: Scan, keep: str | Sequence[str] | None) -> frozenset[str]:
    """The ids of the sites to keep: each of `keep` is an id, a name, or a pattern of either (decoder.*).

    Raises:
        InputError: one of them is none of the sites.
    """
    known = {site.id: {site.id} for site in found.sites}
    for site in found.sites:  # heads that a loop computes share the name of their module
        known.setdefault(site.name, set()).add(site.id)
    kept: set[str] = set()
    for asked in names("--keep", keep):
        matching = [asked] if asked in known else fnmatch.filter(known, asked)
        if not matching:
            raise unknown_name("site to keep", asked, known)
        kept = kept.union(*(known[name] for name in matching))
    return frozenset(kept)


def groups_without(found: Scan, kept: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """The members of each group of heads of which none is kept, by the group's id."""
    return {group.id: group.members for group in found.groups if kept.isdisjoint(group.members)}


def require_grid(found: Scan, variant: Variant | Auto) -> None:
    """Raise InputError where a grid was told (--option grid=...) of a number of tokens that no site has."""
    variants = variant.candidates if isinstance(variant, Auto) else (variant,)
    counts = sorted({site.n_queries for site in found.sites if site.axis == "token"})
    for grid in (Grid.parse(each.grid) for each in variants if isinstance(each, LinearVariant) and each.grid):
        if counts and grid.tokens not in counts:
            raise InputError(
                f"grid={grid} is of {grid.tokens} tokens, and the attention of {found.model} has "
                f"{' or '.join(map(str, counts))}: tell the grid of one of these"
            )


def require_some(
    found: Scan, chosen: list[AttentionSite], variant: Variant | Auto, fates: Mapping[str, Refusal | None]
) -> None:
    if chosen:
        return
    if not found.sites:
        misses = "; ".join(f"{m.name}: {m}" for m in found.near_misses[:5]) or "no softmax and no attention operator"
        raise NothingMatchedError(f"{found.model} has no attention to rewrite ({misses}); see attnrewrite explain")
    raise NothingMatchedError(
        f"{variant.name} can stand at none of the {len(found)} sites of {found.model} ({_by_reason(fates)}): "
        "choose another variant, or options of it that help (--option KEY=VALUE)",
        site=found.sites[0].id if len(found) == 1 else None,
    )


def _by_reason(fates: Mapping[str, Refusal | None]) -> str:
    """'site0, site2, ...: why; site1: why', each reason once."""
    sites_by_reason: dict[str, list[str]] = {}
    for site, reason in fates.items():
        sites_by_reason.setdefault(str(reason), []).append(site)
    return "; ".join(
        f"{', '.join(sites[:3])}{', ...' if len(sites) > 3 else ''}: {reason}"
        for reason, sites in sites_by_reason.items()
    )


def site_report(
    site: AttentionSite,
    fate: Refusal | None,
    variant: Variant | None,
    identity: SiteError | None,
    arithmetic: float | None,
) -> dict[str, Any]:
    softmax = get_variant("softmax")
    stands = variant or softmax
    return {
        "id": site.id,
        "name": site.name,
        "members": list(site.members),
        "heads": site.heads,
        "head_dim": site.head_dim,
        "n_queries": site.n_queries,
        "n_keys": site.n_keys,
        "variant": stands.name,
        "options": option_values(stands) if variant else {},
        "note": f"stays as it is: {fate}" if variant is None else variant.note(site),
        "multiplies": stands.multiplies(site),
        "multiplies_softmax": softmax.multiplies(site),
        "identity_error": identity.error if identity is not None and math.isfinite(identity.error) else None,
        "float64_error": arithmetic,
    }


def planned_sites(folder: Path, found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The sites of a converted folder: those of its plan, and those of `found` that the plan leaves as they were.

    Sites are numbered in the order of the original's graph: the numbers that the plan does not take are the others', in
    their order. The remarks are the report's, which alone has them.
    """
    replaced = [site_facts(each, each.site, each.variant.name) for each in Plan.load(folder).placements]
    taken_names = {site["name"] for site in replaced}  # exact rows of a form are found again, under their site's name
    kept = [site for site in found if site["name"] not in taken_names]
    taken = {site["id"] for site in replaced}
    free = [name for name in (f"site{n}" for n in range(len(replaced) + len(kept))) if name not in taken]
    sites = replaced + [{**site, "id": name} for site, name in zip(kept, free, strict=False)]
    notes = site_notes(folder)
    ordered = sorted(sites, key=lambda site: int(site["id"].removeprefix("site")))
    return tuple({**site, "note": notes.get(site["id"])} for site in ordered)


def site_facts(site: AttentionSite | Placement, site_id: str, variant: str) -> dict[str, Any]:
    """A site as comparisons list it, with what stands there."""
    sizes = {key: getattr(site, key) for key in ("heads", "head_dim", "n_queries", "n_keys")}
    return {"id": site_id, "name": site.name, **sizes, "variant": variant, "note": None}
