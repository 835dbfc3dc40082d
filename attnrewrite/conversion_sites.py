"""Which sites of a model are converted, why the others are not, and what report.json says of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from attnrewrite.errors import NothingMatchedError, unknown_name
from attnrewrite.select_budget import Auto
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, option_values


def fates_of(found: Scan, variant: Variant | Auto, kept: frozenset[str]) -> dict[str, str | None]:
    """For each site, why it stays as it is, or None when it is converted (with auto: may be)."""
    return {site.id: "kept on request" if site.id in kept else refusal(variant, site) for site in found.sites}


def refusal(variant: Variant | Auto, site: AttentionSite) -> str | None:
    """Why `variant`, or each of the candidates of `auto`, cannot stand at `site`; None when it can."""
    if not isinstance(variant, Auto):
        return variant.refuse(site)
    if reason := get_variant("softmax").refuse(site):
        return reason
    reasons = [candidate.refuse(site) for candidate in variant.candidates]
    return None if None in reasons else f"no candidate can stand there ({reasons[0]})"


def kept_sites(found: Scan, keep: Sequence[str]) -> frozenset[str]:
    by_name = {site.id: site.id for site in found.sites} | {site.name: site.id for site in found.sites}
    for name in keep:
        if name not in by_name:
            raise unknown_name("site to keep", name, by_name)
    return frozenset(by_name[name] for name in keep)


def require_some(
    found: Scan, chosen: list[AttentionSite], variant: Variant | Auto, fates: Mapping[str, str | None]
) -> None:
    if chosen:
        return
    if not found.sites:
        misses = (
            "; ".join(f"{m.name}: {m.detail}" for m in found.near_misses[:5]) or "no softmax and no attention operator"
        )
        raise NothingMatchedError(f"{found.model} has no attention to rewrite ({misses}); see attnrewrite explain")
    reasons = "; ".join(f"{site}: {reason}" for site, reason in list(fates.items())[:3])
    raise NothingMatchedError(
        f"{variant.name} can stand at none of the {len(found)} sites of {found.model} ({reasons}); "
        "choose another variant"
    )


def site_report(
    site: AttentionSite, fate: str | None, variant: Variant | None, identity: float | None, arithmetic: float | None
) -> dict[str, Any]:
    softmax = get_variant("softmax")
    stands = variant or softmax
    return {
        "id": site.id,
        "name": site.name,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "n_queries": site.n_queries,
        "n_keys": site.n_keys,
        "variant": stands.name,
        "options": option_values(stands) if variant else {},
        "note": f"stays as it is: {fate}" if variant is None else variant.note(site),
        "multiplies": stands.multiplies(site),
        "multiplies_softmax": softmax.multiplies(site),
        "identity_error": identity,
        "float64_error": arithmetic,
    }
