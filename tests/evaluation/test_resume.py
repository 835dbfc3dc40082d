"""What makes two models different ones for a comparison that goes on from an earlier one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.evaluation.resume import fingerprint

X = (torch.ones(2, 4),)
SITES: list[dict[str, Any]] = [{"id": "site0", "variant": "masked", "options": {"size": 3}}]


class Small(nn.Module):
    """One layer, `activate`, and a mask that is no buffer and one that is not saved."""

    def __init__(
        self, activate: Callable[[Tensor], Tensor] = F.relu, hidden: float = 1.0, unsaved: float = 1.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.activate = nn.Linear(4, 4), activate
        self.mask = torch.full((4,), hidden)
        self.register_buffer("unsaved", torch.full((4,), unsaved), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.layer(x), x * self.mask
        return self.activate(query - key) * self.unsaved


class Exchanged(Small):
    def forward(self, x: Tensor) -> Tensor:
        query, key = self.layer(x), x * self.mask
        return self.activate(key - query) * self.unsaved


Exchanged.__name__ = "Small"

OTHERS: dict[str, tuple[nn.Module, list[dict[str, Any]]]] = {
    "another activation": (Small(F.gelu), SITES),
    "another number in an operation": (Small(lambda x: F.leaky_relu(x, 0.2)), SITES),
    "operands exchanged": (Exchanged(), SITES),
    "another mask": (Small(hidden=2.0), SITES),
    "another buffer that is not saved": (Small(unsaved=2.0), SITES),
    "another option": (Small(), [SITES[0] | {"options": {"size": 5}}]),
    "one more option": (Small(), [SITES[0] | {"options": {"size": 3, "soft": True}}]),
}


def test_a_model_made_again_is_the_same() -> None:
    assert fingerprint(Small(), X, SITES) == fingerprint(Small(), (X[0] + 1,), SITES)


@pytest.mark.parametrize("case", OTHERS)
def test_models_that_answer_otherwise_are_others(case: str) -> None:
    model, sites = OTHERS[case]
    assert fingerprint(model, X, sites) != fingerprint(Small(), X, SITES)


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=torch.Generator())


def test_a_fingerprint_names_no_place_in_memory() -> None:
    first, second = Drawing(), Drawing()
    assert fingerprint(first, X, ()) == fingerprint(second, X, ())
