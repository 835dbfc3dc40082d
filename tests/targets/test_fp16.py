"""Whole models in float16, and in it beside integers, on an ARM core: how far off, how small, and what stops them."""

from pathlib import Path

import pytest
import torch
from tiny_vits import tiny_vit
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets import agreement
from attnrewrite.targets.base import Artifact, get_target
from attnrewrite.targets.devices.in_precision import meant
from attnrewrite.targets.prepare import Prepared
from attnrewrite.targets.runners import programs, qemu

pytest.importorskip("tvm")

CORE = "cortex-a76"


def lowered(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path, precision: str) -> Artifact:
    folder.mkdir()
    target = get_target("arm-cpu").configured(cpu=CORE, precision=precision)
    with torch.no_grad():
        return target.lower("it", module.eval(), inputs, folder, threads=1)


class Scaled(nn.Module):
    """Two linear layers and a number between them."""

    def __init__(self, between: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.between)


@pytest.mark.parametrize("attention", ["softmax", "l1"])
def test_a_vision_transformer_within_float16s_tolerance(attention: str, tmp_path: Path) -> None:
    model, inputs = tiny_vit(attention, depth=1)
    half, single = (lowered(model, inputs, tmp_path / name, name) for name in ("fp16", "fp32"))
    assert half.precision == "fp16"
    assert half.schedule.endswith("cortex-a76, 8 float16 a vector, products in fp16")
    assert single.max_abs_error < half.max_abs_error <= half.tolerance
    assert [port.dtype for port in (*half.inputs, *half.outputs)] == ["float32", "float32"]
    assert [each.rule for each in half.operators] == [each.rule for each in single.operators]
    assert half.size_bytes < single.size_bytes
    if single.instructions is not None:
        assert half.instructions is not None
        assert half.instructions < single.instructions


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_without_an_emulator_the_program_runs_here_in_float16(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*_: object) -> None:
        raise programs.Unavailable("there is none")

    monkeypatch.setattr(qemu, "execute", execute)
    torch.manual_seed(0)
    model, inputs = Scaled(1.0), (torch.randn(5, 48),)
    half, single = (lowered(model, inputs, tmp_path / name, name) for name in (precision, "fp32"))
    assert half.check.endswith("aarch64 code not executed: there is none")
    assert single.max_abs_error * 100 < half.max_abs_error <= half.tolerance


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_overflows_is_named_and_told_the_way_out(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(5, 48),)
    said = r"in float16, mul 'mul' overflows: it reaches .*, and 65504 is the most: lower it with --precision fp32"
    with pytest.raises(CheckFailedError, match=said):
        lowered(Scaled(1e6), inputs, tmp_path / precision, precision)


def test_float32_holds_what_float16_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lowered(Scaled(1e6), (torch.randn(5, 48),), tmp_path / "fp32", "fp32")


def test_weights_that_overflow_are_named(tmp_path: Path) -> None:
    model = nn.Linear(48, 4)
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    with pytest.raises(CheckFailedError, match=r"in float16, \w+ '\w*weight' overflows: it reaches 1e\+05"):
        lowered(model, (1e-3 * torch.randn(5, 48),), tmp_path / "fp16", "fp16")


def test_sums_that_overflow_though_no_result_does_are_told(tmp_path: Path) -> None:
    model = nn.Linear(48, 4)
    with torch.no_grad():
        model.weight[:] = torch.tensor([3e4, -3e4]).repeat(4, 1).repeat_interleave(24, 1)
    with pytest.raises(CheckFailedError, match="no operator's result is beyond 65504, the most, but a sum on the way"):
        lowered(model, (torch.ones(5, 48),), tmp_path / "fp16", "fp16")


@pytest.mark.parametrize("between", [1e-7, 1e4])
def test_small_numbers_and_large_ones_are_no_reason_to_stop(between: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = lowered(Scaled(between), (torch.randn(5, 48),), tmp_path / "fp16", "fp16")
    assert made.max_abs_error <= made.tolerance


def test_an_error_that_float32_would_not_make_passes_in_fp16_alone() -> None:
    module, inputs = nn.Linear(8, 4).eval(), (torch.randn(3, 8),)
    with torch.no_grad():
        expected = module(*inputs).numpy()
    off = expected + agreement.FLOAT16 / 2 * abs(expected).max()
    assert meant(Prepared(module, inputs), "fp16", CORE).agree("it", [off]).max_abs_error > 0
    with pytest.raises(CheckFailedError, match="more than the"):
        meant(Prepared(module, inputs), "fp32", CORE).agree("it", [off])
    with pytest.raises(CheckFailedError, match="lower it with --precision fp32"):
        meant(Prepared(module, inputs), "fp16", CORE).agree(
            "it", [expected + 2 * agreement.FLOAT16 * abs(expected).max()]
        )
