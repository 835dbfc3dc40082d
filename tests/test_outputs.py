"""Output folders and files appear whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnrewrite.errors import InputError
from attnrewrite.files import as_path
from attnrewrite.outputs import check_free, check_free_file, reserved, staged, write_file


def report(text: str) -> str:
    """What a comparison leaves."""
    return json.dumps({"rows": text})


def fill(out: Path, text: str, *, force: bool = False) -> None:
    with staged(out, force=force) as folder:
        (folder / "report.json").write_text(report(text))
        assert folder.parent == out.parent
        assert folder != out


def test_the_folder_appears_with_its_parents_and_can_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    fill(out, "first")
    fill(out, "second", force=True)
    assert (out / "report.json").read_text() == report("second")
    assert sorted(os.listdir(out.parent)) == ["b"]


def interrupted(out: Path, force: bool, error: type[BaseException]) -> None:
    with staged(out, force=force) as folder:
        (folder / "half").write_text("half")
        raise error


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_refused_without_force(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to(tmp_path)}[kind]()
    with pytest.raises(InputError, match="--force"), staged(out, force=False):
        pytest.fail("the block must not run")
    assert os.listdir(tmp_path) == ["out"]


PLAN = json.dumps({"version": 1, "model": "vit", "placements": []})
REPORT = json.dumps({"model": "vit", "sites": [], "calibration": {}})
# The files in a folder: whether they are replaced with --force, or what is said.
HELD: dict[str, tuple[dict[str, str], str | None]] = {
    "nothing": ({}, None),
    "a conversion": ({"plan.json": PLAN, "report.json": REPORT, "model.pt2": "", "weights.safetensors": ""}, None),
    "one of onnx": ({"plan.json": PLAN, "model.onnx": "", "model.onnx.data": "", "report.html": ""}, None),
    "a comparison": ({"report.json": report("x"), "report.html": ""}, None),
    "a lowered library": ({"model.so": ""}, None),
    "lowered kernels": ({"model.tar": "", "kernels.cl": "", "launches.json": ""}, None),
    "a file more": ({"plan.json": PLAN, "report.json": REPORT, "notes.txt": ""}, "holds notes.txt, which attnrewrite"),
    "a hidden file": ({"plan.json": PLAN, ".git": ""}, "holds .git, which attnrewrite did not write"),
    "someone's plan": ({"plan.json": '{"monday": "write"}'}, "holds neither a plan nor a report of attnrewrite"),
    "someone's report": ({"report.json": "[1, 2]"}, "holds neither a plan nor a report of attnrewrite"),
    "a damaged report": ({"report.json": "{"}, "holds neither a plan nor a report of attnrewrite"),
    "a model of the user's": ({"model.onnx": ""}, "holds neither a plan nor a report of attnrewrite"),
}


@pytest.mark.parametrize("name", HELD)
def test_force_replaces_what_attnrewrite_wrote_and_nothing_else(tmp_path: Path, name: str) -> None:
    content, said = HELD[name]
    out = tmp_path / "out"
    out.mkdir()
    for file, text in content.items():
        (out / file).write_text(text)
    if said is None:
        fill(out, "new", force=True)
        assert (out / "report.json").read_text() == report("new")
        assert os.listdir(out) == ["report.json"]
    else:
        with pytest.raises(InputError, match=said) as error:
            fill(out, "new", force=True)
        assert "is not replaced: choose another output folder, or remove it yourself" in str(error.value)
        assert {path.name: path.read_text() for path in out.iterdir()} == content
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("kind", "said"), [("file", "is no folder and"), ("link", "is a link and")])
def test_force_replaces_no_file_and_no_link(tmp_path: Path, kind: str, said: str) -> None:
    out = tmp_path / "out"
    {"file": out.touch, "link": lambda: out.symlink_to(tmp_path)}[kind]()
    with pytest.raises(InputError, match=said):
        fill(out, "new", force=True)
    assert os.listdir(tmp_path) == ["out"]


def test_what_killed_runs_left_is_cleared_by_the_next_run_on_the_same_output(tmp_path: Path) -> None:
    (tmp_path / ".out.0a1b2c3d.partial").mkdir()
    (tmp_path / ".out.0a1b2c3d.partial" / "half").write_text("half")
    (tmp_path / ".out.0a1b2c3e.partial").write_text("half")
    others = (".out.x.0a1b2c3d.partial", ".other.0a1b2c3d.partial", ".out.notes.partial", "out.0a1b2c3d.partial")
    for name in others:
        (tmp_path / name).mkdir()
    with reserved(tmp_path / "out", force=False):
        fill(tmp_path / "out", "new")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "out"])


def test_a_folder_whose_replacement_was_cut_off_is_put_back(tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / ".out.0a1b2c3d.replaced"
    fill(old, "old")
    with pytest.raises(InputError, match="exists"), reserved(out, force=False):
        pytest.fail("the block must not run")
    assert (os.listdir(tmp_path), (out / "report.json").read_text()) == (["out"], report("old"))
    fill(old, "older")
    with reserved(out, force=True):
        fill(out, "new", force=True)
    assert (os.listdir(tmp_path), (out / "report.json").read_text()) == (["out"], report("new"))


HOLD = """
import sys, time
from pathlib import Path
from attnrewrite.outputs import reserved

