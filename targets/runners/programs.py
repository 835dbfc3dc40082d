"""Other programs that a check runs: what they print, or why they are of no use here."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from attnrewrite.errors import first_line


class Unavailable(Exception):
    """Why something cannot be executed on this machine, in one sentence."""


class Failed(Unavailable):
    """A program that was started and failed."""


def run(command: Sequence[str], timeout_s: float, given: str = "") -> str:
    """What a command prints on standard output, `given` that text on its standard input.

    Raises:
        Failed: it ends with another status than 0.
        Unavailable: it cannot be started, or takes longer than `timeout_s` seconds.
    """
    name = Path(command[0]).name
    try:
        finished = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{name} took more than {timeout_s:.0f} s") from error
    except OSError as error:
        raise Unavailable(f"{name} cannot be started: {error.strerror}") from error
    if finished.returncode:
        said = first_line(RuntimeError(finished.stderr or "it says nothing"))
        raise Failed(f"{name} failed with status {finished.returncode}: {said}")
    return finished.stdout
