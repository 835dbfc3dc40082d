"""A process that works with a device: what it is given, what it leaves, and how it may end.

What a device may hang or take down runs in a process of its own. It is given the path of a job, a JSON object with the
files `inputs` and `outputs` (.npz) among its entries, and prints as its last line one with `seconds`, those of each
timed call by the device's own clock, and perhaps a `note`; or with the `reason` why there are none.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnrewrite.errors import InputError
from attnrewrite.targets.runners import programs

REPEATS = 30  # timed calls
BUDGET = 1 / 4  # of the timeout, for timed calls


@dataclass(frozen=True)
class Measured:
    """What a model gave on a device, the seconds of each timed call by the device's own clock, and what it told."""

    outputs: tuple[np.ndarray, ...]
    seconds: tuple[float, ...]
    note: str = ""


def measure(
    command: Sequence[str], device: str, timeout_s: float, job: Mapping[str, Any], inputs: Sequence[np.ndarray]
) -> Measured:
    """What `command` measures on a device; the path of the job, for `inputs`, is added to it.

    Raises:
        programs.Unavailable: the device does not answer in time, or drops or fails the work.
    """
    with tempfile.TemporaryDirectory() as name:
        given, left, asked = (Path(name) / each for each in ("inputs.npz", "outputs.npz", "job.json"))
        files = {"inputs": str(given), "outputs": str(left)}
        limits = {"timeout_s": timeout_s, "repeats": REPEATS, "budget_s": timeout_s * BUDGET}
        asked.write_text(json.dumps({**job, **files, **limits}))
        np.savez(given, *inputs, allow_pickle=False)
        try:
            said = programs.run([*command, str(asked)], timeout_s)
        except programs.Failed as error:
            raise programs.Unavailable(f"{device}: the connection ended ({error})") from error
        except programs.Unavailable as error:
            raise programs.Unavailable(f"{device} did not answer within {timeout_s:g} s") from error
        found = json.loads(said.splitlines()[-1])
        if "reason" in found:
            raise programs.Unavailable(f"{device}: {found['reason']}")
        with np.load(left) as outputs:
            answers = tuple(outputs[each] for each in outputs.files)
        return Measured(answers, tuple(found["seconds"]), found.get("note", ""))


def require_patience(option: str, seconds: object) -> None:
    """Do nothing where `seconds` is a time to wait. Raises InputError where it is none."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise InputError(f"{option} {seconds!r} must be a number of seconds above zero")
