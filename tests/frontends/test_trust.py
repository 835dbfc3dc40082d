"""Whose code runs: what a converted folder names as its original is loaded only where it is the user's own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.errors import InputError
from attnrewrite.frontends.sources import load_source

HOW = {"input_size": "3x16x16", "mean": 0.0, "std": 1.0}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# [B, 3, 16, 16] -> [B, 16]: one attention over a class token and four patches.
MODEL = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 48), nn.Linear(16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head(x.mean(1))


def vit():
    return Vit()
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A Python file of a model that leaves a marker whenever it runs."""
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('ran ')\n{MODEL}")
    return file


@pytest.fixture
def folder(tmp_path: Path, model_file: Path) -> Path:
    """A folder converted from it, the marker cleared."""
    out = ar.convert(f"{model_file}:vit", variant="l1", **HOW).save(tmp_path / "out")
    (tmp_path / "ran").unlink()
    return out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8))
    return tmp_path / "data.npz"


def ran(tmp_path: Path) -> bool:
    return (tmp_path / "ran").exists()


def change_report(folder: Path, **source: Any) -> None:
    report = json.loads((folder / "report.json").read_text())
    report["source"] |= source
    (folder / "report.json").write_text(json.dumps(report))


def test_a_folder_of_ones_own_is_held_against_its_original_unasked(folder: Path, data: Path, tmp_path: Path) -> None:
    found = ar.evaluate(folder, data)
    assert list(found) == ["vit (original)", "out"]
    assert found["out"].agreement is not None
    assert ran(tmp_path)


def test_so_is_a_copy_of_it(folder: Path, data: Path, tmp_path: Path) -> None:
    assert ar.evaluate(shutil.copytree(folder, tmp_path / "copy"), data)["copy"].agreement is not None


def forget(folder: Path, model_file: Path) -> None:
    shutil.rmtree(folder.parent / "state")


def change_code(folder: Path, model_file: Path) -> None:
    model_file.write_text(model_file.read_text() + "\n# changed\n")


def name_another(folder: Path, model_file: Path) -> None:
    shutil.copy(model_file, folder / "evil.py")
    change_report(folder, spec=f"{folder / 'evil.py'}:vit")


def name_relatively(folder: Path, model_file: Path) -> None:
    shutil.copy(model_file, folder / "evil.py")
    change_report(folder, spec="evil.py:vit")


def disguise_as_onnx(folder: Path, model_file: Path) -> None:
    shutil.copy(model_file, folder / "evil.py")
    change_report(folder, spec=f"{folder / 'evil.py'}:vit.onnx")


def name_relative_weights(folder: Path, model_file: Path) -> None:
    change_report(folder, spec="timm:vit_tiny_patch16_224", checkpoint="weights.pth")


def name_a_program(folder: Path, model_file: Path) -> None:
    change_report(folder, spec=str(folder / "model.pt2"))


def name_a_folder(folder: Path, model_file: Path) -> None:
    change_report(folder, spec=str(folder))


def name_a_download(folder: Path, model_file: Path) -> None:
    change_report(folder, spec="timm:vit_tiny_patch16_224", checkpoint="pretrained")


def change_the_plan(folder: Path, model_file: Path) -> None:
    (folder / "plan.json").write_text((folder / "plan.json").read_text() + " ")


NOT_WRITTEN = "was not written by you on this machine"
FOREIGN: dict[Callable[[Path, Path], None], str] = {
    forget: NOT_WRITTEN,
    change_code: "has changed since",
    name_another: NOT_WRITTEN,
    name_relatively: "names its original by a relative path, evil.py:vit",
    disguise_as_onnx: NOT_WRITTEN,
    name_relative_weights: "names its original's weights by a relative path, weights.pth",
    name_a_program: NOT_WRITTEN,
    name_a_folder: NOT_WRITTEN,
    name_a_download: NOT_WRITTEN,
    change_the_plan: NOT_WRITTEN,
}


