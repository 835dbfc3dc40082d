"""Files in: paths as users give them, and what is wrong with a file said in one line."""

import json
import os
from pathlib import Path
from typing import Any

from attnrewrite.errors import InputError, first_line

_TOLD = 100  # characters of a name that cannot be used


def as_path(given: object) -> Path:
    """A path as a user gives it, `~` written out.

    Raises:
        InputError: it is no path, or the system takes no such name.
    """
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"a {type(given).__name__} is no path: give a text or a pathlib.Path")
    try:
        path = Path(given).expanduser()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # as for a zero byte, or a user that is not known
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{str(given)[:_TOLD]!r} cannot be used as a path: {reason}") from error
    return path


def check_file(path: Path, what: str) -> None:
    """Raise InputError unless `path` is a readable file that is not a web page or a placeholder of one."""
    path = as_path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder: the {what} is a file in it")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is a pipe or a device: save the {what} as a file, which is read more than once")
    try:
        head = head_of(path)
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from error
    if not head:
        raise InputError(f"{path} is empty: fetch the {what} again")
    if head.startswith((b"<", b"\xef\xbb\xbf<")):
        raise InputError(f"{path} is a web page, not a {what}: fetch the file itself (its raw download)")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not a {what}: fetch the file with git lfs pull")


def head_of(path: Path) -> bytes:
    """The first characters of a file, without the space before them."""
    with path.open("rb") as file:
        return file.read(64).lstrip()


def read_json(path: Path) -> Any:
    """What the JSON file at `path` holds. Raises InputError where it cannot be read, or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: it is not JSON ({first_line(error, 80)})") from error
