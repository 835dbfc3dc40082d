"""From a module to a package that is confirmed: what float16 cannot hold, and what small modules are made of."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.targets.agreement import Agreement
from attnrewrite.targets.base import get_target
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport
from attnrewrite.targets.coreml.lowering import Confirmed, lower
from attnrewrite.targets.coreml.package import DEFAULT, Wanted
from attnrewrite.targets.prepare import canonical, reference, specialise

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")

X = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)) + 0.5


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def lowered(function: Callable[[Tensor], object], out: Path, wanted: Wanted = DEFAULT) -> Confirmed:
    module = Called(function)
    return lower("it", specialise(module, (X,)), (X,), reference(module, (X,)), out, wanted)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: torch.tanh((x * 3e5) * 1e-5), ("mul", "mul")),  # too large between the two
        (lambda x: torch.tanh((x * 1e-7) * 1e7), ("mul", "mul")),  # too small
    ],
)
def test_what_float16_cannot_hold_stays_in_float32_and_is_named(
    function: Callable[[Tensor], Tensor], kept: tuple[str, ...], tmp_path: Path
) -> None:
    made = lowered(function, tmp_path)
    program = interpreter.load(made.path)
    types = {each.name: each.op_type for each in program.functions["main"].operations}
    assert tuple(types[name] for name in made.wide) == kept
    assert len(made.engine.breaking("wide-type")) == len(kept)
    assert [note.split(",")[0] for note in made.notes()] == ["2 operators stay in float32"]


def test_a_module_that_rounding_moves_further_is_told() -> None:
    made = Confirmed(Path("it"), Agreement(0.0, 1.0), Agreement(0.1, 1.0, sensitivity=3.0), EngineReport(()))
    assert made.notes() == ("rounding costs this model 3.0 times what it costs others",)


SMALL: dict[str, Callable[[Tensor], object]] = {
    "windows of a map": lambda x: x.unfold(2, 4, 2).unfold(3, 4, 2).reshape(1, 2, -1, 16) * 2,
    "a smaller map": lambda x: F.interpolate(x, (4, 5), mode="bilinear") + F.interpolate(x, (4, 5)),
    "a constant output": lambda x: (x * 2, torch.ones(3)),
    "cosines": lambda x: F.cosine_similarity(x[:, :, None], x[:, None], dim=-1),
    "what torch writes in primitives": lambda x: torch.diag_embed(x) + 1,
}


def test_small_modules_become_packages_that_say_what_they_are(tmp_path: Path) -> None:
    def every(x: Tensor) -> tuple[object, ...]:
        return tuple(function(x) for function in SMALL.values())

    made = lowered(every, tmp_path, Wanted(minimum="iOS18", about="five modules"))
    assert made.notes() == ()
    specification = ct.models.MLModel(str(made.path), skip_model_load=True).get_spec()
    assert specification.specificationVersion == ct.target.iOS18
    said = specification.description.metadata
    assert said.shortDescription == "five modules"
    assert {"attnrewrite.version", "attnrewrite.layout"} < set(said.userDefined)


@pytest.mark.parametrize(
    ("target", "minimum", "told"),
    [("coreml-npu", "ios18", "did you mean 'iOS18'"), ("host", "iOS18", "has no --minimum-target: leave it out")],
)
def test_a_system_that_a_target_is_not_for_is_refused(target: str, minimum: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        get_target(target).configured(minimum_target=minimum)


def test_a_package_that_float32_does_not_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "beyond_half", lambda program, inputs: ())
    with pytest.raises(CheckFailedError, match="float16 overflows first in"):
        lowered(lambda x: torch.tanh((x * 3e5) * 1e-5), tmp_path)


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    ("said", "where", "told"),
    [
        ("[MIL FileWriter]: Unknown error occurred while writing data to the file.", "out", "set TMPDIR to a folder"),
        (f"[('weight.bin', 'weight.bin', '[Errno 28] {FULL}')]", "out", f"cannot write .*out: {FULL}"),
        (f"[('weight.bin', 'weight.bin', '[Errno 28] {FULL}')]", "temporary/float32", "set TMPDIR to a folder"),
    ],
)
def test_a_full_disk_is_told_as_such(
    said: str, where: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(package, "_converted", fails)
    module = nn.Linear(2, 2).eval()
    program = canonical(specialise(module, (torch.randn(1, 2),)))
    with pytest.raises(InputError, match=told):
        package.convert(program, tmp_path / where, "FLOAT16")
