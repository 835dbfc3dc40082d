"""A lowered folder as whoever deploys it has it: artifact.json, and the C++ example that runs it, on ARM, too."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cpp_examples import arm_libraries, linked
from tiny_vits import tiny_vit
from torch import nn

import attnrewrite as ar
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.targets.base import get_target
from attnrewrite.targets.runners import qemu
from attnrewrite.targets.tvm import compat as tvm_compat

CLASSIFY = "classify.cc"
MEAN, STD = (0.5, 0.25, 0.4), (0.2, 0.3, 0.4)
PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
Program = Callable[..., subprocess.CompletedProcess[str]]


def target_or_skip(name: str) -> None:
    if (reason := get_target(name).availability().build) is not None:
        pytest.skip(str(reason))


def lowered(name: str, out: Path, **options: str) -> tuple[nn.Module, Path]:
    """A tiny vision transformer and its folder for a target."""
    target_or_skip(name)
    model, inputs = tiny_vit("softmax", depth=1)
    ar.lower(model, name, out, example_inputs=inputs, mean=MEAN, std=STD, **options)
    return model, out


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREWRITE_OFFLINE", "1")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Program]:
    model, folder = lowered("host", tmp_path_factory.mktemp("host") / "out")
    libraries = tvm_compat.runtime_libraries()
    program = linked("g++", CLASSIFY, tmp_path_factory.mktemp("program"), *libraries)
    paths = {"LD_LIBRARY_PATH": os.pathsep.join(str(library.parent) for library in libraries)}
    return model, folder, lambda *given: run([str(program)], *given, env=os.environ | paths)


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Program]:
    parent = tmp_path_factory.mktemp("arm")
    libraries = arm_libraries(parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNREWRITE_OFFLINE", "1")
        model, folder = lowered("arm-cpu", parent / "out", cpu="cortex-a55")
    command = qemu.emulated(linked(qemu.CROSS_COMPILER, CLASSIFY, folder.parent, *libraries))
    return model, folder, lambda *given: run(command, *given)


def run(command: list[str], *given: object, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *map(str, given)], capture_output=True, text=True, timeout=60, **how)


def ppm(path: Path, pixels: np.ndarray, comment: str = "") -> Path:
    height, width, channels = pixels.shape
    head = f"P{6 if channels == 3 else 5}\n{comment}{width} {height}\n255\n"
    path.write_bytes(head.encode() + pixels.tobytes())
    return path


@pytest.mark.parametrize("machine", ["on_host", "on_arm"])
def test_the_cpp_example_classifies_a_picture_as_torch_does(
    machine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, folder, classify = request.getfixturevalue(machine)
    image = Preprocessing(MEAN, STD)(torch.from_numpy(PIXELS).permute(2, 0, 1)[None])
    best = model(image)[0].topk(5)
    done = classify(folder, ppm(tmp_path / "picture.ppm", PIXELS, "# a comment\n"))
    assert (done.returncode, done.stderr) == (0, "")
    classes, logits = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert [int(name) for name in classes] == best.indices.tolist()
    np.testing.assert_allclose(np.array(logits, float), best.values, rtol=0, atol=1e-5)


# What is given: (the picture's bytes or pixels, what is said).
REFUSED = {
    "another size": (
        PIXELS[:8],
        "takes 3 channels of 16x16, and the picture has 3 of 16x8: magick picture.jpg -resize",
    ),
    "gray": (PIXELS[..., :1], "the picture has 1 of 16x16"),
    "no picture": (b"\x89PNG", "picture.ppm is no binary PPM or PGM of bytes: convert it (magick"),
    "cut short": (b"P6 16 16 255\n123", "picture.ppm is cut short"),
    "no file": (None, "picture.ppm is no binary PPM"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_cpp_example_says_what_it_cannot_use(
    case: str, tmp_path: Path, on_host: tuple[nn.Module, Path, Program]
) -> None:
    given, said = REFUSED[case]
    picture = tmp_path / "picture.ppm"
    if isinstance(given, bytes):
        picture.write_bytes(given)
    elif given is not None:
        ppm(picture, given)
    done = on_host[2](on_host[1], picture)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_record_says_all_that_a_deployment_needs(on_host: tuple[nn.Module, Path, Program]) -> None:
    record = json.loads((on_host[1] / "artifact.json").read_text())
    assert record["inputs"] == [{"shape": [1, 3, 16, 16], "dtype": "float32"}]
    assert record["outputs"] == [{"shape": [1, 10], "dtype": "float32"}]
    assert record["preprocessing"] == {
        "mean": list(MEAN), "std": list(STD), "crop": 1.0, "interpolation": "bicubic", "channels_last": False,
        "dtype": "float32",
    }  # fmt: skip
    assert record["target"] == "host"
    assert record["processor"]["kind"] == "llvm"
    assert set(record["runtime"]) == {"apache-tvm", "apache-tvm-ffi"}
    assert {each["rule"] for each in record["operators"]} >= {"attention", "matmul"}
    assert 0 < record["max_abs_error"] <= record["tolerance"]
    assert record["files"] == ["model.so"]


def test_code_for_android_is_object_files_of_its_own(tmp_path: Path) -> None:
    target_or_skip("arm-cpu")
    inputs, options = (torch.ones(1, 8),), {"system": "android", "cpu": "cortex-x1"}
    ar.lower(nn.Linear(8, 4).eval(), "arm-cpu", tmp_path / "out", example_inputs=inputs, **options)
    record = json.loads((tmp_path / "out" / "artifact.json").read_text())
    assert record["files"] == ["model.tar"]
    assert record["processor"] | {"mattr": None} == {
        "kind": "llvm", "mtriple": "aarch64-linux-android", "mcpu": "cortex-x1", "mattr": None,
    }  # fmt: skip
    assert "aarch64 code not executed: it is for android, which is not emulated here" in record["check"]
    assert "object files: link them to a library with the compiler for android" in record["notes"]
