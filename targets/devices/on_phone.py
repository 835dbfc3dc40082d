"""A Core ML package measured on an iPhone, or another device of Apple's, that Xcode reaches from this Mac."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnrewrite.errors import CheckFailedError, InputError, Refusal
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import Run, size_bytes
from attnrewrite.targets.coreml import phone_process
from attnrewrite.targets.runners import device_process
from attnrewrite.targets.runners.programs import Unavailable

TIMEOUT_S = 600.0  # seconds that one model may take there, for which coremltools builds its app, too


@dataclass(frozen=True)
class Phone:
    """A device by its name or identifier, the team of developers that signs for it, and a model's most seconds.

    Raises:
        InputError: there is no name, or the time is none.
    """

    name: str
    development_team: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(
                f"--device {self.name!r} is no name: xcrun devicectl list devices tells those that there are"
            )
        device_process.require_patience("--device-timeout", self.timeout_s)


def run(subject: str, package: Path, inputs: Sequence[np.ndarray], expected: Sequence[np.ndarray], at: Phone) -> Run:
    """`package` loaded, planned, checked against `expected` and timed on a device; or why that device did not do it."""
    runtime, size = f"core ml on {at.name}", size_bytes(package)
    job = {"device": at.name, "development_team": at.development_team or "", "package": str(package.resolve())}
    try:
        command = [sys.executable, "-m", phone_process.__name__]
        found = device_process.measure(command, at.name, at.timeout_s, job, inputs)
        error = check.agree(f"{subject} on {at.name}", found.outputs, expected, check.FLOAT16).max_abs_error
    except (Unavailable, CheckFailedError) as reason:
        return Run(runtime, None, None, size, Refusal("device", str(reason)))
    note = f"timed by the device's own clock over {len(found.seconds)} calls; {found.note}"
    return Run(runtime, None, error, size, None, note, seconds=found.seconds)
