"""What a variant is: a frozen dataclass whose fields are a form's options, and the sites that the form honours.

The form itself, a torch module on the heads' queries, keys and values, follows `parts.form.Form`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from attnrewrite.errors import Refusal, first_line
from attnrewrite.plugins import OWN
from attnrewrite.site import AttentionSite
from attnrewrite.variants.parts.form import Form, Heads, received, summed_with

__all__ = [
    "FollowUp",
    "Form",
    "Heads",
    "Variant",
    "as_refusal",
    "received",
    "refusal_of",
    "refuse_unequal",
    "refuse_unless_plain",
    "refuse_unpaired",
    "refuse_without_core",
    "summed_with",
]


# What a form may ask for around its site, which the pass that rewrites the graph carries out there: ReLU in place of
# the GELUs of the MLP behind it (SimA, section 4).
FollowUp = Literal["relu-for-gelu"]


@dataclass(frozen=True)
class Variant:
    """A published attention form with its options (the dataclass fields). Subclasses set `name` and `summary`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]

    def refuse(self, site: AttentionSite) -> Refusal | None:
        """Why this variant cannot stand at `site`, or None when it can. To ask any variant, see `refusal_of`."""
        raise NotImplementedError

    def build(self, site: AttentionSite) -> Form:
        """A form for `site`, with the constants that a plain weight copy gives it."""
        raise NotImplementedError

    def note(self, site: AttentionSite) -> str | None:
        """What the form leaves out at `site` beyond its own approximation, as a sentence; None when nothing."""
        return None

    def uncalibrated(self) -> "Variant":
        """The variant without what calibration alone would fill."""
        return self

    def follow_ups(self) -> tuple[FollowUp, ...]:
        """What is to change around every site that the form takes."""
        return ()

    def multiplies(self, site: AttentionSite) -> int:
        """Multiply-adds of the form at `site` for one image, projections excluded."""
        raise NotImplementedError


def refusal_of(variant: Variant, site: AttentionSite) -> Refusal | None:
    """What `variant` answers at `site`; variants of other packages may answer with a sentence alone, or fail."""
    try:
        return as_refusal(variant.refuse(site))
    except Exception as error:
        if type(variant).__module__.partition(".")[0] == OWN:
            raise
        why = f"its variant fails when it is asked ({type(error).__name__}: {first_line(error)}): mend its package"
        return Refusal("variant-failed", why)


def as_refusal(answer: Refusal | str | None) -> Refusal | None:
    """An answer whose refusal may be a sentence alone, which has the code "refused"."""
    return Refusal("refused", answer) if isinstance(answer, str) else answer


def refuse_unpaired(site: AttentionSite) -> Refusal | None:
    """The refusal of forms that meet query and key (or value) token by token, as the published self-attention does."""
    if site.n_queries != site.n_keys:
        why = "pairs each query with the key of the same token, and there are not as many of both"
        return Refusal("unpaired-counts", why)
    if site.kind == "cross":
        why = "pairs each query with the key of the same token, and they are of different tokens"
        return Refusal("unpaired-tokens", why)
    return None


def refuse_unequal(site: AttentionSite) -> Refusal | None:
    """The refusal of forms that meet query, key and value channel by channel."""
    if site.head_dim != site.value_dim:
        why = f"meets key and value channel by channel, and they have {site.head_dim} and {site.value_dim}"
        return Refusal("unequal-channels", why)
    return None


def refuse_without_core(site: AttentionSite) -> Refusal | None:
    """The refusals that every form shares, softmax included: what cannot be taken out of the graph."""
    if site.talking_heads:
        return Refusal("talking-heads", "mixes the heads' scores or probabilities")
    if site.probs_escape:
        return Refusal("probabilities-escape", "its probabilities are used elsewhere in the model")
    if site.core is None and site.core_reason is not None:
        return Refusal(site.core_reason.code, f"cannot be taken out of the graph: {site.core_reason}")
    if site.core is None:
        known = site.core_reason
        return Refusal("no-core", str(known or "its query, key and value could not be told apart in the graph"))
    return None


def refuse_unless_plain(site: AttentionSite) -> Refusal | None:
    """The refusals that every linear form shares: what it has no place for."""
    if site.axis != "token":
        return Refusal("over-channels", "attends over channels, not over tokens")
    if site.talking_heads or site.probs_escape:
        return refuse_without_core(site)
    if site.causal:
        return Refusal("causal-mask", "has a causal mask")
    if site.bias == "depends-on-query":
        return Refusal("bias-depends-on-query", "adds a bias that depends on the query")
    return refuse_without_core(site)
