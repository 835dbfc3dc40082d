"""Packages that are damaged or mean harm: one line and exit 2 from every command that reads one, and nothing left."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnrewrite.cli.main import main

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402

INSIDE = Path("Data/com.apple.CoreML")
MODEL, WEIGHTS, MANIFEST = INSIDE / "model.mlmodel", INSIDE / "weights/weight.bin", Path("Manifest.json")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product with a weight, and something after it, in float32."""
    opset = ct.target.iOS17
    weight = torch.randn(16, 12, generator=torch.Generator().manual_seed(0)).numpy()
    program = mb.program(input_specs=[mb.TensorSpec(shape=(1, 12))], opset_version=opset)(
        lambda x: mb.softmax(x=mb.relu(x=mb.linear(x=x, weight=weight)), axis=-1)
    )
    package = tmp_path_factory.mktemp("sound") / "sound.mlpackage"
    made = ct.convert(program, minimum_deployment_target=opset, skip_model_load=True)
    made.save(str(package))
    return package


def bytes_of(file: Path, change: Callable[[bytes], bytes]) -> Damage:
    return lambda package: (package / file).write_bytes(change((package / file).read_bytes()))


def manifest(change: Callable[[Any], object]) -> Damage:
    def damage(package: Path) -> None:
        read = json.loads((package / MANIFEST).read_text())
        change(read)
        (package / MANIFEST).write_text(json.dumps(read))

    return damage


def entry(read: Any, name: str) -> Any:
    return next(each for each in read["itemInfoEntries"].values() if each["name"] == name)


def specification(change: Callable[[Any], object]) -> Damage:
    """Change the model's description, a protocol buffer."""

    def damage(package: Path) -> None:
        from coremltools.proto.Model_pb2 import Model

        read = Model.FromString((package / MODEL).read_bytes())
        change(read)
        (package / MODEL).write_bytes(read.SerializeToString())

    return damage


def block(read: Any) -> Any:
    function = read.mlProgram.functions["main"]
    return function.block_specializations[function.opset]


def operator(read: Any, number: int) -> Any:
    return [each for each in block(read).operations if each.type != "const"][number]


def operand(read: Any, number: int, name: str) -> None:
    operator(read, number).inputs["x"].arguments[0].name = name


def stored(read: Any) -> Any:
    """The first value that lies in the file of weights."""
    values = (each for one in block(read).operations for each in one.attributes.values())
    return next(each for each in values if each.WhichOneof("value") == "blobFileValue")


def sized(read: Any, size: int) -> None:
    stored(read).type.tensorType.dimensions[0].constant.size = size


def neural_network(read: Any) -> None:
    read.Clear()
    read.specificationVersion = 4
    read.neuralNetwork.SetInParent()


def nested(read: Any) -> None:
    inner = operator(read, 1).blocks.add()
    for _ in range(2000):
        inner = inner.operations.add().blocks.add()


def link_to(file: Path, there: str) -> Damage:
    def damage(package: Path) -> None:
        (package / file).unlink()
        (package / file).symlink_to(there)

    return damage


def moved_out(package: Path) -> None:
    shutil.move(package / "Data", package.parent / "elsewhere")
    (package / "Data").symlink_to(package.parent / "elsewhere")


def pipe(file: Path) -> Damage:
    def damage(package: Path) -> None:
        (package / file).unlink()
        os.mkfifo(package / file)

    return damage


