"""What each row of a comparison says, with targets and models small enough to know the answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnrewrite.errors import CheckFailedError, InputError, Refusal
from attnrewrite.evaluation import compare
from attnrewrite.evaluation.compare import CompareModel, compare_models
from attnrewrite.evaluation.records import Quantiles, load_comparison
from attnrewrite.images.dataset import Array, Images
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.passes.in_batches import InBatches
from attnrewrite.targets.base import Artifact, Availability, Estimate, Run, Target

PREPROCESSING = Preprocessing((0.0,), (1.0,))
LABELS = np.array([0, 1, 1])


class Brightest(nn.Module):
    """Logits are the pixels of a 1 x 2 image, exchanged where `sign` is -1."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([sign, sign]))

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1) * self.weight


class Near(Target):
    """A target of this machine, in one runtime that works and one that does not."""

    name = "near"

    def availability(self) -> Availability:
        return Availability(None, None)

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (
            Run("quick", lambda: module(*example_inputs), 1e-7, 100, None, "scheduled by hand"),
            Run.refused("absent", Refusal("not-installed", "it is not installed")),
        )


class Quick(Near):
    """The same in one runtime."""

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (Run("quick", lambda: module(*example_inputs), 1e-7, 100, None),)


ELSEWHERE = Refusal("needs-device", "it is elsewhere")


class Far(Target):
    """A target that can be built for, not run."""

    name = "far"

    def availability(self) -> Availability:
        return Availability(None, ELSEWHERE)

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        (out / "model").write_text("")
        return Artifact(name, self.name, out, ("model",), 42, 2e-7, 1e-6, "by eye", "its own", ("link it",))

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (Run.refused("far runtime", ELSEWHERE),)


class Refusing(Far):
    name = "refusing"

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        raise CheckFailedError(f"{name}: off by 3")


class Estimating(Far):
    """A target with a model of its device: the original takes 4 ms, the other 2."""

    name = "estimating"
    error = 0.1

    def estimate(self, artifact: Artifact) -> Estimate:
        ms = 4.0 if artifact.model == "original" else 2.0
        return Estimate("a phone", ms, 0.8 * ms, 1.5 * ms, 0.96, self.error, self.error < 0.2)


class Counting(Far):
    """A target whose artifacts an emulator runs."""

    name = "counting"

    def lower(self, name: str, *given: Any, **options: Any) -> Artifact:
        return replace(super().lower(name, *given, **options), instructions=3_000 if name == "original" else 2_000)


class FarOff(Estimating):
    name, error = "far off", 0.3


@pytest.fixture(autouse=True)
def known_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {target.name: target for target in (Near(), Far(), Refusing(), Estimating(), FarOff(), Counting())}
    monkeypatch.setattr(compare, "get_target", known.__getitem__)


@pytest.fixture
def models() -> dict[str, CompareModel]:
    inputs = (torch.zeros(1, 1, 1, 2),)
    return {
        name: CompareModel(name, Brightest(sign).eval(), inputs, PREPROCESSING, ({"id": name},))
        for name, sign in (("original", 1.0), ("exchanged", -1.0))
    }


@pytest.fixture
def images() -> Images:
    return Images(Array(np.array([[[9, 0]], [[0, 9]], [[9, 0]]], np.uint8), "three images"), LABELS)


def test_every_model_has_a_row_for_every_runtime_of_every_target(models: dict[str, CompareModel]) -> None:
    rows = compare_models(models, ["near", "far", "refusing", "near"], repeats=3).rows
    found = [(row.target, row.runtime, row.status, row.size_bytes, row.max_abs_error, row.note) for row in rows]
    expected = [
        ("near", "quick", "measured", 100, 1e-7, "scheduled by hand"),
        ("near", "absent", "unavailable", None, None, "it is not installed"),
        ("far", "far runtime", "unavailable", 42, 2e-7, "it is elsewhere; checked: by eye; schedule: its own; link it"),
    ]
    refused = ("refusing", "–", "unavailable", None, None)
    assert found == [
        *expected,
        (*refused, "original: off by 3"),
        *expected,
        (*refused, "exchanged: off by 3"),
    ]
    assert [row.latency_ms is not None for row in rows] == [row.status == "measured" for row in rows]
    assert [row.sites for row in rows] == [({"id": row.model},) for row in rows]


def test_a_row_is_estimated_where_the_targets_estimate_is_good_enough(models: dict[str, CompareModel]) -> None:
    comparison = compare_models(models, ["estimating"])
    original, exchanged = comparison.rows
    assert (original.status, original.latency_ms) == ("estimated", Quantiles(4.0, 6.0))
    assert "estimated for a phone: 2.00 ms, 1.60 to 3.00" in exchanged.note
    assert "rank correlation is 0.96 and its median error 10%" in exchanged.note
    assert comparison.latency_ratio(exchanged) == 0.5


def test_an_estimate_that_is_too_far_off_gives_an_order_and_no_time(models: dict[str, CompareModel]) -> None:
    rows = compare_models(models, ["far off"]).rows
    assert [(row.status, row.latency_ms) for row in rows] == [("unavailable", None)] * 2
    assert ["number 2 of 2" in rows[0].note, "number 1 of 2" in rows[1].note] == [True, True]
    assert not any(" ms" in row.note for row in rows)


def test_instructions_that_an_emulator_counted_are_an_estimate_without_a_time(models: dict[str, CompareModel]) -> None:
    comparison = compare_models(models, ["counting", "far"])
    told = [(row.target, row.status, row.latency_ms, row.instructions) for row in comparison.rows]
    far = ("far", "unavailable", None, None)
    assert told == [("counting", "estimated", None, 3_000), far, ("counting", "estimated", None, 2_000), far]


