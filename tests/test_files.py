"""Output folders and files appear whole or not at all."""

import os
from pathlib import Path

import pytest

from attnrewrite.errors import InputError
from attnrewrite.files import check_free, check_free_file, staged, write_file


def fill(out: Path, text: str, *, force: bool = False) -> None:
    with staged(out, force=force) as folder:
        (folder / "report.json").write_text(text)
        assert folder.parent == out.parent
        assert folder != out


def test_the_folder_appears_with_its_parents_and_can_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    fill(out, "first")
    fill(out, "second", force=True)
    assert (out / "report.json").read_text() == "second"
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
    fill(out, "new", force=True)
    assert (out / "report.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing_new_and_keeps_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    kept = tmp_path / "kept"
    fill(kept, "old")
    for out, force in ((kept, True), (tmp_path / "new" / "deep", False)):
        with pytest.raises(error):
            interrupted(out, force, error)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["report.json"]
    assert (kept / "report.json").read_text() == "old"


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="exists"), staged(out, force=False):
        fill(out, "someone else's")
    assert (out / "report.json").read_text() == "someone else's"
    assert os.listdir(tmp_path) == ["out"]


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a folder"):
        check_free(tmp_path / "file" / "out", force=False)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for out in (Path("."), tmp_path / "here"):
        with pytest.raises(InputError, match="not replaced"):
            check_free(out, force=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission"):
        check_free(tmp_path / "out", force=False)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    write_file(out, "first", force=False)
    with pytest.raises(InputError, match=r"page\.html exists: choose another file, or replace it with --force"):
        write_file(out, "second", force=False)
    with pytest.raises(UnicodeEncodeError):
        write_file(out, "\ud800", force=True)
    assert (out.read_text(), os.listdir(out.parent)) == ("first", ["page.html"])
    write_file(out, "second", force=True)
    assert (out.read_text(), os.listdir(out.parent)) == ("second", ["page.html"])


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "is a folder: give the name of a file"), ("held/page.html", "held is not a folder")],
)
def test_a_file_that_cannot_be_written_is_told_before(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "held").write_text("")
    with pytest.raises(InputError, match=said):
        check_free_file(tmp_path / name, force=True)
    assert os.listdir(tmp_path) == ["held"]
