"""What of a model's output counts: a classifier's logits, or all that follows the images."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fits import SIDE, Model, calibration, pictures
from torch import Tensor

import attnrewrite
from attnrewrite.calibration import answers
from attnrewrite.calibration.answers import Answer, Answers
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.distill import Distillation
from attnrewrite.calibration.importance import EVEN, importance
from attnrewrite.calibration.stage import Distance, StageInput, distance
from attnrewrite.errors import InputError
from attnrewrite.passes.verify import tensors
from attnrewrite.request import Execution
from attnrewrite.variants.registry import get_variant

Give = Callable[[Model, Tensor, list[Tensor]], Any]


class Outputs(Model):
    """As Model; `give` makes what it answers of the logits and the two blocks' maps [B, SIDE * SIDE, WIDTH]."""

    def __init__(self, give: Give) -> None:
        super().__init__("pre-norm")
        self.give = give

    def forward(self, x: Tensor) -> Any:
        maps = [self.embed(x).flatten(2).transpose(1, 2)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return self.give(self, self.head(maps[-1].mean(1)), maps[1:])


def given_by(give: Give) -> StageInput:
    return calibration("outputs", get_variant("l1"), pictures(40), Outputs(give))


def maps(model: Model, logits: Tensor, both: list[Tensor]) -> list[Tensor]:
    return both


def one_token(model: Model, logits: Tensor, both: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The first block's map, and what the second says of one token."""
    return both[0], both[1][:, 3]


def stacked(model: Model, logits: Tensor, both: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Both maps behind each other, with the images along the second axis; and the first with them along the last."""
    return torch.stack(both), both[0].permute(1, 2, 0)


def beside_constants(model: Model, logits: Tensor, both: list[Tensor]) -> dict[str, Any]:
    """Two that differ between images, and what does not: a parameter, a row for each image, counts, a number.

    What has other rows than images does not count either.
    """
    place = (torch.ones(1, 2) * model.head.weight.sum()).expand(logits.shape[0], 2)
    told = {"prototypes": model.head.weight, "place": place, "count": both[0].sum((1, 2)).long()}
    told |= {"images": logits.shape[0], "none": None, "tokens": both[0].flatten(0, 1)}
    return told | {"first": both[0] / 100, "second": both[1]}


def test_a_classifier_is_held_to_its_logits() -> None:
    given = given_by(lambda model, logits, both: {"logits": logits, "states": both})
    assert given.answer == Answer(True, {0: 1.0}, {0: 0}, 3)
    assert distance(given) == distance(given_by(lambda model, logits, both: logits))
    assert given.answer.note == "the model is held to its logits, the first of 3 outputs"
    assert given_by(lambda model, logits, both: (logits,)).answer.note is None
    others = "the model is held to 2 of its 6 outputs: the others do not follow the images, or are not finite"
    assert given_by(beside_constants).answer.note == others


@torch.no_grad()
def errors_of(given: StageInput) -> list[float]:
    """The squared error of each output that counts on the held-out images, over its energy around its mean."""
    x = torch.cat([given.held_out.batch(index)[0] for index in range(len(given.held_out))])
    wanted, found = (
        [tensors(model(x))[place].double().movedim(axis, 0) for place, axis in given.answer.axes.items()]
        for model in (given.original, given.student)
    )
    return [float((b - a).square().sum() / (a - a.mean(0)).square().sum()) for a, b in zip(wanted, found, strict=True)]


@pytest.mark.parametrize(
    ("give", "places"), [(maps, (0, 1)), (one_token, (0, 1)), (stacked, (0, 1)), (beside_constants, (4, 5))]
)
def test_several_outputs_count_alike(give: Give, places: tuple[int, ...]) -> None:
    given = given_by(give)
    assert (tuple(given.answer.scales), given.answer.logits) == (places, False)
    errors = errors_of(given)
    assert min(errors) > 0
    told = distance(given)
    assert told == Distance(pytest.approx(sum(errors) / 2, rel=1e-5), None, None)
    assert given.answers.variance * given.answers.elements == pytest.approx(2)


def test_what_each_output_reads_counts() -> None:
    given = given_by(one_token)
    weights = importance(given.teacher, given.images, given.answer, given.processes)
    first, _, _, last = (weights.of(branch.node.name, 0).reshape(-1, SIDE * SIDE) for branch in branches(given.teacher))
    assert (first > EVEN).all(), "the first block's map is an answer"
    assert (last[:, 3] > EVEN).all(), "and one token of the second's"
    assert (last[:, torch.arange(SIDE * SIDE) != 3] == EVEN).all()


def test_all_outputs_are_distilled() -> None:
    given = given_by(one_token)
    before = errors_of(given)
    Distillation(steps=40).run(given)
    assert all(after < 0.9 * error for after, error in zip(errors_of(given), before, strict=True))


@pytest.mark.parametrize("give", [maps, lambda model, logits, both: logits])
def test_answers_wait_on_disk_where_they_are_large(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_by(give)
    inside = distance(given)
    monkeypatch.setattr(answers, "room", lambda execution, device: 0)
    again = given_by(give)
    assert isinstance(again.answers._store, answers.OnDisk)
    assert distance(again) == inside


def test_one_number_for_all_images_is_refused() -> None:
    with pytest.raises(InputError, match="one number for all images, and calibration compares what it gives for each"):
        distance(given_by(lambda model, logits, both: both[1].mean()))


def test_how_many_images_a_batch_has_is_no_matter() -> None:
    given = given_by(beside_constants)
    for size in (1, 3, 5):
        found = Answers.of(given.original, replace(given.held_out, batch_size=size), Execution(), "cpu")
        assert tuple(found.answer.scales) == (4, 5)
        assert found.answer.scales == pytest.approx(given.answer.scales, rel=1e-5)


def test_a_report_says_what_the_model_was_held_to() -> None:
    made = attnrewrite.convert(
        Outputs(maps).eval(), (torch.zeros(2, 3, 12, 12),), variant="l1", calibration=pictures(24), samples=24
    )
    copied, fitted = made.report["calibration"]["stages"]
    assert list(copied["notes"]) == ["the model is held to all of its 2 outputs alike"]
    assert fitted["error_after"] < copied["error_after"]
