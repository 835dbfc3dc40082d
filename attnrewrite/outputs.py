"""Files and folders out: they appear whole or not at all, and replace only what attnrewrite wrote."""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from attnrewrite.errors import AttnRewriteError, InputError
from attnrewrite.files import as_path, head_of, read_json

LOWERED = frozenset({"artifact.json", "model.so", "model.tar", "model.mlpackage", "kernels.cl", "launches.json"})
WRITTEN = LOWERED | {
    "model.pt2", "weights.safetensors", "plan.json", "report.json", "report.html", "model.onnx", "model.onnx.data",
}  # fmt: skip
# What the records in a folder of ours hold: a conversion's plan, its report, a comparison's report.
RECORDS = (("plan.json", {"model", "placements"}), ("report.json", {"model", "sites"}), ("report.json", {"rows"}))
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ENOUGH_BYTES = 1 << 20  # a disk with less left than this is full
_TOKEN_BYTES = 4  # of the random part of a temporary name
_held: ContextVar[frozenset[Path]] = ContextVar("outputs that this run holds", default=frozenset())


def check_free(out: Path, *, force: bool) -> None:
    """Raise InputError unless the folder `out` can be made or, with `force`, replaced: where it is empty, or holds
    nothing but what attnrewrite wrote. Nothing is written.
    """
    out = as_path(out).absolute()
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
    try:
        names = {entry.name for entry in out.iterdir()}
    except OSError as error:
        raise InputError(f"cannot look into {out}: {error.strerror}") from error
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
    out = as_path(out).resolve()
    for path in given:
        if os.path.lexists(path) and path.resolve().is_relative_to(out):
            raise InputError(f"{out} is, or holds, {path}, which is read: choose another output folder")


@contextmanager
def reserved(out: Path, *, force: bool) -> Iterator[None]:
    """Nobody else's while the block runs: the output folder `out`, which `staged` makes in it.

    Raises:
        InputError: another process writes `out`, `check_free` raises it, or the disk is full.
    """
    out = as_path(out).absolute()
    with _alone(out):
        check_free(out, force=force)
        yield


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else writes the file or folder `out` while the block runs; a block inside one that holds it just runs.

    What killed runs left behind is put back (a folder that was about to be replaced) or removed. The lock is a file
    beside `out` that the system frees when its process ends, however that ends. Folders made on the way go again where
    nothing came to lie in them.

    Raises:
        InputError: another run writes `out`, it cannot be written, or the disk is full.
    """
    if out in _held.get():
        yield
        return
    if not out.name:
        raise InputError(f"{out} exists: choose another output")
    _check_writable(out)
    kept = _nearest_existing(out.parent)
    lock = out.with_name(f".{out.name}.lock")
    try:
        with _full_disk_told(out, kept):
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                descriptor = _locked(lock, out)
            except OSError as error:
                raise InputError(f"cannot write {out}: {error.strerror}") from error
            outer = _held.set(_held.get() | {out})
            try:
                _clear_leftovers(out)
                yield
            finally:
                _held.reset(outer)
                lock.unlink(missing_ok=True)
                os.close(descriptor)
    finally:
        _prune(out.parent, kept)


@contextmanager
def _full_disk_told(out: Path, folder: Path) -> Iterator[None]:
    """Tell of a full disk whatever is raised because of one while `out` is written, below `folder`."""
    try:
        yield
    except Exception as error:
        if _is_full(error, folder):
            raise InputError(f"cannot write {out}: {os.strerror(errno.ENOSPC)}{_or_elsewhere(folder)}") from error
        raise


def _or_elsewhere(folder: Path) -> str:
    """Where else it may be that there is no room, if there is some in `folder` by now: where compilers work."""
    temporary = Path(tempfile.gettempdir())
    if shutil.disk_usage(folder).free < ENOUGH_BYTES or temporary.stat().st_dev == folder.stat().st_dev:
        return ""
    return f", there or in {temporary} (TMPDIR names another place)"


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

    An existing `out` is refused unless `force`, which replaces it: the old one stays until the new one is whole. Nobody
    else writes `out` meanwhile, see `reserved`.

    Raises:
        InputError: `reserved` raises it, or `out` cannot be written, as on a full disk.
    """
    out = as_path(out).absolute()
    with reserved(out, force=force):
        stage = out.with_name(f".{out.name}.{secrets.token_hex(_TOKEN_BYTES)}.partial")
        try:
            with _full_disk_told(out, out.parent):
                _make(stage, out)
                yield stage
                _replace(stage, out, force=force)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise


def _make(stage: Path, out: Path) -> None:
    try:
        stage.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether a disk without room is why writing into `folder` failed, in the errors of torch and safetensors, too, and
    in what a linker says.
    """
    cause: BaseException | None = error
    seen: set[int] = set()  # an error that is raised again from itself is its own cause
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if (isinstance(cause, OSError) and cause.errno in NO_ROOM) or os.strerror(errno.ENOSPC) in str(cause):
            return True
        cause = cause.__cause__
    if isinstance(error, AttnRewriteError) or not isinstance(error, Exception):
        return False
    return shutil.disk_usage(folder).free < ENOUGH_BYTES


def check_free_file(out: Path, *, force: bool) -> None:
    """Raise InputError unless the file `out` can be written or, with `force`, replaced: where it is empty, or begins as
    a page or JSON does, which is what we write. Nothing is written.
    """
    out = as_path(out)
    if out.is_dir():
        raise InputError(f"{out} is a folder: give the name of a file to write in it")
    if os.path.lexists(out) and not force:
        raise InputError(f"{out} exists: choose another file, or replace it with --force")
    if os.path.lexists(out) and not (out.is_file() and head_of(out)[:1] in (b"", b"<", b"{")):
        raise InputError(f"{out} is no page and no JSON, and is not replaced: choose another file")
    _check_writable(out.absolute())


def write_file(out: Path, text: str, *, force: bool) -> None:
    """Write `text` to the file `out`, which appears whole or not at all; its folder is made.

    Raises InputError where `out` exists (without `force`), cannot be written, or is being written by another run.
    """
    out = as_path(out).absolute()
    with _alone(out):
        check_free_file(out, force=force)
        stage = out.with_name(f".{out.name}.{secrets.token_hex(_TOKEN_BYTES)}.partial")
        try:
            stage.write_text(text, encoding="utf-8")
            stage.replace(out)
        except (OSError, UnicodeEncodeError) as error:
            reason = getattr(error, "strerror", None) or "its text holds what is no character"
            raise InputError(f"cannot write {out}: {reason}") from error
        finally:
            stage.unlink(missing_ok=True)


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
