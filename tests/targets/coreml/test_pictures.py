"""Packages that take pictures and answer with names: what they hold, what they give, what is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vits import tiny_vit
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.sources import load_source
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import Artifact
from attnrewrite.targets.coreml import interpreter, labels
from attnrewrite.targets.pictures import OfPictures
from attnrewrite.targets.record import Labels, Port

BYTES = torch.arange(256.0).view(1, 1, 16, 16)


@pytest.mark.parametrize(
    ("mean", "std"),
    [((0.5,), (0.5,)), ((0.0,), (1.0,)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,), (0.2, 0.3, 0.4))],
)
def test_every_byte_is_preprocessed_as_it_would_be_before(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    known = Preprocessing(mean, std)
    picture = BYTES.expand(1, max(len(mean), len(std)), 16, 16)
    found = OfPictures(nn.Identity(), known, picture)(picture)
    torch.testing.assert_close(found, known(picture), rtol=0, atol=1e-6)


def test_float16_loses_no_byte_before_the_mean_is_taken_away() -> None:
    known = Preprocessing((0.485,), (0.229,))
    half = OfPictures(nn.Identity(), known, BYTES).half()
    torch.testing.assert_close(half(BYTES.half()).float(), known(BYTES), rtol=2**-9, atol=2**-11)
    assert (half.dtype, half.centre.item()) == (torch.float32, 124)


class Classify(nn.Module):
    """[B, C, 8, 8] -> [B, 4], as they are or as probabilities; or of bytes [B, 8, 8, C]."""

    def __init__(self, channels: int, last: str = "logits") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.patches, self.head, self.last = nn.Conv2d(channels, 16, 4, 4), nn.Linear(16, 4), last
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float().permute(0, 3, 1, 2) / 255 if self.last == "bytes" else x
        x = self.head(torch.tanh(self.patches(x)).mean((2, 3)))
        return x.softmax(-1) if self.last == "probabilities" else x


@dataclass(frozen=True)
class Case:
    """A model, how it is lowered, and what its package's image is."""

    model: nn.Module
    example: Tensor
    options: dict[str, Any]
    color: str
    softmax: bool | None = None


