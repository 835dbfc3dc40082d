"""What a whole choice loses, and when it is known to be too much before all images were measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnrewrite.request import Budget
from attnrewrite.selection.loss_bound import Loss, LossMeter
from attnrewrite.selection.measurements import Measurements
from attnrewrite.selection.problem import Auto


def lost(max_drop: float, monkeypatch: pytest.MonkeyPatch, count: int, alike: bool = True) -> Loss:
    """Of a model that is wrong more often than the original's chances tell, in both folds or in the first alone."""
    pair = torch.arange(count) // 2
    original = torch.tensor([[0.5, 0.49, 0.01]]).log().double().repeat(count, 1)
    wrong = (pair % 20 == 0) & (torch.tensor(alike) | (torch.arange(count) % 2 == 0))
    given = torch.where(wrong[:, None], original.roll(1, 1), original)
    auto = Auto(Budget(max_drop=max_drop), ())
    extraction: Any = SimpleNamespace(sites=(), name="model")
    images: Any = SimpleNamespace(images=range(count))
    unused: Any = None
    found = Measurements(auto, extraction, images, unused, unused)
    folds = [np.arange(0, count, 2), np.arange(1, count, 2)]
    outputs = SimpleNamespace(outputs=lambda plan: ((fold, given[torch.from_numpy(fold)]) for fold in folds))
    found.__dict__.update(meter=LossMeter(original, np.zeros(count, int)), _cross_fit=outputs)
    monkeypatch.setattr(Measurements, "_kept", lambda self, name, find: find())
    return found.loss({})


@pytest.mark.parametrize("count", [400, 401])
def test_what_was_stopped_early_is_never_within_the_budget(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half stops it where the other could lose nothing and all would still lose too much."""
    whole = lost(99.0, monkeypatch, count)
    assert whole.images == count
    early = lost(whole.bound / 4, monkeypatch, count)
    assert early.images == (count + 1) // 2
    assert (early.bound, early.points) == (pytest.approx(whole.bound, abs=0.05), pytest.approx(whole.points, rel=0.05))
    for budget in np.linspace(0.1, 1.5, 29) * whole.bound:
        loss = lost(float(budget), monkeypatch, count)
        assert loss == whole if loss.images == count else loss.bound > budget


def test_an_unlucky_half_is_not_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half alone would be too much, both together are not: they are measured, and hold."""
    whole = lost(99.0, monkeypatch, 400, alike=False)
    assert whole.bound < lost(99.0, monkeypatch, 400).bound
    assert lost(whole.bound, monkeypatch, 400, alike=False) == whole
