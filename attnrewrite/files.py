"""Files in, with what is wrong with them said in one line; files and folders out, which appear whole or not at all."""

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnrewrite.errors import AttnRewriteError, InputError, first_line

LOWERED = frozenset({"artifact.json", "model.so", "model.tar", "model.mlpackage", "kernels.cl", "launches.json"})
WRITTEN = LOWERED | {
    "model.pt2", "weights.safetensors", "plan.json", "report.json", "report.html", "model.onnx", "model.onnx.data",
}  # fmt: skip
# What the records in a folder of ours hold: a conversion's plan, its report, a comparison's report.
RECORDS = (("plan.json", {"model", "placements"}), ("report.json", {"model", "sites"}), ("report.json", {"rows"}))
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ENOUGH_BYTES = 1 << 20  # a disk with less left than this is full
_TOKEN_BYTES = 4  # of the random part of a temporary name


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


def read_json(path: Path) -> Any:
    """What the JSON file at `path` holds. Raises InputError where it cannot be read, or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: it is not JSON ({first_line(error, 80)})") from error


def check_free(out: Path, *, force: bool) -> None:
    """Raise InputError unless the folder `out` can be made or, with `force`, replaced: where it is empty, or holds
    nothing but what attnrewrite wrote. Nothing is written.
    """
    out = Path(out).expanduser().absolute()
    if os.path.lexists(out):
        if not force:
            raise InputError(f"{out} exists: choose another output folder, or replace it with --force")
        if out == Path.home() or Path.cwd().is_relative_to(out):
            raise InputError(f"{out} holds the folder you work in and is not replaced: choose another output folder")
        _check_ours(out)
    _check_writable(out)


def _check_ours(out: Path) -> None:
    """Raise InputError unless `out` is a folder that is empty, or known to be attnrewrite's by all that it holds."""
    keep = "is not replaced: choose another output folder, or remove it yourself"
    if out.is_symlink() or not out.is_dir():
        raise InputError(f"{out} is {'a link' if out.is_symlink() else 'no folder'} and {keep}")
    names = {entry.name for entry in out.iterdir()}
    if foreign := sorted(names - WRITTEN):
        raise InputError(f"{out} holds {foreign[0]}, which attnrewrite did not write, and {keep}")
    if not (names <= LOWERED or any(keys <= _keys(out / record) for record, keys in RECORDS)):
        raise InputError(f"{out} holds neither a plan nor a report of attnrewrite, and {keep}")


def _keys(record: Path) -> set[str]:
    """The keys of the JSON object in a file; none where it holds no such thing."""
    try:
        content = read_json(record)
    except InputError:
        return set()
    return set(content) if isinstance(content, dict) else set()


def _check_writable(out: Path) -> None:
    """Raise InputError where nothing can be made beside `out`."""
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
def reserved(out: Path, *, force: bool) -> Iterator[None]:
    """Nobody else's while the block runs: the output folder `out`, which `staged` makes in it.

    What killed runs left behind is put back (a folder that was about to be replaced) or removed. The lock is a file
    beside `out` that the system frees when its process ends, however that ends.

    Raises:
        InputError: another process writes `out`, `check_free` raises it, or the disk is full.
    """
    out = Path(out).expanduser().absolute()
    _check_writable(out)
    kept = _nearest_existing(out.parent)
    lock = out.with_name(f".{out.name}.lock")
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(lock, out)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}") from error
        try:
            _clear_leftovers(out)
            check_free(out, force=force)
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    except Exception as error:
        if _is_full(error, kept):
            raise InputError(f"cannot write {out}: {os.strerror(errno.ENOSPC)}") from error
        raise
    finally:
        _prune(out.parent, kept)


def _locked(lock: Path, out: Path) -> int:
    """The open file `lock`, held by this process alone and naming it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise InputError(
                f"{out} is being written by another run (process {owner}): wait for it, or choose another output folder"
            ) from error
        if _is_open(descriptor, lock):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)  # whoever held it removed it meanwhile


def _is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _clear_leftovers(out: Path) -> None:
    """Undo what a killed run left beside `out`: `staged` renames the old folder away, then the new one into place."""
    for old in _leftovers(out, "replaced"):
        if os.path.lexists(out):
            _remove(old)
        else:
            old.rename(out)
    for partial in _leftovers(out, "partial"):
        _remove(partial)


def _leftovers(out: Path, kind: str) -> list[Path]:
    start = f".{out.name}."
    length = len(start) + 2 * _TOKEN_BYTES + len(f".{kind}")
    beside = (path for path in out.parent.iterdir() if len(path.name) == length)
    return [path for path in beside if path.name.startswith(start) and path.suffix == f".{kind}"]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def staged(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block succeeds, and goes when it fails.

    An existing `out` is refused unless `force`, which replaces it: the old one stays until the new one is whole.

    Raises:
        InputError: `check_free` raises it, or `out` cannot be written, as on a full disk.
    """
    out = Path(out).expanduser().absolute()
    check_free(out, force=force)
    stage = out.with_name(f".{out.name}.{secrets.token_hex(_TOKEN_BYTES)}.partial")
    kept = _nearest_existing(out.parent)
    try:
        try:
            stage.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}") from error
        yield stage
        _replace(stage, out, force=force)
    except BaseException as error:
        full = _is_full(error, kept)
        shutil.rmtree(stage, ignore_errors=True)
        _prune(out.parent, kept)
        if full:
            raise InputError(f"cannot write {out}: {os.strerror(errno.ENOSPC)}") from error
        raise


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether a disk without room is why writing into `folder` failed, in the errors of torch and safetensors, too."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    if isinstance(error, AttnRewriteError) or not isinstance(error, Exception):
        return False
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(folder).free < ENOUGH_BYTES


def check_free_file(out: Path, *, force: bool) -> None:
    """Raise InputError unless the file `out` can be written (or, with `force`, replaced). Nothing is written."""
    out = Path(out).expanduser()
    if out.is_dir():
        raise InputError(f"{out} is a folder: give the name of a file to write in it")
    if os.path.lexists(out) and not force:
        raise InputError(f"{out} exists: choose another file, or replace it with --force")
    _check_writable(out.absolute())


def write_file(out: Path, text: str, *, force: bool) -> None:
    """Write `text` to the file `out`, which appears whole or not at all; its folder is made.

    Raises InputError where `out` exists (without `force`) or cannot be written.
    """
    out = Path(out).expanduser().absolute()
    check_free_file(out, force=force)
    stage = out.with_name(f".{out.name}.{secrets.token_hex(_TOKEN_BYTES)}.partial")
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
    if os.path.lexists(old):
        _remove(old)


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
