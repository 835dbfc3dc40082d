"""Files in, with what is wrong with them said in one line; files and folders out, which appear whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attnrewrite.errors import InputError


def check_file(path: Path, what: str) -> None:
    """Raise InputError unless `path` is a readable file that is not a web page or a placeholder of one."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: the {what} is a file in it")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from error
    if not head:
        raise InputError(f"{path} is empty: fetch the {what} again")
    if head.lstrip().startswith((b"<", b"\xef\xbb\xbf<")):
        raise InputError(f"{path} is a web page, not a {what}: fetch the file itself (its raw download)")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not a {what}: fetch the file with git lfs pull")


def check_free(out: Path, *, force: bool) -> None:
    """Raise InputError unless `out` can be made (or, with `force`, replaced). Nothing is written."""
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out):
        if not force:
            raise InputError(f"{out} exists: choose another output folder, or replace it with --force")
        if out == Path.home() or Path.cwd().is_relative_to(out):
            raise InputError(f"{out} holds the folder you work in and is not replaced: choose another output folder")
    parent = _nearest_existing(out.parent)
    if not parent.is_dir():
        raise InputError(f"cannot write {out}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {out}: no permission in {parent}")


def check_apart(out: Path, given: Iterable[Path]) -> None:
    """Raise InputError where replacing `out` would remove one of the files or folders `given`, which are read."""
    out = Path(out).expanduser().resolve()
    for path in given:
        if os.path.lexists(path) and path.resolve().is_relative_to(out):
            raise InputError(f"{out} is, or holds, {path}, which is read: choose another output folder")


@contextmanager
def staged(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block succeeds, and goes when it fails.

    An existing `out` is refused unless `force`, which replaces it: the old one stays until the new one is whole.
    Raises InputError where `out` cannot be written.
    """
    out = Path(out).expanduser().absolute()
    check_free(out, force=force)
    stage = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    kept = _nearest_existing(out.parent)
    try:
        try:
            stage.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}") from error
        yield stage
        _replace(stage, out, force=force)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        _prune(out.parent, kept)
        raise


def check_free_file(out: Path, *, force: bool) -> None:
    """Raise InputError unless the file `out` can be written (or, with `force`, replaced). Nothing is written."""
    out = Path(out).expanduser()
    if out.is_dir():
        raise InputError(f"{out} is a folder: give the name of a file to write in it")
    if os.path.lexists(out) and not force:
        raise InputError(f"{out} exists: choose another file, or replace it with --force")
    check_free(out, force=force)


def write_file(out: Path, text: str, *, force: bool) -> None:
    """Write `text` to the file `out`, which appears whole or not at all; its folder is made.

    Raises InputError where `out` exists (without `force`) or cannot be written.
    """
    out = Path(out).expanduser().absolute()
    check_free_file(out, force=force)
    stage = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    kept = _nearest_existing(out.parent)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage.write_text(text, encoding="utf-8")
        stage.replace(out)
    except BaseException as error:
        stage.unlink(missing_ok=True)
        _prune(out.parent, kept)
        if isinstance(error, OSError):
            raise InputError(f"cannot write {out}: {error.strerror}") from error
        raise


def _replace(stage: Path, out: Path, *, force: bool) -> None:
    check_free(out, force=force)
    old = stage.with_suffix(".replaced")
    try:
        if os.path.lexists(out):
            out.rename(old)
        stage.rename(out)
    except OSError as error:
        if os.path.lexists(old) and not os.path.lexists(out):
            old.rename(out)
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def _nearest_existing(folder: Path) -> Path:
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def _prune(folder: Path, kept: Path) -> None:
    """Remove the empty folders from `folder` up to, not including, `kept`."""
    while folder != kept:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        folder = folder.parent
