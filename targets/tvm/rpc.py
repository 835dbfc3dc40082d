"""A compiled model measured on a device that is reached over the network, where TVM's own RPC server runs.

On the device: `python -m tvm.exec.rpc_server --port 9090`, or examples/cpp/rpc_server.cc where there is no Python.
Anyone who reaches that port can run code there: keep it to a network of your own.
"""

import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.runners import device_process, programs
from attnrewrite.targets.tvm import rpc_process

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
        device_process.require_patience("--rpc-timeout", timeout_s)
        return cls(found[1].strip("[]"), int(found[2]), float(timeout_s))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def measure(device: Device, library: Path, inputs: Sequence[np.ndarray], threads: int) -> device_process.Measured:
    """Upload `library` (a .so, or a .tar that the device links), run it on `inputs` and time it on `threads` threads.

    Raises:
        programs.Unavailable: the device does not answer in time, or drops or fails the work.
    """
    # -P keeps this folder, whose modules have common names, off the path.
    command = [sys.executable, "-P", rpc_process.__file__]
    job = {"host": device.host, "port": device.port, "library": str(library.resolve()), "threads": threads}
    return device_process.measure(command, str(device), device.timeout_s, job, inputs)


def reach(device: Device) -> None:
    """Raise Unavailable where nothing accepts a connection: at once, and in the system's words."""
    try:
        socket.create_connection((device.host, device.port), min(REACH_S, device.timeout_s)).close()
    except OSError as error:
        raise programs.Unavailable(
            f"{device} cannot be reached ({error.strerror or first_line(error)}): "
            f"is python -m tvm.exec.rpc_server --port {device.port} running there?"
        ) from error
