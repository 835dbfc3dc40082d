"""Accuracy and agreement, against counts done by hand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.evaluation.accuracy import evaluate_modules
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.frontends.sources import load_source
from attnrewrite.images.dataset import load_images

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Table(nn.Module):
    """Gives image number i (its only pixel) the i-th row of logits."""

    def __init__(self, rows: list[list[float]], batches: list[int] | None = None) -> None:
        super().__init__()
        self.rows, self.batches = torch.tensor(rows), batches if batches is not None else []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        return self.rows[x[:, 0, 0, 0].long()]


ORIGINAL = [[1.0, 0.0], [0.0, 1.0], [3.0, 2.0], [0.0, 4.0], [5.0, 1.0]]
RESULT = [[1.0, 0.0], [0.0, 1.0], [3.0, 5.0], [0.0, 4.0], [1.0, 1.5]]


def numbered(labels: list[int] | None) -> list:
    images = [torch.full((1, 1, 1), float(i)) for i in range(5)]
    return images if labels is None else list(zip(images, labels, strict=True))


def test_top1_agreement_and_logit_error_over_the_same_batches() -> None:
    batches: list[int] = []
    told: list[tuple[str, int, int]] = []
    found = evaluate_modules(
        {"original": Table(ORIGINAL), "result": Table(RESULT, batches)},
        load_images(numbered([0, 1, 1, 0, 0])),
        None,
        reference="original",
        batch_size=2,
        progress=lambda *news: told.append(news),
    )
    assert found == {
        "original": Evaluation("original", 5, 60.0, None, None),
        "result": Evaluation("result", 5, 60.0, 60.0, pytest.approx((9 + 16 + 0.25) / 10)),
    }
    assert batches == [2, 2, 2]  # the last is filled up, for models with a fixed batch
    assert told == [("evaluate", 2, 5), ("evaluate", 4, 5), ("evaluate", 5, 5)]


def test_without_labels_or_reference_there_is_nothing_to_hold_against() -> None:
    found = evaluate_modules({"a": Table(RESULT)}, load_images(numbered(None)), None)
    assert found == {"a": Evaluation("a", 5, None, None, None)}


@pytest.mark.parametrize(
    ("labels", "rows", "reference", "message"),
    [
        ([0, 1, 2, 0, 0], RESULT, None, "a has 2 classes and the data a label 2"),
        (None, [[[1.0]]] * 5, None, "a is not a classifier: its output is .5, 1, 1."),
        (None, RESULT, "b", "unknown reference model 'b'"),
        (None, [*RESULT[:3], [math.nan, 1.0], RESULT[4]], None, "a answers NaN for 1 of 5 images"),
    ],
)
def test_what_cannot_be_evaluated(labels: list[int] | None, rows: list, reference: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate_modules({"a": Table(rows)}, load_images(numbered(labels)), None, reference=reference)


class Answering(nn.Module):
    """Gives every image the same answer, as whatever `wrap` makes of the logits."""

    def __init__(self, classes: int, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.classes, self.wrap = classes, wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.eye(1, self.classes).expand(len(x), -1))


def test_fewer_answers_than_images_are_no_answers() -> None:
    with pytest.raises(InputError, match="a gives 1 answers for 5 images: give the batch that it takes"):
        evaluate_modules({"a": Answering(2, lambda logits: logits[:1])}, load_images(numbered(None)), None)


@pytest.mark.parametrize("classes", [1, 7])
def test_models_of_other_classes_are_not_held_against_each_other(classes: int) -> None:
    models = {"a": Answering(10), "b": Answering(classes)}
    with pytest.raises(
        InputError, match=f"^b answers with {classes} classes and a with 10, .*: give models of the same classes"
    ):
        evaluate_modules(models, load_images(numbered(None)), None, reference="a")


@pytest.mark.parametrize("wrap", [lambda y: {"logits": y, "hidden": 3}, lambda y: ({"out": (y,)}, 3), lambda y: [y, y]])
def test_the_first_tensor_of_an_output_is_the_logits(wrap: Callable[[Tensor], Any]) -> None:
    found = evaluate_modules({"a": Answering(2, wrap)}, load_images(numbered([0, 1, 0, 0, 0])), None)
    assert found["a"].top1 == 80


@pytest.mark.parametrize("output", [3, "cat", {}, None])
def test_an_output_without_tensors_is_no_classifiers(output: object) -> None:
    with pytest.raises(InputError, match=f"a is not a classifier: its output is {type(output).__name__}, and"):
        evaluate_modules({"a": Answering(2, lambda y: output)}, load_images(numbered(None)), None)


def test_class_folders_must_be_the_models_classes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((1, 1), np.uint8)).save(tmp_path / name / "0.png")
    source = load_source(Table(ORIGINAL), input_size="1x1x1", mean=0, std=1)
    assert source.model is not None
    with pytest.raises(InputError, match="a has 2 classes and the data 3 class folders"):
        evaluate_modules({"a": source.model}, load_images(tmp_path), source.preprocessing, input_size=(1, 1, 1))


def test_a_strangers_checkpoint_is_right_where_it_was_trained_to_be(shared: Path) -> None:
    folder = shared / "data"
    source = load_source(
        f"{EXAMPLES / 'third_party.py'}:cifar10_vit",
        checkpoint=folder / "vit_cifar10_smmk47" / "vit_cifar10.pth",
        input_size="3x32x32",
        mean="0.4914,0.4822,0.4465",
        std="0.2023,0.1994,0.2010",
    )
    assert source.model is not None
    images = load_images(folder / "cifar10_jpeg" / "test.npz")
    assert images.y is not None
    # 71.72 % of all 10,000 images (a minute), 67.0 % of the first fifty of each class; no logits there are near a tie.
    first = np.concatenate([np.flatnonzero(images.y == label)[:50] for label in range(10)])
    few = type(images)(images.x[first], images.y[first])
    found = evaluate_modules({"original": source.model}, few, source.preprocessing)["original"]
    assert (found.n, found.top1) == (500, 67.0)
