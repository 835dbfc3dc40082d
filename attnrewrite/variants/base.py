"""The protocol every attention form follows.

A *form* is a torch module on the heads' queries, keys and values; a *variant* is a frozen dataclass, whose fields
are the form's options, that says which sites the form honours and builds it. Projections stay outside: the rewritten
site holds them, so a form is written once for every frontend, layout and packing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnrewrite.site import AttentionSite
from attnrewrite.variants.ends import Ends


class Heads(NamedTuple):
    """What a form reads at one site for a batch of images.

    query [B, H, N, d], key [B, H, M, d], value [B, H, M, e]; windows are folded into B. `bias` broadcasts against
    [B, H, N, M] or is None; it is [B, 1, 1, M] where the site says that it depends on the keys alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


class Form(nn.Module):
    """An attention form: (query [B, H, N, d], key [B, H, M, d], value [B, H, M, e], bias) -> [B, H, N, e].

    `scale` multiplies the products of query and key; forms that normalise it away ignore it.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Fit the form's own constants to the teacher's activations, in closed form. By default there are none.

        `activations` may be called several times; each call streams the same batches again.
        """

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """What this form makes of the tokens, for pictures: each map's name, and [B, maps, tokens]. By default none."""
        return {}

    def resolve(self, variant: "Variant") -> "Variant":
        """`variant` with the choices that `refine` made (heads, rank), so that it builds this structure again."""
        return variant

    def deploy(self) -> "Form":
        """The form that stands in a lowered model: what only training needs is folded or hardened away."""
        return self

    def ends(self) -> Ends | None:
        """This form, taken apart from the linear maps at its ends, which projections can hold; None where it has none.
        The form itself is not changed.
        """
        return None


def summed_with(form: Form, heads: Heads) -> Tensor:
    """The weights with which a form sums the values, [B, H, N, M]: what it makes of values that are each other's 0 and
    their own 1. For forms that are linear in the value.
    """
    batch, count, keys, _ = heads.value.shape
    own = torch.eye(keys, dtype=heads.value.dtype, device=heads.value.device)
    return form(heads.query, heads.key, own.expand(batch, count, keys, keys), heads.bias)


def received(form: Form, heads: Heads) -> dict[str, Tensor]:
    """The map of a form that is linear in the value: the weight of each key, on average over the queries."""
    return {"attention received": summed_with(form, heads).mean(2)}


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
