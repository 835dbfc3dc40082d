"""Models of several inputs: calibrated with one array for each, or refused by name before any work."""

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.frontends.data import input_names
from attnrewrite.frontends.sources import load_source
from attnrewrite.images.model_inputs import load_model_inputs

GENERATOR = torch.Generator().manual_seed(0)
PICTURES = torch.randn(24, 3, 8, 8, generator=GENERATOR)
KEPT = torch.rand(24, 4, generator=GENERATOR) > 0.2


class Prompted(nn.Module):
    """[B, 3, 8, 8] and the tokens that count [B, 4] -> [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48)
        self.proj, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        nn.init.normal_(self.qkv.weight)

    def forward(self, picture: Tensor, kept: Tensor) -> Tensor:
        x = self.embed(picture).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = torch.zeros(kept.shape).masked_fill(~kept, -1e4)[:, None, None]
        x = x + self.proj((((q @ k.mT) * 8**-0.5 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


EXAMPLE = (PICTURES[:2], KEPT[:2])


def convert(data: Any, **how: Any) -> ar.Conversion:
    return ar.convert(Prompted(), EXAMPLE, variant="taylor", calibration=data, **how)


@pytest.fixture(scope="module")
def converted() -> ar.Conversion:
    return convert([(PICTURES[:10], KEPT[:10]), (PICTURES[10:], KEPT[10:])])


def test_the_fit_reads_all_inputs(converted: ar.Conversion) -> None:
    copy, fit = converted.report["calibration"]["stages"]
    assert fit["kl_after"] < copy["kl_before"]
    assert converted.report["calibration"]["images"] == 24


def test_inputs_without_names_of_their_own_are_numbered() -> None:
    class Unnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Prompted()

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.inner(*inputs)

    assert input_names(load_source(Unnamed(), EXAMPLE)) == ("inputs_0", "inputs_1")
    done = ar.convert(Unnamed(), EXAMPLE, variant="taylor", calibration=[(PICTURES, KEPT)])
    assert len(ar.evaluate(done, [(PICTURES, KEPT)])) == 2


def test_an_iterable_and_a_file_hold_the_same(tmp_path: Path) -> None:
    np.savez(tmp_path / "named.npz", picture=PICTURES.numpy(), kept=KEPT.numpy())
    np.savez(tmp_path / "ordered.npz", PICTURES.numpy(), KEPT.numpy())
    given = [
        [(PICTURES[:10], KEPT[:10]), (PICTURES[10:], KEPT[10:])],
        [{"kept": KEPT, "picture": PICTURES, "beside": 1}],
        tmp_path / "named.npz",
        str(tmp_path / "ordered.npz"),
    ]
    found = [load_model_inputs(data, EXAMPLE, ("picture", "kept")) for data in given]
    assert {(len(each), each.digest()) for each in found} == {(24, found[0].digest())}


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one tensor": (PICTURES, {}, r"takes 2 inputs \(picture, kept\), and what is given is one Tensor"),
    "single tensors": ([PICTURES], {}, "is no tuple of 2 tensors with a batch"),
    "a folder": (".", {}, "is no .npz with an array for each"),
    "a name that is missing": ([{"picture": PICTURES}], {}, "has no 'kept'"),
    "another shape": ([(PICTURES, KEPT[:, :3])], {}, r"input kept is \[24, 3\].* takes \[N, 4\]"),
    "another kind": ([(PICTURES, KEPT.float())], {}, "input kept is of another kind .* float32 and bool"),
    "other counts": ([(PICTURES, KEPT[:20])], {}, "as many of every input, and there are 24 of picture, 20 of kept"),
    "no items": ([], {}, "the data is empty"),
    "distillation": ([(PICTURES, KEPT)], {"steps": 5}, "distillation moves and mixes pictures"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    data, how, message = BAD[case]
    with pytest.raises(InputError, match=message):
        convert(data, **how)


def test_a_file_without_an_input_names_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=PICTURES.numpy())
    with pytest.raises(InputError, match=r"has no array 'picture' \(it has x\): the model's inputs are picture, kept"):
        convert(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("example", "kept", "message"),
    [
        (EXAMPLE, 0.5, r"^input kept is \[\] in the data, and the model takes \[N, 4\]$"),
        ((PICTURES[:2], torch.tensor(0.5)), 0.5, "^input kept is one number for all images, .*: wrap the model"),
        (EXAMPLE, np.array(["cat"] * 24), r"x\.npz could not be read"),
    ],
    ids=["data alone", "the model's", "texts"],
)
def test_a_number_alone_is_no_calibration_data(example: Any, kept: Any, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", picture=PICTURES.numpy(), kept=kept)
    with pytest.raises(InputError, match=message):
        load_model_inputs(tmp_path / "x.npz", example, ("picture", "kept"))


def test_a_file_that_memory_does_not_hold_is_refused_by_its_head(tmp_path: Path) -> None:
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 50, 4)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in ("picture", "kept"):
            archive.writestr(f"{name}.npy", head.getvalue())
    with pytest.raises(InputError, match="GiB, and this machine has"):
        load_model_inputs(tmp_path / "x.npz", EXAMPLE, ("picture", "kept"))


def test_numbers_that_are_none_or_lie_in_another_order_are_told_by_name(tmp_path: Path) -> None:
    broken = PICTURES.clone()
    broken[1, 0, 0, 0] = float("nan")
    kept = np.ones((len(PICTURES), *EXAMPLE[1].shape[1:]), EXAMPLE[1].numpy().dtype)
    for picture, message in ((broken.numpy(), "picture holds NaN"), (PICTURES.numpy().astype(">f4"), "save numbers")):
        np.savez(tmp_path / "x.npz", picture=picture, kept=kept)
        with pytest.raises(InputError, match=message):
            load_model_inputs(tmp_path / "x.npz", EXAMPLE, ("picture", "kept"))


def test_a_path_that_cannot_be_used_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match="cannot be used as a path"):
        load_model_inputs("~nobody-of-that-name/x.npz", EXAMPLE, ("picture", "kept"))


def test_a_model_of_several_inputs_is_evaluated_on_all_of_them(converted: ar.Conversion, tmp_path: Path) -> None:
    np.savez(tmp_path / "both.npz", picture=PICTURES.numpy(), kept=KEPT.numpy())
    with torch.no_grad():
        wanted, found = (model(PICTURES, KEPT) for model in (Prompted(), converted.module))
    for data in (tmp_path / "both.npz", [(PICTURES, KEPT)]):
        told = list(ar.evaluate(converted, data, batch_size=5).values())[-1]
        assert (told.n, told.top1) == (24, None)
        assert told.logit_mse == pytest.approx(float((wanted - found).square().mean()), rel=1e-4)
        assert told.agreement == pytest.approx(100 * float((wanted.argmax(1) == found.argmax(1)).double().mean()))
    with pytest.raises(InputError, match=r"takes 2 inputs \(picture, kept\), and what is given is one Tensor"):
        ar.evaluate(converted, PICTURES)


@pytest.mark.parametrize(("target", "least"), [("host", 1e-9), ("coreml-npu", 1e-4)])
def test_an_artifact_of_several_inputs_is_measured_on_all_of_them(
    target: str, least: float, converted: ar.Conversion, tmp_path: Path
) -> None:
    pytest.importorskip("tvm" if target == "host" else "coremltools")
    np.savez(tmp_path / "both.npz", picture=PICTURES[:6].numpy(), kept=KEPT[:6].numpy())
    made = ar.lower(converted, target, tmp_path / "out", data=tmp_path / "both.npz")
    artifact = made.measured["artifact"]
    assert (artifact["n"], artifact["agreement"], artifact["top1"]) == (6, 100.0, None)
    assert 0 < artifact["logit_mse"] < least
    with pytest.raises(InputError, match=r"takes 2 inputs \(picture, kept\), and what is given is one Tensor"):
        ar.lower(converted, target, tmp_path / "other", data=PICTURES)
    assert not (tmp_path / "other").exists()


def test_models_of_several_inputs_are_compared_on_all_of_them(converted: ar.Conversion, tmp_path: Path) -> None:
    models = {"original": Prompted().eval(), "l1": converted}
    _, row = ar.compare(models, converted.example_inputs, targets=["coreml-npu"], data=[(PICTURES, KEPT)]).rows
    told = list(ar.evaluate(converted, [(PICTURES, KEPT)]).values())[-1]
    assert (row.agreement, row.output_error) == (told.agreement, None)


class Frames(Prompted):
    """[B, 3, T, 8, 8] -> [B, 5]: the mean of the frames' answers, with every token kept."""

    def forward(self, clip: Tensor) -> Tensor:
        frames = clip.transpose(1, 2).flatten(0, 1)
        kept = torch.ones(frames.shape[0], 4, dtype=torch.bool)
        return super().forward(frames, kept).unflatten(0, (-1, clip.shape[2])).mean(1)