@pytest.mark.parametrize("change", FOREIGN, ids=lambda change: change.__name__)
def test_foreign_code_does_not_run(
    change: Callable[[Path, Path], None],
    folder: Path,
    model_file: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder, model_file)
    monkeypatch.chdir(folder)  # where a relative path would lead to what lies in the folder
    with pytest.raises(InputError, match=FOREIGN[change]) as error:
        load_source(folder).original()
    assert "to load it, name it: --original " in str(error.value)
    assert main(["evaluate", str(folder), "--data", str(data), "--json"]) == 0
    printed = capsys.readouterr()
    assert FOREIGN[change] in printed.err
    assert "--original" in printed.err
    assert json.loads(printed.out)["agreement"] is None
    picture, page = tmp_path / "picture.png", tmp_path / "page.html"
    write_picture(picture)
    assert main(["explain", str(folder), "--image", str(picture), "--maps", str(page)]) == 2
    assert FOREIGN[change] in capsys.readouterr().err
    assert not page.exists()
    assert not ran(tmp_path)


def write_picture(path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def test_code_named_on_the_command_line_runs(
    folder: Path, model_file: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(folder, model_file)
    named = ["--original", f"{model_file}:vit"]
    assert main(["evaluate", str(folder), "--data", str(data), "--json", *named]) == 0
    assert json.loads(capsys.readouterr().out)["agreement"] is not None
    assert ran(tmp_path)
    picture, page = tmp_path / "picture.png", tmp_path / "page.html"
    write_picture(picture)
    assert main(["explain", str(folder), "--image", str(picture), "--maps", str(page), *named]) == 0
    assert page.is_file()


def test_its_weights_are_those_that_are_named_beside_it(
    folder: Path, model_file: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = load_source(f"{model_file}:vit", input_size="3x16x16").model
    assert other is not None
    state = {name: value + 1 for name, value in other.state_dict().items()}
    torch.save(state, tmp_path / "other.pth")
    named = ["--original", f"{model_file}:vit", "--checkpoint", str(tmp_path / "other.pth")]
    found = load_source(folder).original(f"{model_file}:vit", str(tmp_path / "other.pth")).model
    assert found is not None
    assert torch.equal(found.state_dict()["token"], state["token"])
    assert main(["evaluate", str(folder), "--data", str(data), "--json", *named]) == 0
    assert json.loads(capsys.readouterr().out)["logit_mse"] > 0.1


def test_converting_a_foreign_folder_does_not_make_its_code_ones_own(
    folder: Path, model_file: Path, tmp_path: Path
) -> None:
    name_another(folder, model_file)
    ar.convert(folder, variant="softmax", mean=0.0, std=1.0).save(tmp_path / "again")
    with pytest.raises(InputError, match=NOT_WRITTEN):
        load_source(tmp_path / "again").original()
    assert not ran(tmp_path)


def test_a_model_of_a_library_is_loaded_from_any_folder(folder: Path, model_file: Path) -> None:
    change_report(folder, spec="timm:vit_tiny_patch16_224", input_size=None)
    assert load_source(folder).original().name == "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("evaluate {model} --input-size 3x16x16 --mean 0 --std 1 --data {data} --original {model}", "has no original"),
        (
            "explain {model} --input-size 3x16x16 --original {model}",
            "--image and --maps show a converted folder beside",
        ),
    ],
)
def test_an_original_without_a_folder_is_refused(
    line: str, said: str, model_file: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(model=f"{model_file}:vit", data=data).split()) == 2
    assert said in capsys.readouterr().err


def test_the_original_of_a_model_that_was_in_memory_is_named(model_file: Path, data: Path, tmp_path: Path) -> None:
    model = load_source(f"{model_file}:vit", **HOW).model
    assert model is not None
    torch.save(model.state_dict(), tmp_path / "w.pt")
    out = ar.convert(model, variant="l1", **HOW).save(tmp_path / "out")
    with pytest.raises(InputError, match=r"in memory.* name it with --original"):
        load_source(out).original()
    original = load_source(out).original(f"{model_file}:vit", str(tmp_path / "w.pt"))
    assert original.input_size == (3, 16, 16)
    assert original.preprocessing == load_source(out).preprocessing
    example = original.example_inputs[0]
    torch.testing.assert_close(original.model(example), model(example))  # type: ignore[misc]


def test_where_the_state_folder_cannot_be_written_a_line_says_so(
    model_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    out = ar.convert(f"{model_file}:vit", variant="l1", **HOW).save(tmp_path / "out")
    assert "is not remembered as your own" in caplog.text
    with pytest.raises(InputError, match=NOT_WRITTEN):
        load_source(out).original()
