"""Models that give no logits, held against one another: against distances done by hand."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.cli.output import made_lines
from attnrewrite.errors import InputError
from attnrewrite.evaluation.outputs import evaluate_outputs
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.images.dataset import load_images


class Giving(nn.Module):
    """Gives what `make` makes of the images' numbers [b]: each image's only pixel."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x[:, 0, 0, 0])


def maps(number: Tensor) -> Tensor:
    """[b, 2, 1, 1]: the number, and the same for all."""
    return torch.stack([number, torch.full_like(number, 3.0)], 1)[..., None, None]


def held(model: Callable[[Tensor], Any], original: Callable[[Tensor], Any] = maps, labels: bool = False) -> Evaluation:
    images = [torch.full((1, 1, 1), float(i)) for i in range(5)]
    data = load_images(list(zip(images, range(5), strict=True)) if labels else images)
    modules = {"original": Giving(original), "result": Giving(model)}
    found = evaluate_outputs(modules, data, None, reference="original", batch_size=2)
    assert list(found) == ["original", "result"]
    assert found["original"] == Evaluation("original", 5, None, None, None)
    return found["result"]


def test_the_squared_difference_over_the_energy_around_the_mean() -> None:
    """0, 1, 2, 3, 4 around 2 have the energy 10; what fills the last batch up does not count."""
    assert held(maps) == Evaluation("result", 5, None, None, None, 0.0)
    assert held(lambda number: maps(number) + 1).error == pytest.approx(5 * 2 / 10)
    assert held(lambda number: torch.where(number[:, None, None, None] == 4, 9.0, maps(number))).error == pytest.approx(
        (25 + 36) / 10
    )


def test_several_outputs_count_alike_by_how_much_each_differs_between_images(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def original(number: Tensor) -> dict[str, Any]:
        return {"boxes": maps(number), "wide": 100 * maps(number), "count": number.long(), "one": number[:1]}

    def result(number: Tensor) -> dict[str, Any]:
        return original(number) | {"wide": 100 * maps(number) + 100, "one": 7 * number[:1]}

    with caplog.at_level(logging.WARNING, "attnrewrite"):
        assert held(result, original, labels=True).error == pytest.approx((0 + 1) / 2)
    assert [record.getMessage() for record in caplog.records] == [
        "original is compared by 2 of its 4 outputs: the others are no floating-point numbers, do not follow the "
        "images, or are alike for all images",
        "the labels are not used: original gives no logits [images, classes]",
    ]


def test_the_images_are_along_the_axis_that_is_longer_with_more_of_them() -> None:
    """Two layers, a batch of two: 0, 1, 2, 3, 4 and their doubles around their means have the energy 10 + 40."""

    def layers(number: Tensor) -> Tensor:
        return torch.stack([number, 2 * number])

    assert held(lambda number: layers(number) + 1, layers).error == pytest.approx(2 * 5 / 50)


def test_a_model_of_one_batch_size_has_the_images_along_the_first_axis() -> None:
    def two(number: Tensor) -> Tensor:
        assert len(number) == 2, "takes two"
        return maps(number)

    assert held(lambda number: two(number) + 1, two).error == pytest.approx(5 * 2 / 10)


def test_a_tensor_for_each_image_is_nothing_that_follows_them() -> None:
    with pytest.raises(
        InputError, match=r"original gives no numbers for each of 2 images .* \[\[2, 1, 1\], \[2, 1, 1\]\]"
    ):
        held(maps, lambda number: list(maps(number)))


def test_an_output_that_is_alike_for_all_images_has_no_distance() -> None:
    assert held(lambda number: 0 * maps(number), lambda number: 0 * maps(number) + 1).error is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda number: maps(number)[:, :1], r"result gives \[\[1, 1, 1\]\] for an image and original \[\[2, 1, 1\]\]"),
        (
            lambda number: (maps(number), maps(number)),
            "result gives 2 outputs and not the 1 of the model that it is held",
        ),
        (lambda number: maps(number).long(), r"result gives no numbers for each of 2 images .* \[\[2, 2, 1, 1\]\]"),
        (lambda number: list(maps(number)), "result gives 2 outputs and not the 1 of the model"),
        (lambda number: 3, "result gives no numbers for each of 2 images .* its output is int"),
        (lambda number: maps(number).log(), "result answers NaN or infinity where original gives numbers"),
    ],
)
def test_what_cannot_be_held_against_another(result: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        held(result)


class Dense(nn.Module):
    """A map of 3 classes and two numbers, of pictures [b, 3, 8, 8] through one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24)
        self.head, self.numbers = nn.Conv2d(8, 3, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1) / 2).softmax(-1)
        tokens = tokens + (scores @ value).transpose(1, 2).reshape(-1, 16, 8)
        return self.head(tokens.transpose(1, 2).reshape(-1, 8, 4, 4)), self.numbers(tokens.mean(1))


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((24, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def dense() -> Dense:
    torch.manual_seed(0)
    return Dense().eval()


def test_a_converted_model_of_maps_is_held_against_its_original(
    dense: Dense, pictures: np.ndarray, tmp_path: Path
) -> None:
    converted = ar.convert(dense, (torch.from_numpy(pictures[:1]),), variant="l1")
    found = list(ar.evaluate(converted, [torch.from_numpy(each) for each in pictures]).values())
    with torch.no_grad():
        own, other = (model(torch.from_numpy(pictures)) for model in (dense, converted.module))
    errors = [
        float((b - a).double().square().sum() / (a - a.mean(0)).double().square().sum())
        for a, b in zip(own, other, strict=True)
    ]
    assert found[-1].error == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert found[-1].error > 1e-6
    assert (found[-1].top1, found[-1].agreement, found[-1].logit_mse, found[0].error) == (None, None, None, None)
    with pytest.raises(InputError, match=r"is not a classifier: .* against its original"):
        ar.evaluate(dense, [torch.from_numpy(each) for each in pictures], input_size="3x8x8")


def test_models_of_maps_are_compared_by_every_output(dense: Dense, pictures: np.ndarray) -> None:
    converted = ar.convert(dense, (torch.from_numpy(pictures[:1]),), variant="l1")
    data = list(torch.from_numpy(pictures))
    found = ar.compare({"maps": dense, "l1": converted}, converted.example_inputs, targets=["coreml-npu"], data=data)
    (own, *_), (other, *_) = (found.of(name) for name in ("maps", "l1"))
    assert own.output_error is None
    assert other.output_error == list(ar.evaluate(converted, data).values())[-1].error
    assert (other.top1, other.agreement) == (None, None)


@pytest.mark.parametrize(("target", "most"), [("host", 1e-10), ("coreml-npu", 1e-5)])
def test_an_artifact_is_held_against_its_model_by_every_output(
    target: str, most: float, dense: Dense, pictures: np.ndarray, tmp_path: Path
) -> None:
    pytest.importorskip("tvm" if target == "host" else "coremltools")
    example = (torch.from_numpy(pictures[:1]),)
    made = ar.lower(dense, target, tmp_path / "out", example_inputs=example, data=list(torch.from_numpy(pictures[:4])))
    artifact = made.measured["artifact"]
    assert artifact["n"] == 4
    assert 0 < artifact["error"] < most
    assert artifact["agreement"] is None
    assert made_lines(made).splitlines()[-1].startswith("the artifact on 4 images: outputs off by ")