with reserved(Path(sys.argv[1]), force=False):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_run_on_an_output_is_refused_and_a_killed_one_does_not_stand_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        said = rf"is being written by another run \(process {first.pid}\)"
        with pytest.raises(InputError, match=said), reserved(out, force=True):
            pytest.fail("the block must not run")
        first.kill()
    assert os.listdir(out.parent) == [".out.lock"]
    with reserved(out, force=False):
        fill(out, "new")
    assert os.listdir(out.parent) == ["out"]


def test_what_is_written_without_being_reserved_first_is_locked_as_well(tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    said = rf"is being written by another run \(process {os.getpid()}\)"
    with staged(out, force=False), ThreadPoolExecutor(1) as another:
        assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".partial"]
        with pytest.raises(InputError, match=said):
            another.submit(fill, out, "mine").result()
    with reserved(page, force=False), ThreadPoolExecutor(1) as another, pytest.raises(InputError, match=said):
        another.submit(write_file, page, "mine", force=True).result()


def test_what_killed_runs_left_of_a_file_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".page.html.0a1b2c3d.partial").write_text("half")
    (tmp_path / ".page.html.lock").write_text("1")
    write_file(tmp_path / "page.html", "whole", force=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"page.html": "whole"}


@pytest.mark.parametrize("name", ["a\0b", "~nobody-here/out", "x" * 300, "\ud800", 3, None, b"out"])
def test_names_that_no_system_takes_are_told(name: object) -> None:
    with pytest.raises(InputError, match=r"cannot be used as a path|is no path"):
        as_path(name)


def test_a_lock_goes_with_the_folders_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stopped"), reserved(tmp_path / "a" / "b" / "out", force=False):
        raise ValueError("stopped")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(out: Path, error: Exception) -> None:
        with reserved(out, force=False), staged(out, force=False) as folder:
            (folder / "half").write_text("half")
            raise error

    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InputError, match=r"cannot write .*out: No space left on device"):
        write(tmp_path / "new" / "out", full)
    with pytest.raises(RuntimeError, match="a bug"):
        write(tmp_path / "out", RuntimeError("a bug"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(InputError, match="No space left on device"):
        write(tmp_path / "out", RuntimeError("PytorchStreamWriter failed writing file data"))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        for write in (
            lambda folder: (folder / "file").write_bytes(bytes(4 << 20)),
            lambda folder: torch.save(torch.zeros(1 << 20), folder / "file"),
            lambda folder: save_file({"x": torch.zeros(1 << 20)}, folder / "file"),
        ):
            out, full = disk / "out", pytest.raises(InputError, match="No space left on device")
            with full, reserved(out, force=False), staged(out, force=False) as folder:
                write(folder)
            assert os.listdir(disk) == []
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        out, full = tmp_path / "out", pytest.raises(InputError, match=f"there or in {disk} ")
        with full, reserved(out, force=False), staged(out, force=False), tempfile.NamedTemporaryFile() as file:
            file.write(bytes(4 << 20))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing_new_and_keeps_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    kept = tmp_path / "kept"
    fill(kept, "old")
    for out, force in ((kept, True), (tmp_path / "new" / "deep", False)):
        with pytest.raises(error):
            interrupted(out, force, error)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["report.json"]
    assert (kept / "report.json").read_text() == report("old")


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="exists"), staged(out, force=False):
        fill(out, "someone else's")
    assert (out / "report.json").read_text() == report("someone else's")
    assert os.listdir(tmp_path) == ["out"]


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a folder"):
        check_free(tmp_path / "file" / "out", force=False)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(InputError, match="/ exists: choose another"), staged(Path("/"), force=True):
        pytest.fail("the block must not run")
    for out in (Path("."), tmp_path / "here"):
        with pytest.raises(InputError, match="not replaced"):
            check_free(out, force=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission"):
        check_free(tmp_path / "out", force=False)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    write_file(out, "<p>first", force=False)
    with pytest.raises(InputError, match=r"page\.html exists: choose another file, or replace it with --force"):
        write_file(out, "second", force=False)
    with pytest.raises(InputError, match="its text holds what is no character"):
        write_file(out, "\ud800", force=True)
    assert (out.read_text(), os.listdir(out.parent)) == ("<p>first", ["page.html"])
    write_file(out, "second", force=True)
    assert (out.read_text(), os.listdir(out.parent)) == ("second", ["page.html"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is a folder: give the name of a file"),
        ("held/page.html", "held is not a folder"),
        ("held", "held is no page and no JSON, and is not replaced"),
        ("null", "null is no page and no JSON, and is not replaced"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "held").write_text("weights")
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(InputError, match=said):
        check_free_file(tmp_path / name, force=True)
    assert sorted(os.listdir(tmp_path)) == ["held", "null"]