UNREADABLE = r"cannot be read as a Core ML program \(.+\): fetch it again"
OUTSIDE = "which is outside of it: do not trust it"
PIPE = "is neither a file nor a folder: fetch the package again"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "the model is cut off": (bytes_of(MODEL, lambda data: data[:200]), UNREADABLE),
    "the model is empty": (bytes_of(MODEL, lambda data: b""), "holds no model, not an ML program"),
    "the model is zeros": (bytes_of(MODEL, lambda data: bytes(4000)), UNREADABLE),
    "no model": (lambda package: (package / MODEL).unlink(), UNREADABLE),
    "weights are cut off": (bytes_of(WEIGHTS, lambda data: data[:100]), UNREADABLE),
    "weights are empty": (bytes_of(WEIGHTS, lambda data: b""), UNREADABLE),
    "no weights": (lambda package: (package / WEIGHTS).unlink(), UNREADABLE),
    "nothing inside": (lambda package: shutil.rmtree(package / "Data"), UNREADABLE),
    "no manifest": (lambda package: (package / MANIFEST).unlink(), UNREADABLE),
    "the manifest is no JSON": (bytes_of(MANIFEST, lambda data: b"{"), UNREADABLE),
    "the manifest is a list": (bytes_of(MANIFEST, lambda data: b"[1]"), UNREADABLE),
    "the manifest is deep": (bytes_of(MANIFEST, lambda data: b"[" * 100_000), UNREADABLE),
    "no root": (manifest(lambda read: read.pop("rootModelIdentifier")), UNREADABLE),
    "the root is unknown": (manifest(lambda read: read.update(rootModelIdentifier="x")), UNREADABLE),
    "a path is a number": (manifest(lambda read: entry(read, "weights").update(path=3)), UNREADABLE),
    "a path has a zero byte": (manifest(lambda read: entry(read, "weights").update(path="a\0b")), UNREADABLE),
    "a version of the manifest to come": (manifest(lambda read: read.update(fileFormatVersion="9.0.0")), UNREADABLE),
    "a path leads upwards": (manifest(lambda read: entry(read, "weights").update(path="../../../..")), OUTSIDE),
    "a path is absolute": (manifest(lambda read: entry(read, "model.mlmodel").update(path="/etc/passwd")), OUTSIDE),
    "weights are a link elsewhere": (link_to(WEIGHTS, "/etc/passwd"), OUTSIDE),
    "all is a link elsewhere": (moved_out, OUTSIDE),
    "a ring of links": (link_to(MODEL, "model.mlmodel"), UNREADABLE),
    "the model is a pipe": (pipe(MODEL), PIPE),
    "weights are a pipe": (pipe(WEIGHTS), PIPE),
    "the manifest is a pipe": (pipe(MANIFEST), PIPE),
    "a neural network": (specification(neural_network), "holds neuralNetwork, not an ML program: convert its model"),
    "a version to come": (specification(lambda read: setattr(read, "specificationVersion", 99)), UNREADABLE),
    "weights past the end": (
        specification(lambda read: setattr(stored(read).blobFileValue, "offset", 1 << 40)),
        UNREADABLE,
    ),
    "weights between two": (specification(lambda read: setattr(stored(read).blobFileValue, "offset", 3)), UNREADABLE),
    "weights of another file": (
        specification(lambda read: setattr(stored(read).blobFileValue, "fileName", "@model_path/../../../etc/passwd")),
        UNREADABLE,
    ),
    "more weights than memory": (specification(lambda read: sized(read, 1 << 45)), UNREADABLE),
    "weights of another size": (specification(lambda read: sized(read, 7)), UNREADABLE),
    "an unknown operator": (specification(lambda read: setattr(operator(read, 1), "type", "frobnicate")), UNREADABLE),
    "an unknown name": (specification(lambda read: operand(read, 1, "nobody")), UNREADABLE),
    "operators in a ring": (
        specification(lambda read: operand(read, 1, operator(read, 2).outputs[0].name)),
        UNREADABLE,
    ),
    "no operators": (specification(lambda read: block(read).ClearField("operations")), UNREADABLE),
    "nothing gives the output": (specification(lambda read: block(read).outputs.__setitem__(0, "none")), UNREADABLE),
    "blocks within blocks": (specification(nested), UNREADABLE),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_hostile_package_is_told_in_one_line(
    name: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, why = DAMAGES[name]
    package, out = tmp_path / "some.mlpackage", tmp_path / "out"
    shutil.copytree(sound, package)
    damage(package)
    for command in (["explain", str(package)], ["lower", str(package), "--target", "coreml-npu", "--out", str(out)]):
        assert main(command) == 2
        printed = capfd.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert re.search(why, line), line
        assert not out.exists()


def test_the_package_that_is_damaged_is_sound(sound: Path, tmp_path: Path) -> None:
    assert main(["explain", str(sound)]) == 0
    assert main(["lower", str(sound), "--target", "coreml-npu", "--out", str(tmp_path / "out")]) == 0
