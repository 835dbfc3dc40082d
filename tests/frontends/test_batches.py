"""Models of one batch size, in every frontend: calibrated, evaluated and compared with any number of pictures."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import attnrewrite as ar
from attnrewrite.api import Conversion
from attnrewrite.errors import Refusal
from attnrewrite.frontends.batches import any_batch, fixed_batch
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import Source, load_source
from attnrewrite.passes.fx.open_batch import OpenBatch
from attnrewrite.passes.in_batches import InBatches
from attnrewrite.targets.base import Artifact, Target

PICTURES = torch.randn(13, 3, 8, 8, generator=torch.Generator().manual_seed(3))


class Pictures(nn.Module):
    """[4, 3, 8, 8] -> [4, 5]; `mixed` has every picture see the mean of all."""

    def __init__(self, batch: int, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch, self.mixed = batch, mixed
        self.embed, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 5)
        nn.init.normal_(self.qkv.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(self.batch, -1, -1), x], 1)
        q, k, v = self.qkv(x).view(self.batch, 5, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(self.batch, 5, 16))
        return self.head(x[:, 0] - x.mean((0, 1)) if self.mixed else x[:, 0])


def one_by_one(model: nn.Module, batch: int) -> Tensor:
    whole = torch.cat([PICTURES, PICTURES])[: -(-len(PICTURES) // batch) * batch]
    with torch.no_grad():
        return torch.cat([model(part) for part in whole.split(batch)])[: len(PICTURES)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model for one picture, written by both of torch's ONNX exporters and as a program."""
    folder, model, x = tmp_path_factory.mktemp("fixed"), Pictures(1).eval(), PICTURES[:1]
    torch.onnx.export(model, (x,), folder / "script.onnx", dynamo=False, opset_version=17)
    torch.onnx.export(model, (x,), folder / "dynamo.onnx", dynamo=True, opset_version=18, verbose=False)
    torch.export.save(torch.export.export(model, (x,)), folder / "program.pt2")
    return folder


@pytest.mark.parametrize("name", ["script.onnx", "dynamo.onnx", "program.pt2"])
def test_a_file_with_a_batch_of_one_is_opened(files: Path, name: str) -> None:
    source = load_source(files / name)
    assert fixed_batch(source) == 1
    with torch.no_grad():
        found = any_batch(source)(PICTURES)
    torch.testing.assert_close(found, one_by_one(Pictures(1).eval(), 1), rtol=1e-4, atol=1e-5)


def test_a_batch_that_code_settles_for_is_found_where_no_example_is_given(tmp_path: Path) -> None:
    """Also in a file whose axis is open and whose reshapes are not, as torch's older exporter writes them."""
    pytest.importorskip("onnx")
    torch.onnx.export(
        Pictures(2).eval(), (PICTURES[:2],), tmp_path / "two.onnx", dynamo=False, opset_version=17,
        input_names=["x"], dynamic_axes={"x": {0: "batch"}},
    )  # fmt: skip
    for source, batch in ((load_source(Pictures(64), input_size="3x8x8"), 64), (load_source(tmp_path / "two.onnx"), 2)):
        assert (len(source.example_inputs[0]), fixed_batch(source)) == (batch, batch)
        with torch.no_grad():
            found = any_batch(source)(PICTURES)
        torch.testing.assert_close(found, one_by_one(Pictures(1).eval(), 1), rtol=1e-4, atol=1e-5)


