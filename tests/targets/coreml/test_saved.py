"""Packages that others saved: laid out anew for the engine, and held to themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vits import tiny_vit
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.errors import CheckFailedError, InputError

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402

from attnrewrite.targets import agreement  # noqa: E402
from attnrewrite.targets.base import get_target  # noqa: E402
from attnrewrite.targets.coreml import interpreter, package, saved  # noqa: E402
from attnrewrite.targets.coreml.engine_rules import lint  # noqa: E402


def written(tmp_path: Path, layout: str = "as-is", **options: Any) -> Path:
    model, inputs = tiny_vit("softmax")
    folder = tmp_path / "before"
    folder.mkdir()
    get_target("coreml-npu").configured(layout=layout, **options).lower("vit", model.eval(), inputs, folder, threads=1)
    return folder / package.NAME


def transposes(path: Path) -> int:
    with package.quiet():
        operations = interpreter.load(path).functions["main"].operations
    return sum(each.op_type == "transpose" for each in operations)


def test_a_package_in_the_exporters_layout_comes_into_the_engines(tmp_path: Path) -> None:
    before = written(tmp_path)
    made = ar.lower(before, "coreml-npu", tmp_path / "out")
    after = tmp_path / "out" / package.NAME
    assert transposes(after) < transposes(before) / 2
    with package.quiet():
        one, other = interpreter.load(before), interpreter.load(after)
    assert lint(other).staying() == (1.0, 1.0)
    _, inputs = tiny_vit("softmax")
    feed = dict(zip(one.functions["main"].inputs, (inputs[0] * 2,), strict=True))
    found, wanted = (interpreter.interpret(each, feed, rounded=False).outputs for each in (other, one))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) <= agreement.FLOAT32 * float(value.abs().max())
    assert made.max_abs_error <= made.tolerance
    assert made.check.startswith("interpreted beside the package before; in float32 within ")
    assert "before, by known rules" in made.notes[0]


class Scaled(nn.Module):
    """An attention that is written out, its queries scaled, and a batch norm behind its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48)
        self.proj, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = ((query * 8**-0.5) @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.norm(self.proj(mixed.transpose(1, 2).flatten(2)).flatten(0, 1))


def test_a_program_of_float16_stays_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before, image = tmp_path / "before", torch.randn(1, 3, 16, 16)
    before.mkdir()
    get_target("coreml-npu").configured(layout="as-is").lower("vit", Scaled().eval(), (image,), before, threads=1)
    ar.lower(before / package.NAME, "coreml-npu", tmp_path / "out")
    with package.quiet():
        program = interpreter.load(tmp_path / "out" / package.NAME)
    assert lint(program).staying() == (1.0, 1.0)
    assert "batch_norm" not in {each.op_type for each in program.functions["main"].operations}


def of(shape: tuple[int, ...], build: Callable[[Any], Any], target: str = "iOS17") -> Any:
    opset = getattr(ct.target, target)
    program = mb.program(input_specs=[mb.TensorSpec(shape=shape)], opset_version=opset)(lambda x: build(x))
    return ct.convert(program, minimum_deployment_target=opset, skip_model_load=True)


def compressed(tmp_path: Path) -> Path:
    return written(tmp_path, compress="int8")


def older(tmp_path: Path) -> Path:
    of((1, 4), lambda x: mb.relu(x=x), "iOS15").save(str(tmp_path / "old.mlpackage"))
    return tmp_path / "old.mlpackage"


def picture(tmp_path: Path) -> Path:
    opset = ct.target.iOS17
    program = mb.program(input_specs=[mb.TensorSpec(shape=(1, 3, 4, 4))], opset_version=opset)(lambda x: mb.relu(x=x))
    takes = [ct.ImageType(name="x", shape=(1, 3, 4, 4))]
    ct.convert(program, inputs=takes, minimum_deployment_target=opset, skip_model_load=True).save(
        str(tmp_path / "picture.mlpackage")
    )
    return tmp_path / "picture.mlpackage"


def flexible(tmp_path: Path) -> Path:
    opset = ct.target.iOS17
    program = mb.program(input_specs=[mb.TensorSpec(shape=(1, 4))], opset_version=opset)(lambda x: mb.relu(x=x))
    model = ct.convert(program, minimum_deployment_target=opset, skip_model_load=True)
    spec = model.get_spec()
    spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges.add().upperBound = 8
    ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True).save(str(tmp_path / "some.mlpackage"))
    return tmp_path / "some.mlpackage"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (compressed, "has compressed weights"),
        (older, "is for systems before iOS17"),
        (picture, r"takes what is no array \(imageType\)"),
        (flexible, "takes several shapes"),
    ],
)
def test_what_would_be_lost_is_refused(make: Callable[[Path], Path], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{why}, which laying it out anew would lose: lower the model"):
        ar.lower(make(tmp_path), "coreml-npu", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("host", {}, "target 'host' lowers models, and .* is a package of Core ML: give coreml-npu"),
        ("coreml-npu", {"compress": "int8"}, "a package keeps its inputs, .*: leave --compress out"),
        ("coreml-npu", {"data": "test.npz"}, "has no model to be measured beside: leave --data out"),
    ],
)
def test_what_says_nothing_of_a_package_is_refused(
    target: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "some.mlpackage").mkdir()
    with pytest.raises(InputError, match=why):
        ar.lower(tmp_path / "some.mlpackage", target, tmp_path / "out", **options)
    with pytest.raises(InputError, match="there is no package"):
        ar.lower(tmp_path / "none.mlpackage", "coreml-npu", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_program_than_the_one_before_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written(tmp_path)

    def other(source: Path, program: Any, layout: str, out: Path) -> Path:
        twice = of(tuple(program.functions["main"].inputs["images"].shape), lambda x: mb.mul(x=x, y=np.float32(2)))
        twice.save(str(out / package.NAME))
        return out / package.NAME

    monkeypatch.setattr(saved, "_through_passes", other)
    monkeypatch.setattr(saved, "_drawn", lambda *_: {"images": torch.ones(1), "x": torch.ones(1)})
    monkeypatch.setattr(
        saved, "_given", lambda program, *_: (np.full(3, float(len(program.functions["main"].operations))),)
    )
    with pytest.raises(CheckFailedError, match="differs"):
        ar.lower(before, "coreml-npu", tmp_path / "out")
    assert not (tmp_path / "out").exists()
