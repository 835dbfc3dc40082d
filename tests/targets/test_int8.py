"""Artifacts whose linear layers are on integers: what is recorded, what they cost on images, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vits import tiny_vit
from torch import nn

import attnrewrite as ar
from attnrewrite.cli.output import made_lines
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.evaluation.compare import CompareModel, compare_models
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.targets import prepare
from attnrewrite.targets.base import get_target
from attnrewrite.targets.prepare import Prepared, quantised
from attnrewrite.targets.tvm.schedules.precision import refusal, stored
from attnrewrite.targets.tvm.schedules.profile import profile

pytest.importorskip("tvm")


def int8_or_skip(name: str) -> None:
    if name == "host" and refusal("int8", profile("host")) is not None:
        pytest.skip("this processor has no instructions for int8")


@pytest.mark.parametrize("name", ["host", "arm-cpu"])
def test_what_it_costs_is_measured_and_kept(name: str, tmp_path: Path) -> None:
    int8_or_skip(name)
    model, inputs = tiny_vit("softmax", depth=1)
    images = torch.randint(256, (6, *inputs[0].shape[1:]), dtype=torch.uint8)
    how: dict[str, Any] = {"mean": 0.5, "std": 0.5}
    made = ar.lower(model, name, tmp_path / "out", example_inputs=inputs, precision="int8", data=images, **how)
    assert made.max_abs_error <= made.tolerance
    record = json.loads((made.path / "artifact.json").read_text())
    assert record["precision"] == "int8"
    assert {"matmul int8", "attention"} <= {each["rule"] for each in record["operators"]}
    assert any("linear layers in int8" in note for note in record["notes"])
    dtype = stored("int8", profile("cortex-a76" if name == "arm-cpu" else name))
    assert f"what is not of int8 is stored and multiplied in {dtype}" in record["notes"]
    artifact = record["measured"]["artifact"]
    assert artifact["n"] == 6
    assert 0 < artifact["logit_mse"] < 1e-2 * float(model(inputs[0]).square().mean())
    line = made_lines(made).splitlines()[-1]
    assert line.startswith(f"the artifact on 6 images: agreement with the model {artifact['agreement']:.2f} %, squared")


@pytest.mark.parametrize("name", ["host", "arm-cpu"])
def test_without_images_nothing_is_lowered(name: str, tmp_path: Path) -> None:
    int8_or_skip(name)
    why = rf"target '{name}' loses accuracy with --precision int8: give images to measure that on \(--data\)"
    with pytest.raises(InputError, match=why):
        ar.lower(nn.Linear(4, 4), name, tmp_path / "out", example_inputs=(torch.ones(1, 4),), precision="int8")
    assert not (tmp_path / "out").exists()


def test_a_core_without_the_instructions_is_named() -> None:
    why = r"cortex-a72 has no instructions for int8 \(dotprod or .*\): leave it out, or give --cpu .*a76"
    with pytest.raises(InputError, match=why):
        get_target("arm-cpu").configured(cpu="cortex-a72", precision="int8")


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no linear layer, and nothing else is computed in int8: leave --precision out"
    ):
        get_target("arm-cpu").configured(precision="int8").lower(
            "norm", nn.LayerNorm(8).eval(), (torch.ones(2, 8),), tmp_path, threads=1
        )


def test_an_artifact_that_is_further_off_than_rounding_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def other(given: Prepared) -> Prepared:
        made = quantised(given)
        return Prepared(nn.Sequential(made.module, nn.Hardtanh(-0.1, 0.1)), made.inputs, made.notes, made.unrounded)

    real = prepare.specialise
    monkeypatch.setattr("attnrewrite.targets.devices.in_precision.quantised", other)
    monkeypatch.setattr(  # what is compiled is another module than what is meant
        "attnrewrite.targets.devices.arm_cpu.specialise", lambda module, inputs: real(module[0], inputs)
    )
    torch.manual_seed(0)
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).eval()
    how: dict[str, Any] = {"mean": 0.5, "std": 0.5, "example_inputs": (torch.randn(1, 3, 8, 8),)}
    with pytest.raises(CheckFailedError, match="its output differs from the module's by"):
        ar.lower(model, "arm-cpu", tmp_path / "out", precision="int8", data=images, **how)
    assert not (tmp_path / "out").exists()


def test_a_comparison_tells_no_accuracy_that_was_not_measured() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).eval(), (torch.randn(1, 3, 8, 8),)
    compared = CompareModel("linear", model, inputs, Preprocessing((0.5,) * 3, (0.5,) * 3))
    images = ar.images.dataset.load_images(torch.randint(256, (4, *inputs[0].shape[1:]), dtype=torch.uint8))
    found = compare_models({"linear": compared}, ["arm-cpu"], images, options={"precision": "int8"})
    (row,) = found.rows
    assert get_target("host").loses("torch eager") is None
    assert found.environment["targets"]["arm-cpu"].endswith("precision=int8")
    assert row.agreement is None
    assert row.top1 is None
    assert "products in int8" in row.note
