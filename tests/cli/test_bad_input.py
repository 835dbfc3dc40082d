"""Command lines that cannot be carried out: an exit code, one clear line on standard error, nothing left behind."""

import io
import json
import math
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_command_lines import CASES, EVALUATE, SIZE
from PIL import Image

from attnrewrite.cli.main import main
from attnrewrite.errors import CheckFailedError
from attnrewrite.frontends.sources import load_source


class Code:
    def __reduce__(self) -> tuple:
        return os.system, ("touch ran",)


def beyond_memory(path: Path) -> None:
    """An .npz whose header promises more images than any machine holds, and no images."""
    head = io.BytesIO()
    shape = (10**6, 10**4, 10**4, 3)
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", head.getvalue())


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
    np.savez(folder / "few.npz", x=np.zeros((7, 16, 16, 3), np.uint8))
    np.savez(folder / "some.npz", x=np.random.default_rng(0).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8))
    np.savez(folder / "none.npz", x=pixels[:0])
    np.savez(folder / "grey.npz", x=pixels[..., 0])
    np.savez(folder / "channels_first.npz", x=pixels.transpose(0, 3, 1, 2))
    np.savez(folder / "objects.npz", x=np.array([None]))
    np.savez(folder / "unnamed.npz", images=pixels)
    np.savez(folder / "unpaired.npz", x=pixels, y=np.arange(3))
    np.savez(folder / "negative.npz", x=pixels, y=np.arange(4) - 1)
    np.savez(folder / "huge.npz", x=pixels, y=np.full(4, 2**64 - 1, np.uint64))
    beyond_memory(folder / "beyond.npz")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:-40])
    for name in ("empty", "damaged", "existing", "broken", "torn", "deep"):
        (folder / name).mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for index in range(10):
        Image.fromarray(noise).save(folder / "torn" / f"{index}.jpg")
    for name in ("3.jpg", "7.jpg"):
        (folder / "torn" / name).write_bytes((folder / "torn" / name).read_bytes()[:-2000])
    (folder / "absurd").mkdir()
    (folder / "absurd" / "a.ppm").write_bytes(b"P6\n2\xb04 24\n255\n")
    Image.fromarray(noise).save(folder / "absurd" / "b.bmp")
    header = bytearray((folder / "absurd" / "b.bmp").read_bytes())
    header[18:26] = (2**20).to_bytes(4, "little") * 2  # a picture of a million columns and rows
    (folder / "absurd" / "b.bmp").write_bytes(header)
    (folder / "broken" / "a.png").write_bytes(b"not a picture")
    Image.fromarray(noise[..., 0].astype(np.uint16)).save(folder / "deep" / "a.png")
    (folder / "negative.toml").write_text("max-drop = -1\nvariant = 'auto'\ncalibrate = 'some.npz'")
    Image.fromarray(noise).save(folder / "damaged" / "a.jpg")
    (folder / "damaged" / "b.jpg").write_bytes((folder / "damaged" / "a.jpg").read_bytes()[:-2000])
    (folder / "ours").mkdir()
    (folder / "ours" / "report.json").write_text('{"rows": []}')
    (folder / "existing" / "mine.txt").write_text("keep me")
    (folder / "bad.toml").write_text("variant = ")
    (folder / "typo.toml").write_text("varaint = 'l1'")
    (folder / "json.toml").write_text("json = true")
    (folder / "json_typo.toml").write_text("varaint = 'l1'\njson = true")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_bad_input(given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    line, exit_code, message = CASES[case]
    monkeypatch.setattr("attnrewrite.cli.output.WORTH_A_LINE", math.inf)  # no progress is told on a slow machine
    monkeypatch.chdir(given)
    before = contents(given)
    code = main([*line.split(), "--json"])
    printed = capsys.readouterr()
    lines = [each for each in printed.err.splitlines() if not each.startswith("note: ")]
    assert code == exit_code, printed.err
    assert message in lines[-1]
    assert len(lines) == 1
    told = json.loads(printed.out)
    assert list(told["error"]) == ["code", "message", "site"]
    assert message in " ".join(told["error"]["message"].split())
    assert "dry" in case or list(told) == ["error"]
    assert told["error"]["code"] in {2: ("bad-input", "bad-usage"), 3: ("nothing-matched",)}[exit_code]
    assert contents(given) == before


def test_what_nobody_expected_is_told_in_json_too(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given)
    for raised, exit_code, code, message in (
        (CheckFailedError("blocks.1 differs by 1", site="site1"), 4, "check-failed", "blocks.1 differs by 1"),
        (RuntimeError("a bug\nin two lines"), 1, "unexpected", "RuntimeError: a bug (ATTNREWRITE_DEBUG=1 shows where)"),
        (KeyboardInterrupt(), 130, "stopped", "stopped"),
    ):

        def fail(*_: object, error: BaseException = raised, **__: object) -> None:
            raise error

        monkeypatch.setattr("attnrewrite.api.examine", fail)
        assert main([*f"explain models.py:vit {SIZE} --json".split()]) == exit_code
        told = json.loads(capsys.readouterr().out)
        assert told == {"error": {"code": code, "message": message, "site": "site1" if exit_code == 4 else None}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain vit --config json.toml", "no model 'vit'"),
        ("explain models.py:vit --config json_typo.toml", "unknown option of explain in json_typo.toml 'varaint'"),
        ("explain --config json.toml", "Missing argument 'SOURCE'"),
    ],
)
def test_json_may_be_asked_for_by_the_configuration(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(given)
    assert main(line.split()) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    ("redirected", "exit_code", "said"),
    [
        ("1>&-", 0, ""),
        ("2>&- 1>&-", 0, ""),
        ("1>/dev/full", 2, "attnrewrite: error: cannot write the result to standard output: No space left on device\n"),
    ],
)
def test_a_standard_output_that_takes_nothing(redirected: str, exit_code: int, said: str) -> None:
    command = f"{sys.executable} -m attnrewrite variants --json {redirected}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", said)


def test_sites_and_near_misses_of_a_model_without_attention_come_with_the_error(
    given: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given)
    assert main([*f"explain models.py:gated {SIZE} --json".split()]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["sites"], len(told["near_misses"]), told["error"]["code"]) == ([], 1, "nothing-matched")


def test_a_reader_who_has_had_enough_ends_it_quietly() -> None:
    command = f"{sys.executable} -m attnrewrite variants --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("{", "")
    assert done.returncode in (0, 141)  # 0 where it had written all before the reader left


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
    assert main([*f"convert models.py:vit {SIZE} --out".split(), str(tmp_path / "new" / "out")]) == 2
    assert "error: cannot write" in (told := capsys.readouterr().err)
    assert "No space left on device" in told
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