def test_one_input_that_is_no_picture_is_taken_as_it_is(tmp_path: Path) -> None:
    clips = PICTURES.unflatten(0, (12, 2)).transpose(1, 2)
    np.savez(tmp_path / "clips.npz", clip=clips.numpy())
    given = [clips, clips.numpy(), [clips[:5], clips[5:]], [(clips,)], [{"clip": clips}], tmp_path / "clips.npz"]
    found = [load_model_inputs(data, (clips[:2],), ("clip",)) for data in given]
    assert {(len(each), each.digest()) for each in found} == {(12, found[0].digest())}
    converted = ar.convert(Frames(), (clips[:2],), variant="taylor", calibration=clips)
    copy, fit = converted.report["calibration"]["stages"]
    assert fit["kl_after"] < copy["kl_before"]
    assert list(ar.evaluate(converted, clips).values())[-1].n == 12
    told = r"takes one input, clip \[2, 3, 2, 8, 8\], and"
    with pytest.raises(InputError, match=f"Frames {told} distillation moves and mixes pictures alone"):
        ar.convert(Frames(), (clips[:2],), variant="taylor", calibration=clips, steps=3)


class Worded(Prompted):
    """As Prompted, told of its tokens by words of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        return super().forward(picture, self.words(words) > -1)


@pytest.mark.parametrize("word", [20, -1])
def test_whole_numbers_that_a_model_has_no_row_for_are_refused_before_work(word: int) -> None:
    words = torch.arange(24) % 20
    example = (PICTURES[:2], words[:2])
    assert ar.convert(Worded(), example, variant="l1", calibration=[(PICTURES, words)])
    words[7] = word
    with pytest.raises(InputError, match=r"Worded does not take item 7 of the data \(index out of range"):
        ar.convert(Worded(), example, variant="l1", calibration=[(PICTURES, words)])


class Encoder(nn.Module):
    """[B, N, 16] -> [B, 16] through one attention, whose code holds the batch as a number where it is `fixed`."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed, self.qkv, self.proj = fixed, nn.Linear(16, 48), nn.Linear(16, 16)
        nn.init.normal_(self.qkv.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x) if self.fixed else x.shape[0]
        q, k, v = self.qkv(x).view(batch, -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attended = ((q @ k.mT) * 8**-0.5).softmax(-1) @ v
        return (x + self.proj(attended.transpose(1, 2).reshape(batch, -1, 16))).mean(1)


class TwoEncoders(nn.Module):
    """Words [B, 6] and a picture [B, 3, 8, 8] -> an embedding [B, 16] of each: their batches meet nowhere."""

    def __init__(self, words_fixed: bool, pictures_fixed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.patches = nn.Embedding(20, 16), nn.Conv2d(3, 16, 2, 2)
        self.text, self.image = Encoder(words_fixed), Encoder(pictures_fixed)

    def forward(self, words: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(self.patches(picture).flatten(2).mT), self.text(self.words(words))


@pytest.mark.parametrize("example", [1, 2])
@pytest.mark.parametrize("fixed", [(False, False), (False, True), (True, False), (True, True)])
def test_two_encoders_are_both_held_to_what_they_give(
    fixed: tuple[bool, bool], example: int, caplog: pytest.LogCaptureFixture
) -> None:
    words = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(1))
    made = ar.convert(
        TwoEncoders(*fixed), (words[:example], PICTURES[:example]), variant="l1", calibration=[(words, PICTURES)]
    )
    assert made.report["fixed_batch"] is None
    copy, fit = made.report["calibration"]["stages"]
    assert "the model is held to all of its 2 outputs alike" in copy["notes"]
    assert 1e-3 < fit["error_after"] <= copy["error_before"]
    caplog.clear()
    found = list(ar.evaluate(made, [(words, PICTURES)], batch_size=7).values())[-1].error
    with torch.no_grad():
        pairs = zip(TwoEncoders(*fixed)(words, PICTURES), made.module(words, PICTURES), strict=True)
        errors = [float((b - a).square().sum() / (a - a.mean(0)).square().sum()) for a, b in pairs]
    assert found == pytest.approx(sum(errors) / 2, rel=1e-3)
    assert not [record for record in caplog.records if "is compared by" in record.getMessage()]


class Coded(Prompted):
    """As Prompted, with a row of a table for each picture: there are none for values beyond the example's."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 5)

    def forward(self, picture: Tensor, kept: Tensor) -> Tensor:
        return super().forward(picture, kept) + self.table(picture.abs().amax((1, 2, 3)).long())


def test_what_is_made_of_a_conversion_is_held_to_it_on_inputs_that_the_model_takes(tmp_path: Path) -> None:
    made = ar.convert(Coded(int(EXAMPLE[0].abs().max()) + 1), EXAMPLE, variant="l1")
    assert any("large values" in draw for draw in made.report["checks"]["draws_refused"])
    made.save(tmp_path / "out")
    assert list(ar.evaluate(made, [EXAMPLE]).values())[-1].n == 2


def test_the_inputs_of_a_file_keep_their_names(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    words = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(1))
    torch.onnx.export(
        TwoEncoders(False, False).eval(), (words[:1], PICTURES[:1]), tmp_path / "two.onnx", dynamo=True, verbose=False
    )
    np.savez(tmp_path / "both.npz", picture=PICTURES.numpy(), words=words.numpy())
    made = ar.convert(tmp_path / "two.onnx", variant="l1", calibration=tmp_path / "both.npz")
    assert 1e-3 < list(ar.evaluate(made, tmp_path / "both.npz").values())[-1].error < 10  # type: ignore[operator]

    names = ["words", "self", "input.1", "lambda", "_hidden"]
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info(name, kind, [2, 4]) for name in names]
    result = onnx.helper.make_tensor_value_info("sum", kind, [2, 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Sum", names, ["sum"])], "sum", inputs, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "sum.onnx")
    assert input_names(load_source(tmp_path / "sum.onnx")) == ("words", "input_1", "input_2", "input_3", "input_4")
