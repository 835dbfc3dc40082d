"""Which converted folders this user wrote on this machine, and from what code: what their reports name may run again.

A report names the model that a folder was made from. Where that is a Python file or an exported program, loading it
runs code, so that a folder from someone else could run anything. What is one's own is kept outside the folders, in the
user's state folder: for each folder written a small file, named by a digest of its report and plan, with the digest of
the code's file in it.
"""

import hashlib
import logging
import os
from pathlib import Path

from attnrewrite.errors import InputError

NO_CODE = "none"  # what is kept for a model that no file's code made
_RECORDS = ("report.json", "plan.json")
log = logging.getLogger("attnrewrite")


def code_digest(path: Path) -> str:
    """A digest of the file at `path`.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def remember(folder: Path, code: str) -> None:
    """Keep that this user wrote the converted `folder`, from code with the digest `code` (or NO_CODE)."""
    kept = _kept(folder)
    fresh = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(code + "\n")
        fresh.replace(kept)
    except OSError as error:
        log.warning("%s is not remembered as your own (%s: %s)", folder, kept.parent, error.strerror)


def remembered(folder: Path) -> str | None:
    """The digest of the code (or NO_CODE) that this user wrote `folder` from, as it stands; None where not known."""
    try:
        return _kept(folder).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _kept(folder: Path) -> Path:
    """Where it is kept that `folder`, with just this report and plan, is one's own."""
    digest = hashlib.sha256()
    for name in _RECORDS:
        digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    home = os.environ.get("XDG_STATE_HOME")
    state = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    return state / "attnrewrite" / "written" / digest.hexdigest()