NAMES = ("cat", "dog", "bird", "cat")  # two of them equal
TOLD = ("cat (0)", "dog", "bird", "cat (3)")
COLORED = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CASES = {
    "colors": Case(Classify(3), torch.zeros(1, 3, 8, 8), COLORED, "RGB"),
    "gray, names": Case(
        Classify(1), torch.zeros(1, 1, 8, 8),
        {"mean": 0.5, "std": 0.5, "labels": NAMES, "minimum_target": "iOS18"}, "GRAYSCALE", True,
    ),
    "probabilities of its own": Case(
        Classify(3, "probabilities"), torch.zeros(1, 3, 8, 8), {**COLORED, "labels": NAMES}, "RGB", False
    ),
    "bytes, channels last": Case(
        Classify(3, "bytes"), torch.zeros(1, 8, 8, 3, dtype=torch.uint8), {"layout": "as-is"}, "RGB"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    pytest.importorskip("coremltools", reason="coremltools is not installed")

    @cache
    def lower(name: str) -> Artifact:
        case, out = CASES[name], tmp_path_factory.mktemp("pictures") / "out"
        return ar.lower(
            case.model.eval(), "coreml-npu", out, example_inputs=(case.example,), image_input=True, **case.options
        )

    return lower


def known_of(case: Case) -> Callable[[Tensor], Tensor]:
    """What turns a picture into the input of the case's model."""
    if case.example.dtype == torch.uint8:
        return lambda picture: picture.permute(0, 2, 3, 1).to(torch.uint8)
    mean, std = (torch.tensor(case.options[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return lambda picture: (picture / 255 - mean) / std


@pytest.mark.parametrize("name", CASES)
def test_a_package_takes_pictures_and_answers_as_the_model_does(name: str, lowered: Callable[[str], Artifact]) -> None:
    import coremltools as ct

    case, made = CASES[name], lowered(name)
    path = made.path / "model.mlpackage"
    said = ct.models.MLModel(str(path), skip_model_load=True).get_spec().description
    image = said.input[0].type.imageType
    assert (image.width, image.height) == (8, 8)
    assert type(image).ColorSpace.Name(image.colorSpace) == case.color
    assert (said.predictedFeatureName, len(said.output)) == ("classLabel" if case.softmax is not None else "", 1 + (
        case.softmax is not None
    ))  # fmt: skip
    program = interpreter.load(path)
    generator = torch.Generator().manual_seed(1)
    channels = 1 if case.color == "GRAYSCALE" else 3
    noise = torch.randint(0, 256, (1, channels, 8, 8), generator=generator).float()
    for picture in (noise, torch.zeros_like(noise), torch.full_like(noise, 255)):
        expected = case.model(known_of(case)(picture))
        outputs = interpreter.interpret(program, {said.input[0].name: picture}).outputs
        if case.softmax is None:
            (found,) = outputs.values()
        else:
            assert int(outputs["classLabel"]) == int(expected.argmax())
            expected, found = expected.softmax(-1) if case.softmax else expected, outputs["classLabel_probs"][None]
        check.agree(name, [found.numpy()], [expected.detach().numpy()], check.FLOAT16)


@pytest.mark.parametrize("name", CASES)
def test_the_record_says_what_the_package_takes_and_gives(name: str, lowered: Callable[[str], Artifact]) -> None:
    case, record = CASES[name], json.loads((lowered(name).path / "artifact.json").read_text())
    channels = 1 if case.color == "GRAYSCALE" else 3
    assert record["inputs"] == [{"shape": [1, channels, 8, 8], "dtype": "uint8"}]
    done = {"mean": [0.0], "std": [1.0], "channels_last": False, "dtype": "uint8"}
    assert done.items() <= record["preprocessing"].items()
    assert record["labels"] == (None if case.softmax is None else {"names": list(TOLD), "softmax": case.softmax})
    assert record["max_abs_error"] <= record["tolerance"]


@pytest.mark.parametrize("name", ["colors", "gray, names"])
def test_other_labels_than_those_given_are_noticed(name: str, lowered: Callable[[str], Artifact]) -> None:
    program = interpreter.load(lowered(name).path / "model.mlpackage")
    with pytest.raises(CheckFailedError, match="does not answer with the labels that were given"):
        labels.chosen_by(program, Labels(NAMES, True))


def test_a_softmax_that_is_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    monkeypatch.setattr(labels.Probabilities, "forward", lambda self, x: self.module(x) * 2)
    with pytest.raises(CheckFailedError, match="gives no probabilities beside its labels"):
        ar.lower(Classify(3), "coreml-npu", tmp_path / "out", example_inputs=IMAGE, labels=NAMES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"cat\ndog\n", ("cat", "dog")),
        (b"\xef\xbb\xbfcat \r\n dog", ("cat", "dog")),
        (b"cat\ndog\ncat\n\n", ("cat (0)", "dog", "cat (2)")),
        (b"cat\n\ndog\n", "label 2 is empty: give one label a line"),
        (b"", "holds no labels: give one label a line"),
        (b"\xff\xfe\x00", "cannot read the labels .*: it is not UTF-8 text"),
        (None, "cannot read the labels .*: No such file or directory"),
    ],
)
def test_labels_are_read_one_a_line(text: bytes | None, found: tuple[str, ...] | str, tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    if text is not None:
        path.write_bytes(text)
    if isinstance(found, tuple):
        assert labels.read_labels(path) == found
        return
    with pytest.raises(InputError, match=found):
        labels.read_labels(path)


def test_a_converted_folder_takes_pictures_by_what_it_remembers(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    model, inputs = tiny_vit("softmax", depth=1)
    ar.convert(model, inputs, variant="l1").save(tmp_path / "l1")
    made = ar.lower(tmp_path / "l1", "coreml-npu", tmp_path / "out", image_input=True, **HOW)
    assert made.inputs == (Port((1, 3, 16, 16), "uint8"),)
    assert made.max_abs_error <= made.tolerance


@pytest.mark.parametrize(("image_input", "found"), [(True, Labels(TOLD, True)), (False, None)])
def test_a_model_that_knows_its_labels_brings_them_to_pictures_alone(
    image_input: bool, found: Labels | None, tmp_path: Path
) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    source = replace(load_source(Classify(3), IMAGE, **HOW), labels=NAMES)
    assert ar.lower(source, "coreml-npu", tmp_path / "out", image_input=image_input).labels == found


def test_other_preprocessing_than_the_models_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    monkeypatch.setattr(OfPictures, "forward", lambda self, image: self.module((image - self.centre) * self.scale))
    with pytest.raises(CheckFailedError, match="Classify on pictures: its output differs from the module's by"):
        ar.lower(Classify(3), "coreml-npu", tmp_path / "out", example_inputs=IMAGE, image_input=True, **HOW)


def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    (tmp_path / "own.py").write_text("from torch import nn\n\ndef conv():\n    return nn.Conv2d(3, 4, 4)\n")
    line = f"lower {tmp_path}/own.py:conv --input-size 3x8x8 --target coreml-npu --image-input --out {tmp_path}/out"
    assert main([*line.split(), "--dry-run"]) == 2
    assert "error: --image-input: how conv takes pictures is not known: give" in capsys.readouterr().err
    assert main([*line.split(), "--dry-run", "--mean", "0", "--std", "1"]) == 0


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


IMAGE, HOW = (torch.zeros(1, 3, 8, 8),), {"mean": 0.5, "std": 0.5}
REFUSED: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any], str]] = {
    "two inputs": (Two(), IMAGE * 2, {"image_input": True}, "takes 2 inputs, and a picture would be one: leave it out"),
    "no picture": (nn.Identity(), (torch.zeros(1, 8),), {"image_input": True}, "the model takes no images"),
    "four channels": (
        nn.Identity(), (torch.zeros(1, 4, 8, 8),), {"image_input": True, **HOW},
        "--image-input: Identity takes 4 channels, pictures have 3",
    ),
    "no preprocessing": (
        Classify(3), IMAGE, {"image_input": True}, "how Classify takes pictures is not known: give --mean and --std"
    ),
    "a mean for others": (
        Classify(3), IMAGE, {"image_input": True, "mean": (0.5, 0.5), "std": 0.5}, "--mean has 2 numbers and the images"
    ),
    "another count": (Classify(3), IMAGE, {"labels": ["a", "b"]}, "Classify has 4 classes, and 2 labels are given"),
    "no classifier": (nn.Identity(), IMAGE, {"labels": NAMES}, "Identity is not a classifier of one image"),
    "no such file": (Classify(3), IMAGE, {"labels": "none.txt"}, "cannot read the labels none.txt: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    model, inputs, options, why = REFUSED[name]
    with pytest.raises(InputError, match=why) as caught:
        ar.lower(model.eval(), "coreml-npu", tmp_path / "out", example_inputs=inputs, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [{"image_input": True}, {"labels": NAMES}])
def test_targets_without_it_name_those_that_have_it(option: dict[str, Any], tmp_path: Path) -> None:
    flag = f"--{next(iter(option)).replace('_', '-')}"
    with pytest.raises(InputError, match=f"target 'gpu' has no {flag}: leave it out, or lower for coreml-npu"):
        ar.lower(Classify(3), "gpu", tmp_path / "out", example_inputs=IMAGE, **option)
