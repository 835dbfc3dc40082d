"""The demo's task, data and model are what they are said to be."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from attnrewrite.sources import load_source

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
