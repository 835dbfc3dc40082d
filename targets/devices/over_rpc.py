"""What targets share that measure a library on a device over the network."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from attnrewrite.errors import CheckFailedError, Refusal
from attnrewrite.targets.base import Run
from attnrewrite.targets.prepare import Prepared, arrays
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import rpc

TIMEOUT_S = 120.0  # seconds that one model may take on a device, unless the user says otherwise
Build = Callable[[Path], tuple[Path, tuple[str, ...]]]


def device(address: str | None, timeout_s: float) -> rpc.Device | None:
    """The device at an address, None where there is no address. InputError where it is none."""
    return None if address is None else rpc.Device.at(address, timeout_s)


def run(name: str, wide: Prepared, build: Build, at: rpc.Device, threads: int) -> Run:
    """A module built, sent to a device, checked and timed there; or why that device did not do it.

    `build` makes the library of `wide` in a folder, and says what to know about it; it is not asked to where the device
    is not to be reached.
    """
    runtime = f"tvm at {at}"
    try:
        rpc.reach(at)
    except Unavailable as reason:
        return Run.refused(runtime, Refusal("device", str(reason)))
    with tempfile.TemporaryDirectory() as folder:
        library, notes = build(Path(folder))
        size = library.stat().st_size
        try:
            found = rpc.measure(at, library, arrays(wide.inputs), threads)
            error = wide.agree(f"{name} on {at}", found.outputs).max_abs_error
        except (Unavailable, CheckFailedError) as reason:
            return Run(runtime, None, None, size, Refusal("device", str(reason)), "; ".join(notes))
    note = "; ".join((f"timed by the device's own clock over {len(found.seconds)} calls", *notes))
    return Run(runtime, None, error, size, None, note, seconds=found.seconds)