class Squeezed(Pictures):
    """Without an axis of pictures inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token[0], self.embed(x).squeeze(0).flatten(1).transpose(0, 1)])
        q, k, v = self.qkv(x).view(5, 3, 2, 8).permute(1, 2, 0, 3).unbind(0)
        x = x + self.proj(((q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v).transpose(0, 1).reshape(5, 16))
        return self.head(x[:1])


@pytest.mark.parametrize("exporter", ["script", "dynamo"])
def test_a_file_without_an_axis_of_pictures_inside_is_calibrated_with_many_and_written_as_it_was(
    exporter: str, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    model, file = Squeezed(1).eval(), tmp_path / "squeezed.onnx"
    newer = exporter == "dynamo"
    torch.onnx.export(model, (PICTURES[:1],), file, dynamo=newer, opset_version=18 if newer else 17, verbose=False)
    done = ar.convert(file, variant="l1", calibration=PICTURES)
    assert (done.report["fixed_batch"], done.module(PICTURES).shape) == (None, (13, 5))
    done.save(tmp_path / "out")
    (given,) = onnx.load(tmp_path / "out" / "model.onnx").graph.input
    assert [axis.dim_value for axis in given.type.tensor_type.shape.dim] == [1, 3, 8, 8]


@pytest.fixture(scope="module")
def converted(files: Path) -> Conversion:
    return ar.convert(files / "dynamo.onnx", variant="l1", calibration=PICTURES)


def test_it_is_calibrated_and_evaluated_with_an_open_batch(converted: Conversion) -> None:
    assert (converted.report["fixed_batch"], converted.report["fixed_batch_reason"]) == (None, None)
    assert converted.module(PICTURES).shape == (13, 5)
    assert [each.n for each in ar.evaluate(converted, PICTURES).values()] == [13, 13]


def test_axes_of_one_in_a_file_keep_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are stacked before the batch of one, by the axes that the file names: nothing is left to guess."""

    class Stacked(Pictures):
        def forward(self, x: Tensor) -> Tensor:
            answer = super().forward(x)
            return torch.stack([answer, 2 * answer, answer.square()])[1]

    torch.onnx.export(Stacked(1).eval(), (PICTURES[:1],), tmp_path / "stacked.onnx", dynamo=False, opset_version=17)
    monkeypatch.setattr("attnrewrite.passes.fx.open_batch.MOST_TRIES", 1)
    monkeypatch.setattr(OpenBatch, "_mapped", lambda *_: Refusal("not-mapped", "is to be followed"))
    module = any_batch(load_source(tmp_path / "stacked.onnx"))
    assert not isinstance(module, InBatches)
    with torch.no_grad():
        torch.testing.assert_close(module(PICTURES), one_by_one(Stacked(1).eval(), 1), rtol=1e-4, atol=1e-5)


