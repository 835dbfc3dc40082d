"""What a variant is: a frozen dataclass whose fields are a form's options, and the sites that the form honours.

The form itself, a torch module on the heads' queries, keys and values, follows `parts.form.Form`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from attnrewrite.site import AttentionSite
from attnrewrite.variants.parts.form import Form, Heads, received, summed_with

__all__ = [
    "FollowUp",
    "Form",
    "Heads",
    "Variant",
    "received",
    "refuse_unequal",
    "refuse_unless_plain",
    "refuse_unpaired",
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

    def refuse(self, site: AttentionSite) -> str | None:
        """Why this variant cannot stand at `site`, or None when it can."""
        raise NotImplementedError

    def build(self, site: AttentionSite) -> Form:
        """A form for `site`, with the constants that a plain weight copy gives it."""
        raise NotImplementedError

    def note(self, site: AttentionSite) -> str | None:
        """What the form leaves out at `site` beyond its own approximation, as a sentence; None when nothing."""
        return None

    def follow_ups(self) -> tuple[FollowUp, ...]:
        """What is to change around every site that the form takes."""
        return ()

    def multiplies(self, site: AttentionSite) -> int:
        """Multiply-adds of the form at `site` for one image, projections excluded."""
        raise NotImplementedError


def refuse_unpaired(site: AttentionSite) -> str | None:
    """The refusal of forms that meet query and key (or value) token by token, as the published self-attention does."""
    if site.n_queries != site.n_keys:
        return "pairs each query with the key of the same token, and there are not as many of both"
    if site.kind == "cross":
        return "pairs each query with the key of the same token, and they are of different tokens"
    return None


def refuse_unequal(site: AttentionSite) -> str | None:
    """The refusal of forms that meet query, key and value channel by channel."""
    if site.head_dim != site.value_dim:
        return f"meets key and value channel by channel, and they have {site.head_dim} and {site.value_dim}"
    return None


def refuse_unless_plain(site: AttentionSite) -> str | None:
    """The refusals that every linear form shares: what it has no place for."""
    if site.axis != "token":
        return "attends over channels, not over tokens"
    if site.talking_heads:
        return "mixes the heads' scores or probabilities"
    if site.probs_escape:
        return "its probabilities are used elsewhere in the model"
    if site.causal:
        return "has a causal mask"
    if site.bias == "depends-on-query":
        return "adds a bias that depends on the query"
    if site.core is None:
        return "its query, key and value could not be told apart in the graph"
    return None