def test_quality_is_found_once_per_model_against_the_first(models: dict[str, CompareModel], images: Images) -> None:
    by_model = {row.model: row for row in compare_models(models, ["far"], images).rows}
    assert (by_model["original"].top1, by_model["original"].agreement) == (pytest.approx(200 / 3), None)
    assert (by_model["exchanged"].top1, by_model["exchanged"].agreement) == (pytest.approx(100 / 3), 0.0)


def test_without_labels_there_is_no_accuracy_and_without_images_no_quality(
    models: dict[str, CompareModel], images: Images
) -> None:
    (_, exchanged) = compare_models(models, ["far"], replace(images, y=None)).rows
    assert (exchanged.top1, exchanged.agreement) == (None, 0.0)
    (_, exchanged) = compare_models(models, ["far"]).rows
    assert (exchanged.top1, exchanged.agreement) == (None, None)


def test_all_that_can_run_is_timed_together(models: dict[str, CompareModel], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []
    measure = compare.measure
    monkeypatch.setattr(
        compare, "measure", lambda calls, **options: groups.append(len(calls)) or measure(calls, **options)
    )
    told: list[tuple[str, int, int]] = []
    found = compare_models(models, ["near", "far"], repeats=2, threads=1, progress=lambda *step: told.append(step))
    assert groups == [2]
    assert [step for step in told if step[0] == "build"] == [("build", done, 4) for done in (1, 2, 3, 4)]
    assert [step for step in told if step[0] == "measure"] == [("measure", 1, 2), ("measure", 2, 2)]
    assert found.environment["threads"] == 1


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("module", "shape", "params", "macs"),
    [
        (nn.Linear(8, 5), (2, 3, 8), 45, 3 * 8 * 5),
        (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 7), 4 * 6 * 9 + 6, 49 * 4 * 6 * 9),
        (Attention(), (2, 4, 10, 16), 0, 2 * 4 * 10 * 10 * 16),
    ],
)
def test_costs_are_exact_and_for_one_image(module: nn.Module, shape: tuple[int, ...], params: int, macs: int) -> None:
    assert compare.cost(CompareModel("model", module.eval(), (torch.randn(shape),))) == (params, macs)


def test_models_that_prepare_their_images_differently_are_refused(
    models: dict[str, CompareModel], images: Images
) -> None:
    models["exchanged"] = replace(models["exchanged"], preprocessing=Preprocessing((0.5,), (0.5,)))
    with pytest.raises(
        InputError, match="original and exchanged prepare their images differently: give --mean and --std"
    ):
        compare_models(models, ["far"], images)


def test_models_that_take_other_inputs_are_refused(models: dict[str, CompareModel], images: Images) -> None:
    models["exchanged"] = replace(models["exchanged"], example_inputs=(torch.zeros(1, 1, 2, 1),))
    with pytest.raises(InputError, match=r"original takes inputs of \[\[1, 1, 2\]\] for an image and exchanged of"):
        compare_models(models, ["far"], images)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        compare_models({}, ["near"])


def test_models_that_take_one_batch_size_are_evaluated_with_it(models: dict[str, CompareModel], images: Images) -> None:
    class Pair(Brightest):
        def forward(self, pixels: Tensor) -> Tensor:
            assert len(pixels) == 2
            return super().forward(pixels)

    pair = replace(
        models["exchanged"],
        module=Pair(-1.0),
        any_batch=InBatches(Pair(-1.0), 2),
        example_inputs=(torch.zeros(2, 1, 1, 2),),
    )
    rows = compare_models(models | {"exchanged": pair}, ["far"], images).rows
    assert [row.top1 for row in rows] == [pytest.approx(200 / 3), pytest.approx(100 / 3)]


def test_what_an_earlier_run_has_measured_stands_where_the_model_is_the_same(
    models: dict[str, CompareModel], images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Near, "runs", Quick.runs)
    compare_models(models, ["near", "far"], repeats=1).to_json(tmp_path / "report.json")
    earlier = load_comparison(tmp_path / "report.json")
    changed = replace(models["exchanged"], module=Brightest(-2.0).eval())
    timed = []
    measure = compare.measure
    monkeypatch.setattr(compare, "measure", lambda calls, **how: timed.append(len(calls)) or measure(calls, **how))
    again = compare_models(models, ["near", "far"], images, repeats=1, earlier=earlier)
    other = compare_models(models | {"exchanged": changed}, ["near", "far"], repeats=1, earlier=earlier)
    elsewhere = replace(earlier, environment=earlier.environment | {"processor": "another"})
    anew = compare_models(models, ["near", "far"], repeats=1, earlier=elsewhere)
    assert timed == [1, 2]  # nothing, the changed model, both
    keys = [(row.model, row.target, row.status) for row in earlier.rows]
    assert all([(row.model, row.target, row.status) for row in found.rows] == keys for found in (again, other, anew))
    assert [row.latency_ms for row in again.rows] == [row.latency_ms for row in earlier.rows]
    assert again.rows[0].top1 == pytest.approx(200 / 3)
    kept = [["measured in an earlier run" in row.note for row in found.rows[::2]] for found in (again, other, anew)]
    assert kept == [[True, True], [True, False], [False, False]]


def test_options_go_to_the_targets_that_have_them(models: dict[str, CompareModel]) -> None:
    with pytest.raises(InputError, match="--rpc is for none of the targets near, far: leave it out"):
        compare_models(models, ["near", "far"], options={"rpc": "board:9090", "cpu": None})
