"""The demo's task, data and model are what they are said to be; the tutorials tell what the command line does too."""

import importlib
import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from attnrewrite.cli.main import main
from attnrewrite.frontends.sources import load_source

EXAMPLES = Path(__file__).parents[1] / "examples"
if find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return _example("digits")


@pytest.fixture(scope="module")
def training(digits: ModuleType) -> ModuleType:
    return _example("train_digits_vit")


def _example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_a_canvas_has_several_dimmed_digits_and_a_bright_one_that_counts(digits: ModuleType) -> None:
    shapes = np.repeat(np.arange(100, 110, dtype=np.uint8), 64).reshape(10, 8, 8)  # each stands for its class
    x, y = digits.canvases(shapes, np.arange(10), 200, seed=0)
    assert (x.shape, x.dtype, y.shape) == ((200, 64, 64), np.uint8, (200,))
    for canvas, label in zip(x, y, strict=True):
        assert set(canvas[canvas >= 100]) == {100 + label}
        assert np.count_nonzero(canvas >= 100) == 64
        assert 5 <= np.count_nonzero(canvas) / 64 <= 9
    again, _ = digits.canvases(shapes, np.arange(10), 200, seed=0)
    assert (again == x).all()


def test_no_stroke_is_both_trained_on_and_tested_on(digits: ModuleType) -> None:
    trained, tested = ({image.tobytes() for image in digits.strokes(held_out)[0]} for held_out in (False, True))
    assert trained & tested == set()


def test_the_data_files_are_what_the_command_line_reads(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(tmp_path / "digits"), "--samples", "3"])
    digits.main()
    calibration, test = (np.load(tmp_path / "digits" / f"{name}.npz") for name in ("calibration", "test"))
    assert calibration.files == ["x"]
    assert sorted(test.files) == ["x", "y"]
    assert (test["x"].shape, test["x"].dtype) == ((3, 64, 64), np.uint8)


def test_the_checkpoint_is_small_and_loads_as_a_source(digits: ModuleType) -> None:
    assert digits.CHECKPOINT.stat().st_size < 2**20
    source = load_source(f"{EXAMPLES / 'digits.py'}:digits_vit", checkpoint=digits.CHECKPOINT, input_size="1x64x64")
    trained = load_source(f"{EXAMPLES / 'digits.py'}:trained_digits_vit", input_size="1x64x64")
    assert source.model is not None
    assert trained.model is not None
    with torch.no_grad():
        assert torch.equal(source.model(*source.example_inputs), trained.model(*source.example_inputs))


def test_the_model_reads_the_bright_digit_and_its_attention_is_why(training: ModuleType) -> None:
    model = training.trained_digits_vit()
    own = training.accuracy(model, count=300)
    with training.UniformAttention():
        uniform = training.accuracy(model, count=300)
    assert own > 0.88
    assert uniform < own - 0.4


def test_the_training_script_trains_and_writes_what_it_then_checks(
    training: ModuleType,
    digits: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    checkpoint = tmp_path / "trained.safetensors"
    for module in (training, digits):
        monkeypatch.setattr(module, "CHECKPOINT", checkpoint)
    monkeypatch.setattr(training, "STAGES", ((40, 4, 2, 1e-3), (256, 2, 2, 1e-3)))
    monkeypatch.setattr(training, "COPIES", 1)
    monkeypatch.setattr(training, "COUNT", 10)
    monkeypatch.setattr(sys, "argv", ["train_digits_vit.py"])
    training.main()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"trained.safetensors: {checkpoint.stat().st_size} bytes, 218314 parameters"
    assert told[1].startswith("softmax attention: ")
    assert told[2].startswith("uniform averaging: ")


def test_reading_every_patch_is_what_the_model_reads(training: ModuleType) -> None:
    model, image = training.trained_digits_vit().eval(), torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(training.read_inked(model, image, 256), model(image))


def test_the_inked_patches_are_read_first(training: ModuleType, digits: ModuleType) -> None:
    canvas, _ = digits.canvases(*digits.strokes(True), 8, seed=3)
    model, image = training.trained_digits_vit().eval(), training.prepared(canvas)
    with torch.no_grad():
        inked = [training.read_inked(model, image, 200) for _ in range(2)]
        assert (inked[0] - inked[1]).abs().max() > 0  # the empty patches that fill up are drawn anew
        assert torch.equal(inked[0].argmax(1), inked[1].argmax(1))


# What each tutorial has to say, in this order.
TOLD = {
    "registers": (
        "2 attentions found, 0 that only look like one",
        "blocks.0.attn: self, 4 heads, 69 x 69 tokens, 5 before a grid of 8x8",
        "1. l1, linear in the tokens, with exact rows for the five",
        "2. the same without these rows",
        "blocks.1.attn is masked; extracted to ",
    ),
    "swin": (
        "3 attentions found, 0 that only look like one",
        "layers.0.blocks.1.attn: self, 2 heads, 49 x 49 tokens, 0 before a grid of 7x7, 4 windows, constant bias",
        "layers.1.blocks.0.attn: self, 4 heads, 49 x 49 tokens, 0 before a grid of 7x7, constant bias",
        "softmax: yes",
        "mobile: adds a constant bias to its scores; approximate=true keeps a part of it",
        "masked: adds a constant bias to its scores; approximate=true keeps it between neighbours, and a part of ",
        "l1 can stand at none of the 3 sites of SwinTransformer (site0, site1, site2: adds a constant bias",
        "layers.0.blocks.1.attn is l1 (the constant bias on the scores is left out, but for factors of rank 8 that ",
        "layers.1.blocks.0.attn is masked (the constant bias is kept between neighbours only, but for factors ",
    ),
    "detr": (
        "4 attentions found, 0 that only look like one",
        "encoder.layers.1.self_attn: self, 4 heads, 196 x 196 tokens, 0 before a grid of 14x14",
        "decoder.layers.0.encoder_attn: cross, 4 heads, 10 x 196 tokens",
        "encoder.layers.0.self_attn is masked; extracted to ",
        "decoder.layers.0.self_attn stays as it is: needs tokens that are known to be an image grid",
        "encoder.layers.0.self_attn is mobile; extracted to ",
        "decoder.layers.0.self_attn stays as it is: kept on request",
        "decoder.layers.0.encoder_attn stays as it is: pairs each query with the key of the same token",
        "of what tells one picture's from another's",
    ),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, with the tutorials' pictures in it."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(EXAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tutorial.py", "--out", str(folder / "out" / "pictures")])
        _example("tutorial").main()
    return folder


@pytest.mark.parametrize("name", TOLD)
def test_a_tutorial_tells_what_its_command_line_does(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "detr":
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(checkout)
    _example(name).main()
    told = capsys.readouterr().out
    place = -1
    for line in TOLD[name]:
        place = told.index(line, place + 1)
    lines = told.splitlines()
    (*_, last) = (number for number, line in enumerate(lines) if line.startswith("  $ attnrewrite convert "))
    assert main([*shlex.split(lines[last])[2:], "--json"]) == 0
    _example("tutorial").show_conversion(SimpleNamespace(report=json.loads(capsys.readouterr().out)))
    shown = capsys.readouterr().out
    assert shown.count("\n") >= 4
    assert shown in told
