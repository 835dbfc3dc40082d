"""What TVM's targets cannot lower: one line that says why and the way out, and nothing left behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import tvm_ffi
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.errors import InputError

tvm = pytest.importorskip("tvm")


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
# What a model does: (the function, its input, what is said).
MODELS: dict[str, tuple[Callable[[Tensor], object], Tensor, str]] = {
    "chooses by value": (
        lambda x: x[x > 0],
        X,
        r"index\.Tensor \(node 'index'\) has a size that follows from values, and TVM",
    ),
    "counts by value": (
        lambda x: x.nonzero(),
        X,
        r"nonzero\.default \(node 'nonzero'\) has a size that follows from values",
    ),
    "branches by value": (lambda x: x + 1 if x.sum() > 0 else x, X, "a branch or a size in it follows from values"),
    "takes complex numbers": (lambda x: x.abs(), X.to(torch.complex64), "input 'x' is complex64, which TVM's code"),
    "computes in complex numbers": (lambda x: torch.fft.fft(x).abs(), X, r"fft.* is complex64, which TVM's code"),
    "takes float8": (lambda x: x.float(), X.to(torch.float8_e4m3fn), "input 'x' is float8_e4m3fn, which TVM's code"),
    "convolves in float64": (
        lambda x: nn.functional.conv2d(x[None], x[None, None, :2, :2], x.sum()[None]),
        X.double(),
        r"convolution.*: compute there in float32, or lower",
    ),
    "gives text": (lambda x: "text", X, "the model gives no tensor"),
    "gives nothing": (lambda x: None, X, "the model gives no tensor"),
}


@pytest.mark.parametrize("target", ["host", "arm-cpu"])
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_compiled(case: str, target: str, tmp_path: Path) -> None:
    function, x, said = MODELS[case]
    with pytest.raises(InputError, match=said) as caught:
        ar.lower(Module(function).eval(), target, tmp_path / "out", example_inputs=(x,))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def script(folder: Path, text: str) -> str:
    """A compiler that says something and fails."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit 1\n")
    path.chmod(0o755)
    return str(path)


# What the machine lacks: (how, what is said).
MACHINES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], str]] = {
    "a compiler": (
        lambda patch, folder: (patch.setenv("PATH", ""), patch.delenv("CXX", False)),
        "install g++ or clang",
    ),
    "the compiler that is named": (lambda patch, folder: patch.setenv("CXX", "no-such-c++"), "no-such-c++ cannot link"),
    "a library": (
        lambda patch, folder: patch.setenv("CXX", script(folder, "ld: cannot find -lm")),
        "cannot link model.so: ld: cannot find -lm",
    ),
    "room on the disk": (
        lambda patch, folder: patch.setenv("CXX", script(folder, "ld: final link failed: No space left on device")),
        "out: No space left on device",
    ),
    "room for the record": (
        lambda patch, folder: patch.setattr("attnrewrite.targets.base.write_record", no_room),
        "out: No space left on device",
    ),
    "LLVM": (
        lambda patch, folder: patch.setattr(tvm, "get_global_func", without_llvm),
        "this TVM was built without LLVM: install",
    ),
}


def no_room(*given: object) -> None:
    raise OSError(28, os.strerror(28))


def without_llvm(name: str, allow_missing: bool = False) -> object:
    return None if "llvm" in name else tvm_ffi.get_global_func(name, allow_missing)


@pytest.mark.parametrize("case", MACHINES)
def test_a_machine_that_cannot_compile(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange, said = MACHINES[case]
    (tmp_path / "tools").mkdir()
    (tmp_path / "tiny.py").write_text("import torch\n\ndef linear():\n    return torch.nn.Conv2d(1, 2, 2)\n")
    arrange(monkeypatch, tmp_path / "tools")
    out = tmp_path / "made" / "out"
    model = [f"{tmp_path / 'tiny.py'}:linear", "--input-size", "1x4x4"]
    assert main(["lower", *model, "--target", "host", "--out", str(out)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("attnrewrite: error: ")
    assert said in told
    assert not (tmp_path / "made").exists()


def test_a_processor_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lower = ["lower", "no.pt2", "--out", str(tmp_path / "out"), "--target", "arm-cpu", "--cpu", "cortex-a77"]
    assert main(lower) == 2
    assert "unknown ARM processor 'cortex-a77': did you mean 'cortex-a7" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
