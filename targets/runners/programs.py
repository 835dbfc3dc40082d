"""Other programs that a check runs: what they print, or why they are of no use here."""

import contextlib
import os
import signal
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
        finished = _finished(command, timeout_s, given)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{name} took more than {timeout_s:.0f} s") from error
    except OSError as error:
        raise Unavailable(f"{name} cannot be started: {error.strerror}") from error
    if finished.returncode:
        said = first_line(RuntimeError(finished.stderr or "it says nothing"))
        raise Failed(f"{name} failed with status {finished.returncode}: {said}")
    return finished.stdout


def _finished(command: Sequence[str], timeout_s: float, given: str) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, but what the command has started ends with it, too: xcrun, say, is more than one process."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:  # fmt: skip
        try:
            said, complained = process.communicate(given, timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, said, complained)
