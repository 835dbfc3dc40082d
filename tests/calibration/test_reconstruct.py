"""Blocks trained towards the teacher's, on small models of every shape."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fits import KINDS, WIDTH, Attention, Mlp, calibration, pictures
from torch import Tensor, nn

from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.reconstruct import Reconstruction
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.calibration.workplace import Workplace
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.request import Execution
from attnrewrite.variants.registry import get_variant


def spoiled(kind: str, model: nn.Module | None = None) -> StageInput:
    """A student that is the teacher but for its queries, which no linear map behind them makes up for."""
    given = calibration(kind, get_variant("softmax"), model=model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for site in rewritten_sites(given.student).values():
            site.query.weight.add_(torch.randn(site.query.weight.shape, generator=generator) * 0.5)
    return given


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_closer_than_the_fit_alone_brings_them(kind: str) -> None:
    fitted, trained = spoiled(kind), spoiled(kind)
    Fit().run(fitted)
    assert Reconstruction(steps=75, rate=2e-2, blocks=1).run(trained).notes == ()
    assert distance(trained).loss < 0.5 * distance(fitted).loss


def test_a_step_is_of_the_same_images_however_large_their_streams_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that takes five at once is given four, which make up a batch."""
    found = []
    for at_once in (16, 5):
        monkeypatch.setattr("attnrewrite.calibration.workplace.STREAM_AT_ONCE", at_once * 36 * WIDTH * 4)
        given = calibration("pre-norm", get_variant("hedgehog"))  # no weight of which is without effect
        Reconstruction(steps=6).run(given)
        found.append(given.student.state_dict())
    for name, tensor in found[0].items():
        # Adam steps by the sign of a gradient, however small: rounding moves elements by 4e-4, other images by 0.3.
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_counts_lies_where_its_change_gets_to(kind: str) -> None:
    """Weights that are all one but for the first row's: the stream's are other than one where that row reaches it."""
    given = calibration(kind, get_variant("softmax"))
    for branch in branches(given.teacher):
        with Segments(given.teacher, given.images, Processes()) as teacher:
            stop = teacher.order[branch.stream] + 1
            _, values = next(teacher.run(stop, {branch.node, branch.stream, *branch.reads}))
        count = branch.outputs(values[branch.node])[..., 0].numel()
        rows = torch.ones(count).index_fill(0, torch.tensor([0]), 3.0)
        spread = branch.spread(rows, values).broadcast_to(values[branch.stream].shape)
        reached = moved_by(branch, values, torch.zeros(count).index_fill(0, torch.tensor([0]), 1.0)) != 0
        torch.testing.assert_close(spread, torch.where(reached, 3.0, 1.0), rtol=1e-6, atol=0)


def moved_by(branch: Any, values: Any, rows: Tensor) -> Tensor:
    """How the stream changes when rows of the branch's map do, found by changing them."""
    ones = torch.ones_like(branch.outputs(values[branch.node]))
    return branch.change_of_stream(rows.reshape(*ones.shape[:-1], 1) * ones, values)


class Tied(nn.Module):
    """Two blocks of attention with one MLP between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 5)
        self.first, self.second, self.mlp = Attention(), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for attention in (self.first, self.second):
            x = x + attention(x)
            x = x + self.mlp(x)
        return self.head(x.mean(1))


def test_weights_that_other_blocks_read_too_are_left_alone() -> None:
    given = spoiled("tied", Tied())
    before = {name: tensor.detach().clone() for name, tensor in given.student.named_parameters()}
    assert Reconstruction(steps=40, rate=2e-2, blocks=1).run(given).notes == ()
    after = dict(given.student.named_parameters())
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert not any("mlp" in name for name in changed)
    assert all(parameter.grad is None for parameter in after.values())
    assert any("query" in name for name in changed)


def test_progress_counts_the_steps_of_every_window() -> None:
    seen: list[tuple[str, int, int]] = []
    given = calibration("pre-norm", get_variant("l1"))
    execution = Execution(progress=lambda what, done, total: seen.append((what, done, total)))
    Reconstruction(steps=3, blocks=1).run(replace(given, execution=execution))
    assert seen == [("reconstruction", step, 6) for step in range(1, 7)]


def test_a_window_that_training_makes_worse_is_left_and_named() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    weight = rewritten_sites(given.student)["site1"].query.weight
    before = weight.detach().clone()
    (note,) = Reconstruction(steps=2, rate=float("inf")).run(given).notes
    assert note.startswith("not trained, as that made it worse: site0, ")
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("steps", "times"), [(1, 1), (60, 2)])
def test_few_images_come_changed_so_that_none_is_seen_often(
    steps: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images that choose a ridge stay apart, changed or not, from those that it is for."""
    made: list[Workplace] = []
    own = Workplace.of
    monkeypatch.setattr(Workplace, "of", lambda *given, **how: made.append(own(*given, **how)) or made[-1])
    given = calibration("pre-norm", get_variant("l1"), images=pictures(96))
    count = len(given.images.images)
    Reconstruction(steps=steps).run(given)
    (pool,) = (work.images for work in made)
    assert len(pool.images) == times * count
    (fitted,) = pool.parts
    numbers = np.arange(times * count) if times == 1 else pool.images.x.chosen
    assert not set(numbers[:fitted]) & set(numbers[fitted:])
    assert sorted(numbers) == sorted([*range(count)] * times)
