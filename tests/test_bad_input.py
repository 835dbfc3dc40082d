"""Command lines that cannot be carried out: an exit code, one clear line on standard error, nothing left behind."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from attnrewrite.cli import main
from attnrewrite.sources import load_source

SIZE = "--input-size 3x16x16"
CONVERT = f"convert models.py:vit {SIZE} --out out"
EVALUATE = f"evaluate models.py:vit {SIZE} --mean 0 --std 1"


class Code:
    def __reduce__(self) -> tuple:
        return os.system, ("touch ran",)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, models_file: Path) -> Path:
    """A folder of good and bad inputs, which no command may change."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "models.py").write_bytes(models_file.read_bytes())
    model = load_source(f"{models_file}:vit", input_size="3x16x16").model
    assert model is not None
    state = model.state_dict()
    torch.save(state, folder / "good.pth")
    whole = (folder / "good.pth").read_bytes()
    (folder / "cut.pth").write_bytes(whole[: len(whole) // 2])
    torch.save({f"other.{name}": value for name, value in state.items()}, folder / "other.pth")
    torch.save(state | {"head.weight": torch.zeros(1000, 16), "head.bias": torch.zeros(1000)}, folder / "thousand.pth")
    (folder / "code.pth").write_bytes(pickle.dumps({"state_dict": Code()}, protocol=2))
    (folder / "page.pth").write_text("<!DOCTYPE html><title>Not found</title>")
    (folder / "model.onnx").write_bytes(b"\x08\x07")
    (folder / "half.pt2").write_bytes(whole[:200])
    pixels = np.zeros((4, 16, 16, 3), np.uint8)
    np.savez(folder / "good.npz", x=pixels, y=np.arange(4))
    np.savez(folder / "labels.npz", x=pixels, y=np.arange(4) + 2)
    np.savez(folder / "large.npz", x=np.zeros((4, 32, 32, 3), np.uint8))
    np.savez(folder / "floats.npz", x=pixels / 255)
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:-40])
    for name in ("empty", "damaged", "existing"):
        (folder / name).mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "damaged" / "a.jpg")
    (folder / "damaged" / "b.jpg").write_bytes((folder / "damaged" / "a.jpg").read_bytes()[:-2000])
    (folder / "existing" / "mine.txt").write_text("keep me")
    (folder / "bad.toml").write_text("variant = ")
    (folder / "typo.toml").write_text("varaint = 'l1'")
    return folder


