"""Which tokens count: gradients of the answer, and fits that spend themselves where it is read."""

from dataclasses import replace

import pytest
import torch
from fits import SIDE, Model, calibration, error_on_others, pictures
from torch import Tensor

from attnrewrite.calibration import importance as weighing
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.importance import EVEN, Blocks, importance
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.stage import distance
from attnrewrite.variants.registry import get_variant

TOKENS = SIDE * SIDE
SCALES = 10 ** torch.tensor([-0.8, -2.1, -1.1, 0.3, -3.0, -1.6, -0.2, -2.5])


class FirstToken(Model):
    """As Model, but the head reads the first token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2))[:, 0])


def scaled() -> Model:
    """Most of what each map gives is hidden by the layer scale behind it."""
    model = Model("pre-norm")
    with torch.no_grad():
        for block in model.blocks:
            block.scale.copy_(SCALES)
    return model


class Classes(Model):
    """The number of the class, which no gradient reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def test_only_what_is_read_counts() -> None:
    given = calibration("pre-norm", get_variant("l1"), model=FirstToken("pre-norm"))
    weights = importance(given.teacher, given.images, given.answer, given.processes)
    names = [branch.node.name for branch in branches(given.teacher)]
    rows = {name: weights.of(name, 0).reshape(-1, TOKENS) for name in names}
    for name in names[2:]:  # the last block: nothing mixes tokens behind its attention
        assert (rows[name][:, 1:] == EVEN).all(), name
        assert (rows[name][:, 0] > EVEN).all(), name
    for name in names[:2]:  # the first: the last block's attention reads all tokens
        assert (rows[name][:, 1:] > EVEN).any(), name


def test_a_mean_counts_all_tokens_alike_where_nothing_follows() -> None:
    """Behind the last branch stand a mean and a linear head: every row's gradient is W^T u / N."""
    given = calibration("pre-norm", get_variant("l1"))
    last = list(branches(given.teacher))[-1].node.name
    rows = importance(given.teacher, given.images, given.answer, given.processes).of(last, 0).reshape(-1, TOKENS)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))


def test_outputs_count_as_the_layer_scale_behind_them_lets_them() -> None:
    """The last branch ends in the mean and the head: the gradient at an output is its scale times (W^T u) / N."""
    model = scaled()
    given = calibration("pre-norm", get_variant("l1"), model=model)
    weights = importance(given.teacher, given.images, given.answer, given.processes)
    with torch.no_grad():
        model.blocks[-1].scale.fill_(1.0)
    plain = calibration("pre-norm", get_variant("l1"), model=model)
    alike = importance(plain.teacher, given.images, given.answer, given.processes)
    last = list(branches(given.teacher))[-1].node.name
    expected = alike.outputs[last] * SCALES.square()
    torch.testing.assert_close(weights.outputs[last], expected / expected.mean(), rtol=1e-4, atol=0)
    assert all(float(each.mean()) == pytest.approx(1) for each in weights.outputs.values())


def test_weights_have_one_mean_over_all_images_and_are_theirs_whatever_the_batches() -> None:
    given = calibration("windows", get_variant("l1"))
    names = [branch.node.name for branch in branches(given.teacher)]
    whole, small = (replace(given.images, batch_size=size) for size in (84, 5))
    first, second = (importance(given.teacher, pool, given.answer, given.processes) for pool in (whole, small))
    for name in names:
        rows = first.of(name, 0)
        assert float(rows.mean()) == pytest.approx(1 + EVEN)
        torch.testing.assert_close(torch.cat([second.of(name, i) for i in range(len(small))]), rows)
        torch.testing.assert_close(first.outputs[name], second.outputs[name])


@pytest.mark.parametrize("pieces", [1, 2, 5, 100])
def test_weights_are_the_same_in_however_few_pieces_the_network_is_gone_through(pieces: int) -> None:
    given = calibration("windows", get_variant("l1"))
    names = [branch.node.name for branch in branches(given.teacher)]
    most, few = (
        importance(given.teacher, given.images, given.answer, given.processes, pieces=each) for each in (None, pieces)
    )
    assert len(Blocks(given.teacher, names, given.answer, pieces=pieces).pieces) == min(
        pieces, len(Blocks(given.teacher, names, given.answer).pieces)
    )
    for name in names:
        torch.testing.assert_close(few.of(name, 0), most.of(name, 0))


def test_a_draw_belongs_to_its_batch_whoever_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = calibration("windows", get_variant("l1"))
    names = [branch.node.name for branch in branches(given.teacher)]
    alone = importance(given.teacher, given.images, given.answer, Processes())
    monkeypatch.setattr(Processes, "add_up", lambda self, *tensors: None)
    shared = [importance(given.teacher, given.images, given.answer, Processes(rank, 2)) for rank in range(2)]
    for index in range(len(given.images)):
        rows, other = alone.energy.get(index, "cpu"), shared[index % 2].energy.get(index, "cpu")
        assert all(torch.equal(rows[name], other[name]) for name in names)


def test_without_a_gradient_all_tokens_are_alike() -> None:
    given = calibration("pre-norm", get_variant("l1"), model=Classes("pre-norm"))
    weights = importance(given.teacher, given.images, given.answer, given.processes)
    rows = [weights.of(branch.node.name, 0) for branch in branches(given.teacher)]
    assert all(len(each.unique()) == 1 for each in rows)
    assert all((each == 1).all() for each in weights.outputs.values())


def test_frozen_parameters_stay_frozen() -> None:
    model = Model("pre-norm").requires_grad_(False)
    given = calibration("pre-norm", get_variant("l1"), model=model)
    importance(given.teacher, given.images, given.answer, given.processes)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_fit_serves_the_token_that_is_read() -> None:
    """A form that cannot serve every token: with weights, the answer comes closer than with all tokens alike."""

    class Alike(Fit):
        def residual_fit(self, branch, teacher, student, weights):  # type: ignore[no-untyped-def]
            return super().residual_fit(
                branch, teacher, student, replace(weights, mean=dict.fromkeys(weights.mean, 1e30))
            )

    errors = []
    for fit in (Fit(), Alike()):
        given = calibration("pre-norm", get_variant("additive"), model=FirstToken("pre-norm"))
        fit.run(given)
        errors.append(distance(given).error)
    assert errors[0] < errors[1]


@pytest.mark.parametrize("form", ["elu", "l1"])
def test_the_fit_serves_the_outputs_that_a_layer_scale_lets_through(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for alike in (False, True):
        if alike:
            monkeypatch.setattr(weighing, "_of_outputs", lambda sums: {n: torch.ones_like(e) for n, e in sums.items()})
        given = calibration("pre-norm", get_variant(form), pictures(300), model=scaled())
        Fit().run(given)
        errors.append(error_on_others(given))
    assert errors[0] < 0.98 * errors[1]
