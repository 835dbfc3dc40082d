"""From a module to a package that is confirmed: what float16 cannot hold, and what small modules are made of."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets.coreml import interpreter
from attnrewrite.targets.coreml.lowering import Confirmed, lower
from attnrewrite.targets.prepare import reference, specialise

pytest.importorskip("coremltools", reason="coremltools is not installed")

X = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)) + 0.5


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def lowered(function: Callable[[Tensor], object], out: Path) -> Confirmed:
    module = Called(function)
    return lower("it", specialise(module, (X,)), (X,), reference(module, (X,)), out)


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


def test_a_sensitive_module_is_allowed_what_rounding_does_to_it(tmp_path: Path) -> None:
    made = lowered(lambda x: (x + 100) - 100.0, tmp_path)
    assert made.float16.sensitivity > 1
    assert "rounding costs this model" in made.notes()[0]


SMALL: dict[str, Callable[[Tensor], object]] = {
    "windows of a map": lambda x: x.unfold(2, 4, 2).unfold(3, 4, 2).reshape(1, 4, -1, 16) * 2,
    "windows summed": lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1),
    "a smaller map": lambda x: F.interpolate(x, (4, 5), mode="bilinear") + F.interpolate(x, (4, 5)),
    "a constant output": lambda x: (x * 2, torch.ones(3)),
    "cosines": lambda x: F.cosine_similarity(x[:, :, None], x[:, None], dim=-1),
    "what torch writes in primitives": lambda x: torch.diag_embed(x) + 1,
    "no number": lambda x: torch.log_softmax(x, 1).argmax(1),
}


def test_small_modules_become_packages(tmp_path: Path) -> None:
    def every(x: Tensor) -> tuple[object, ...]:
        return tuple(function(x) for function in SMALL.values())

    made = lowered(every, tmp_path)
    assert made.notes() == ()


def test_a_package_that_float32_does_not_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "beyond_half", lambda program, inputs: ())
    with pytest.raises(CheckFailedError, match="float16 overflows first in"):
        lowered(lambda x: torch.tanh((x * 3e5) * 1e-5), tmp_path)