def test_an_onnx_file_keeps_its_signature(converted: Conversion, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    converted.save(tmp_path / "out")
    (given,) = onnx.load(tmp_path / "out" / "model.onnx").graph.input
    assert [axis.dim_value for axis in given.type.tensor_type.shape.dim] == [1, 3, 8, 8]
    assert fixed_batch(load_source(tmp_path / "out")) is None


def test_what_cannot_be_opened_is_called_batch_by_batch_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Pictures(4, mixed=True).eval()
    source = Source("mixed", model, None, (PICTURES[:4],))
    with caplog.at_level(logging.WARNING, "attnrewrite"), torch.no_grad():
        found = any_batch(source)(PICTURES)
    torch.testing.assert_close(found[:12], one_by_one(model, 4)[:12], rtol=1e-5, atol=1e-6)
    assert "mixed takes batches of 4 only: the graph " in caplog.text


def test_a_conversion_in_memory_that_cannot_be_opened_is_fed_its_own_batch() -> None:
    done = ar.convert(Pictures(4, mixed=True), (PICTURES[:4],), variant="l1", calibration=PICTURES)
    assert done.report["fixed_batch"] == 4
    assert "mean" in done.report["fixed_batch_reason"]
    assert [each.n for each in ar.evaluate(done, PICTURES).values()] == [13, 13]


class AnySize(Pictures):
    """The same on pictures of any size, as many as it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.head((x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).mean(1))


class Rounded(AnySize):
    """Adds and takes away much, and more with more pictures: float32 keeps three digits of the answer."""

    def forward(self, x: Tensor) -> Tensor:
        much = 3e4 * x.shape[0]
        return (super().forward(x) + much) - much


def test_what_rounding_alone_mixes_takes_any_batch(caplog: pytest.LogCaptureFixture) -> None:
    source = Source("rounded", Rounded(1).eval(), None, (PICTURES[:4],))
    with caplog.at_level(logging.WARNING, "attnrewrite"):
        module = any_batch(source)
    with torch.no_grad():
        assert module(PICTURES).shape == (13, 5)
    assert fixed_batch(source) == 4  # the module alone cannot be asked in float64
    assert not isinstance(module, InBatches)
    assert not caplog.records


class OfTheFirst(AnySize):
    """Code that reads its first picture alone: torch.export leaves its batch open."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:1])


class LessTheOthers(AnySize):
    """Features less the mean of all pictures': torch.export leaves the batch open."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found - found.mean(0, keepdim=True) / 2


@pytest.mark.parametrize("kind", [OfTheFirst, LessTheOthers])
def test_an_open_batch_whose_pictures_are_not_apart_is_that_of_one_picture_mapped_over_all(
    kind: type[AnySize], caplog: pytest.LogCaptureFixture
) -> None:
    model = kind(1).eval()
    with caplog.at_level(logging.WARNING, "attnrewrite"):
        done = ar.convert(model, (PICTURES[:1],), variant="softmax", calibration=PICTURES)
        found = any_batch(Source("mine", model, None, (PICTURES[:1],)))(PICTURES)
    assert (done.report["fixed_batch"], caplog.text) == (None, "")
    for answer in (found, done.module(PICTURES)):
        torch.testing.assert_close(answer, one_by_one(model, 1), rtol=1e-4, atol=1e-5)


def test_pictures_that_the_example_has_beside_others_are_fed_as_many_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = LessTheOthers(1).eval()
    with caplog.at_level(logging.WARNING, "attnrewrite"):
        done = ar.convert(model, (PICTURES[:2],), variant="l1", calibration=PICTURES)
        found = any_batch(Source("mine", model, None, (PICTURES[:2],)))(PICTURES)
    assert done.report["fixed_batch"] == 2
    assert caplog.text.count("beside others") == 2
    torch.testing.assert_close(found[:12], one_by_one(model, 2)[:12], rtol=1e-5, atol=1e-6)
    assert [each.n for each in ar.evaluate(done, PICTURES).values()] == [13, 13]


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_a_program_open_in_the_size_of_its_pictures_is_read_for_that_of_its_example(
    batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    axes = (2, 3) if batch else (0, 2, 3)
    example = (PICTURES[: batch or 2],)
    program = torch.export.export(AnySize(1).eval(), example, dynamic_shapes=(dict.fromkeys(axes, Dim.AUTO),))
    captured, source = capture("any size", program, example), load_source(program)
    assert (captured.fixed_batch, fixed_batch(source)) == (batch, batch)
    done = ar.convert(program, variant="l1")
    assert [site["variant"] for site in done.report["sites"]] == ["l1"]
    assert (done.report["fixed_batch"], done.module(PICTURES).shape) == (None, (13, 5))
    assert "any size leaves the size of its inputs open, and is read for 3x8x8" in caplog.text


class Folder(Target):
    """A target whose artifact is a file, and answers as the module that it was made of does."""

    name, summary, has_answers = "folder", "a file", True

    def lower(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], out: Path, *, threads: int) -> Artifact:
        (out / "model").write_text("")
        return Artifact(name, self.name, out, ("model",), 1, 0.0, 0.0, "by eye", "its own")

    def answers(self, artifact: Artifact, module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
        def answer(images: Tensor) -> Tensor:
            assert images.shape == inputs[0].shape
            return module(images)

        return answer


@pytest.mark.parametrize("batch", [1, 4])
def test_an_artifact_is_measured_in_the_batches_that_it_takes(
    batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("attnrewrite.api.get_target", lambda name: Folder())
    made = ar.lower(Pictures(batch), "folder", tmp_path / "out", example_inputs=(PICTURES[:batch],), data=PICTURES)
    assert {name: (each["n"], each["agreement"]) for name, each in made.measured.items()} == {
        "model": (13, None),
        "artifact": (13, 100.0),
    }