# name: (command line, exit code, what standard error says)
CASES: dict[str, tuple[str, int, str]] = {
    # The model.
    "no source": ("explain", 2, "Missing argument 'SOURCE'"),
    "no such model": ("explain vit", 2, "no model 'vit': give a .pt2 or .onnx file"),
    "no such file": (f"explain nothing.py:vit {SIZE}", 2, "cannot read the Python file nothing.py: No such file"),
    "no such factory": (f"explain models.py:vti {SIZE}", 2, "unknown factory in models.py 'vti': did you mean 'vit'?"),
    "a failing factory": (f"explain models.py:failing {SIZE}", 2, "failing raised ValueError: no weights here (line"),
    "a factory with arguments": (f"explain models.py:needs {SIZE}", 2, "needs raised TypeError"),
    "not a module": (
        f"explain models.py:a_string {SIZE}",
        2,
        "must be a function that returns an nn.Module, not a str",
    ),
    "a damaged program": ("explain half.pt2", 2, "half.pt2 is truncated or is not an exported program"),
    "onnx": ("explain model.onnx", 2, "model.onnx: holds no graph; export it again"),
    "a checkpoint alone": ("explain good.pth", 2, "good.pth holds weights, not a model"),
    "a folder": ("evaluate empty --data good.npz", 2, "empty is not a converted model, as it holds no model.pt2"),
    "no attention": (
        f"convert models.py:gated {SIZE} --out out",
        3,
        "gated has no attention to rewrite (softmax: the softmax's input comes from linear",
    ),
    "no attention, dry": (f"convert models.py:gated {SIZE} --out out --dry-run", 3, "l1 would stand nowhere in gated"),
    # Its size and weights.
    "no input size": ("explain models.py:vit", 2, "give --input-size, such as 3x224x224"),
    "a bad input size": (
        "explain models.py:vit --input-size 3x16",
        2,
        "input size '3x16' is not CHANNELSxHEIGHTxWIDTH",
    ),
    "the wrong input size": ("explain models.py:vit --input-size 3x4x4", 2, "vit does not take an input of 3x4x4"),
    "no checkpoint": (
        f"{CONVERT} --checkpoint no.pth",
        2,
        "cannot read the checkpoint no.pth: No such file or directory",
    ),
    "a truncated checkpoint": (
        f"{CONVERT} --checkpoint cut.pth",
        2,
        "cut.pth is truncated or is not a PyTorch checkpoint",
    ),
    "a checkpoint folder": (f"{CONVERT} --checkpoint empty", 2, "empty is a folder: the checkpoint is a file in it"),
    "a web page": (f"{CONVERT} --checkpoint page.pth", 2, "page.pth is a web page, not a checkpoint"),
    "code": (f"{CONVERT} --checkpoint code.pth", 2, "code.pth was not loaded: it would run code (posix.system)"),
    "other names": (
        f"{CONVERT} --checkpoint other.pth",
        2,
        "29 missing (token, embed.weight, embed.bias, ...); 29 unexpected",
    ),
    "other classes": (
        f"{CONVERT} --checkpoint thousand.pth",
        2,
        "head.weight is 1000x16 in the file and 5x16 in the model",
    ),
    # The data.
    "no data": (f"{EVALUATE} --data no.npz", 2, "cannot read the .npz no.npz: No such file or directory"),
    "no data folder": (f"{EVALUATE} --data no", 2, "no does not exist: images are a folder of them, or an .npz"),
    "other data": (f"{EVALUATE} --data models.py", 2, "models.py is neither"),
    "an empty folder": (f"{EVALUATE} --data empty", 2, "empty holds no images"),
    "truncated data": (f"{EVALUATE} --data cut.npz", 2, "cut.npz could not be read: it is truncated"),
    "floats": (f"{EVALUATE} --data floats.npz", 2, "floats.npz: x is float64 [4, 16, 16, 3] and must be uint8"),
    "large images": (
        f"{EVALUATE} --data large.npz",
        2,
        "large.npz holds images of 3x32x32 and the model takes 3x16x16",
    ),
    "large calibration": (f"{CONVERT} --mean 0 --std 1 --calibrate large.npz", 2, "large.npz holds images of 3x32x32"),
    "labels beyond the classes": (f"{EVALUATE} --data labels.npz", 2, "vit has 5 classes and the data a label 5"),
    "a damaged picture": (f"{EVALUATE} --data damaged", 2, "damaged/b.jpg is damaged"),
    "no mean": (f"evaluate models.py:vit {SIZE} --data good.npz", 2, "give --mean and --std"),
    "no mean for calibration": (f"{CONVERT} --calibrate good.npz", 2, "give --mean and --std"),
    "mean alone": (f"{CONVERT} --mean 0.5", 2, "--mean without --std"),
    "a mean in words": (f"{CONVERT} --mean grey --std 1", 2, "--mean 'grey' is not a number"),
    "two means": (
        f"evaluate models.py:vit {SIZE} --mean 0,0 --std 1 --data good.npz",
        2,
        "2 numbers and the images 3 channels",
    ),
    # Names.
    "an unknown command": ("covnert models.py:vit", 2, "No such command 'covnert'. Did you mean 'convert'?"),
    "an unknown option": (f"{CONVERT} --varient l1", 2, "--varient. Did you mean --variant?"),
    "an unknown variant": (f"{CONVERT} --variant l2", 2, "unknown variant 'l2': did you mean 'l1'?"),
    "an unknown variant option": (
        f"{CONVERT} --option centered=true",
        2,
        "unknown option of l1 'centered': did you mean 'centred'?",
    ),
    "a bad variant option": (f"{CONVERT} --option centred=maybe", 2, "centred='maybe' is not true or false"),
    "an option without value": (f"{CONVERT} --option centred", 2, "--option 'centred' is not KEY=VALUE"),
    "an unknown site": (f"{CONVERT} --keep site7", 2, "unknown site to keep 'site7': did you mean"),
    "an unknown site, dry": (f"{CONVERT} --keep site7 --dry-run", 2, "unknown site to keep 'site7': did you mean"),
    "an unknown target": (
        f"lower models.py:vit {SIZE} --target hots --out out",
        2,
        "unknown target 'hots': did you mean 'host'?",
    ),
    "an unknown target to compare": (f"compare models.py:vit {SIZE} --target gup --out out", 2, "did you mean 'gpu'?"),
    "two models of one name": (
        f"compare models.py:vit models.py:vit {SIZE} --target host --out out",
        2,
        "two models are called 'vit'",
    ),
    "no samples": (f"{CONVERT} --samples 0", 2, "Invalid value for '--samples'"),
    "a seed in words": (f"{CONVERT} --seed often", 2, "Invalid value for '--seed'"),
    "no output folder": (f"convert models.py:vit {SIZE}", 2, "Missing option '--out'"),
    # The output folder and the configuration.
    "an existing folder": (
        f"convert models.py:vit {SIZE} --out existing",
        2,
        "existing exists: choose another output folder",
    ),
    "the folder one is in": (f"convert models.py:vit {SIZE} --out . --force", 2, "holds the folder you work in"),
    "a file for a folder": (f"convert models.py:vit {SIZE} --out good.npz/out", 2, "good.npz is not a folder"),
    "existing, to lower": (f"lower models.py:vit {SIZE} --target host --out existing", 2, "existing exists"),
    "existing, to compare": (f"compare models.py:vit {SIZE} --target host --out existing", 2, "existing exists"),
    "no configuration": (f"{CONVERT} --config no.toml", 2, "cannot read --config no.toml: No such file"),
    "a damaged configuration": (f"{CONVERT} --config bad.toml", 2, "--config bad.toml is not TOML"),
    "a typo in it": (
        f"{CONVERT} --config typo.toml",
        2,
        "unknown option of convert in typo.toml 'varaint': did you mean 'variant'?",
    ),
    "nowhere to save it": (f"{CONVERT} --save-config no/c.toml", 2, "cannot write --save-config no/c.toml"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    line, exit_code, message = CASES[case]
    monkeypatch.chdir(given)
    before = contents(given)
    code = main([*line.split(), "--json"])
    printed = capsys.readouterr()
    lines = [each for each in printed.err.splitlines() if not each.startswith("note: ")]
    assert code == exit_code, printed.err
    assert message in lines[-1]
    assert len(lines) == 1
    assert printed.out == "" or "dry" in case
    assert contents(given) == before


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def test_an_output_folder_without_permission(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused: Callable[..., bool] = lambda path, mode: False  # noqa: E731
    monkeypatch.chdir(given)
    monkeypatch.setattr(os, "access", refused)
    assert main([*f"convert models.py:vit {SIZE} --out".split(), str(tmp_path / "out")]) == 2
    assert "no permission in" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(given)
    monkeypatch.setattr(torch.export, "save", full)
    assert main([*f"convert models.py:vit {SIZE} --out".split(), str(tmp_path / "new" / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_damaged_pictures_are_counted_and_named_where_they_may_be_skipped(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given)
    line = f"{EVALUATE} --data damaged --skip-bad --json"
    assert main(line.split()) == 0
    printed = capsys.readouterr()
    assert "damaged: 1 of 2 images are damaged and left out: b.jpg" in printed.err
    assert json.loads(printed.out)["n"] == 1
