"""The protocol that every attention form follows, and what it hands to the projections around it.

A form is a torch module on the heads' queries, keys and values. Projections stay outside: the rewritten site holds
them, so a form is written once for every frontend, layout and packing.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnrewrite.variants.parts.foldable import Affine


class Heads(NamedTuple):
    """What a form reads at one site for a batch of images.

    query [B, H, N, d], key [B, H, M, d], value [B, H, M, e]; windows are folded into B. `bias` broadcasts against
    [B, H, N, M] or is None; it is [B, 1, 1, M] where the site says that it depends on the keys alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None

    def rows(self, count: int) -> "Heads":
        """The first `count` of the batch. A bias of one row is shared by all."""
        bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[:count]
        return Heads(self.query[:count], self.key[:count], self.value[:count], bias)

    def to(self, device: str) -> "Heads":
        query, key, value, bias = (part if part is None else part.to(device) for part in self)
        return Heads(query, key, value, bias)  # type: ignore[arg-type]


class Form(nn.Module):
    """An attention form: (query [B, H, N, d], key [B, H, M, d], value [B, H, M, e], bias) -> [B, H, N, e].

    `scale` multiplies the products of query and key; forms that normalise it away ignore it. `maps_after` names linear
    maps of the form's result: they have a closed form, and no search changes them.
    """

    maps_after: ClassVar[tuple[str, ...]] = ()

    @property
    def searched(self) -> tuple[str, ...]:
        """Whose projections are searched, of query, key and value. Where there are none, as softmax's own probabilities
        take what the site projects as it is, the form's own weights are left alone, too.
        """
        return "query", "key", "value"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Fit the form's own constants to the teacher's activations, in closed form. By default there are none.

        `activations` may be called several times; each call streams the same batches again.
        """

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        """Numbers for each token that show what the form attends to, for `explain --image`: by name, [B, maps, tokens]
        (a map for each head, or one). By default none.
        """
        return {}

    def resolved(self) -> dict[str, Any]:
        """The options that `refine` chose (heads, rank), with which the variant builds this structure again."""
        return {}

    def at_rest(self, bias: Tensor) -> Tensor:
        """The weights that the form gives the values where all products of query and key are zero, of a bias
        [B, H, N, M]: by default those of a form that has no place for it.
        """
        return torch.full_like(bias, 1 / bias.shape[3])

    def deploy(self) -> "Form":
        """The form as it is exported and lowered, without what only training needs (such as soft choices)."""
        return self

    def foldable_maps(self) -> "FoldableMaps | None":
        """This form split into a form without its outer linear maps, and these maps, which projections can hold; None
        where it has none. The form itself is not changed. What is left is asked in turn, and may have maps again, for
        other projections.
        """
        return None


@dataclass(frozen=True)
class FoldableMaps:
    """A form as `form` between affine maps: of query, key and value before it, of its result after it (None: none).

    `heads` is how many heads `form` reads and writes.
    """

    form: Form
    heads: int
    query: Affine | None = None
    key: Affine | None = None
    value: Affine | None = None
    output: Affine | None = None


def maps_of_query_and_key(form: Form) -> FoldableMaps | None:
    """What is foldable of `form`, where that is nothing of its value and result: what reads or adds to these stays."""
    inner = form.foldable_maps()
    return None if inner is None or inner.value is not None or inner.output is not None else inner


class Supplemented(Form):
    """`form`, and something beside it that reads values alone: what is seen, resolved and folded is the form's."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return self.form.token_maps(heads)

    def at_rest(self, bias: Tensor) -> Tensor:
        return self.form.at_rest(bias)

    def resolved(self) -> dict[str, Any]:
        return self.form.resolved()

    def deploy(self) -> Form:
        self.form = self.form.deploy()
        return self

    def foldable_maps(self) -> FoldableMaps | None:
        inner = maps_of_query_and_key(self.form)
        if inner is None:
            return None
        own = copy.deepcopy(self)
        own.form = inner.form
        return replace(inner, form=own)


def summed_with(form: Form, heads: Heads) -> Tensor:
    """The weights with which a form sums the values, [B, H, N, M]: its output for the identity matrix as values. For
    forms that are linear in the value.
    """
    batch, count, keys, _ = heads.value.shape
    own = torch.eye(keys, dtype=heads.value.dtype, device=heads.value.device)
    return form(heads.query, heads.key, own.expand(batch, count, keys, keys), heads.bias)


def received(form: Form, heads: Heads) -> dict[str, Tensor]:
    """The map of a form that is linear in the value: the weight of each key, on average over the queries."""
    return {"attention received": summed_with(form, heads).mean(2)}
