"""A compiled model measured on a device that is reached over the network, where TVM's own RPC server runs.

On the device: `python -m tvm.exec.rpc_server --port 9090`. Anyone who reaches that port can run code there: keep it to
a network of your own.
"""

import json
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.runners import programs
from attnrewrite.targets.tvm import rpc_process

REPEATS = 30  # timed calls
BUDGET = 1 / 4  # of the timeout, for timed calls
REACH_S = 10.0  # seconds that a device may take to accept a connection


@dataclass(frozen=True)
class Device:
    """Where a device's RPC server listens, and the most seconds that one model may take there."""

    host: str
    port: int
    timeout_s: float

    @classmethod
    def at(cls, address: object, timeout_s: float) -> "Device":
        """The device at "host:port". InputError where that is no address, or the timeout no time."""
        found = re.fullmatch(r"([^\s/]+):(\d{1,5})", address) if isinstance(address, str) else None
        if found is None or not 0 < int(found[2]) < 2**16:
            raise InputError(f"--rpc {address!r} is not HOST:PORT, such as 192.168.1.20:9090")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
            raise InputError(f"--rpc-timeout {timeout_s!r} must be a number of seconds above zero")
        return cls(found[1].strip("[]"), int(found[2]), float(timeout_s))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Measured:
    """What a library gave on a device, and the seconds of each timed call by the device's own clock."""

    outputs: tuple[np.ndarray, ...]
    seconds: tuple[float, ...]


def measure(device: Device, library: Path, inputs: Sequence[np.ndarray], threads: int) -> Measured:
    """Upload `library` (a .so, or a .tar that the device links), run it on `inputs` and time it on `threads` threads.

    Raises:
        programs.Unavailable: the device does not answer in time, or drops or fails the work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {**asdict(device), "library": str(library.resolve()), "threads": threads}
        job |= {"repeats": REPEATS, "budget_s": device.timeout_s * BUDGET}
        (folder / rpc_process.JOB).write_text(json.dumps(job))
        np.savez(folder / rpc_process.INPUTS, *inputs, allow_pickle=False)
        try:
            # -P keeps this folder, whose modules have common names, off the path.
            said = programs.run([sys.executable, "-P", rpc_process.__file__, name], device.timeout_s)
        except programs.Failed as error:
            raise programs.Unavailable(f"{device}: the connection ended ({error})") from error
        except programs.Unavailable as error:
            raise programs.Unavailable(f"{device} did not answer within {device.timeout_s:g} s") from error
        found = json.loads(said.splitlines()[-1])
        if found["seconds"] is None:
            raise programs.Unavailable(f"{device}: {found['reason']}")
        with np.load(folder / rpc_process.OUTPUTS) as outputs:
            return Measured(tuple(outputs[each] for each in outputs.files), tuple(found["seconds"]))


def reach(device: Device) -> None:
    """Raise Unavailable where nothing accepts a connection: at once, and in the system's words."""
    try:
        socket.create_connection((device.host, device.port), min(REACH_S, device.timeout_s)).close()
    except OSError as error:
        raise programs.Unavailable(
            f"{device} cannot be reached ({error.strerror or first_line(error)}): "
            f"is python -m tvm.exec.rpc_server --port {device.port} running there?"
        ) from error
