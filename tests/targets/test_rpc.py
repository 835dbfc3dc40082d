"""Measuring on a device over TVM's RPC: a server on loopback, devices that are away, hang or drop, and going on."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnrewrite.cli.main import main
from attnrewrite.errors import InputError
from attnrewrite.targets.base import get_target
from attnrewrite.targets.devices import host
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import rpc

pytest.importorskip("tvm")

LOOPBACK = "127.0.0.1"
MAGIC = 0xFF271  # what either side of TVM's RPC says first


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as held:
        return int(held.getsockname()[1])


@contextmanager
def serving(port: int) -> Iterator[None]:
    """TVM's own server in a process of its own, once it listens."""
    command = [sys.executable, "-m", "tvm.exec.rpc_server", "--host", LOOPBACK]
    ports = ["--port", str(port), "--port-end", str(port + 1)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["env"] = os.environ | {"TVM_USE_RUNTIME_LIB": "1"}
    # It starts processes of its own, which are to end with it.
    with subprocess.Popen([*command, *ports, "--silent"], **quiet, start_new_session=True) as process:
        try:
            while not listens(port):
                assert process.poll() is None
                time.sleep(0.1)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def compared(capsys: pytest.CaptureFixture[str], models_file: Path, *arguments: object) -> list[dict[str, Any]]:
    """The rows of a comparison."""
    model = [f"{models_file}:vit", "--input-size", "3x16x16", "--target", "host"]
    assert main(["compare", *model, *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_a_device_that_was_away_is_measured_later_and_then_no_more(
    models_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A device with this machine's processor stands for the board, and is all that is asked here.
    monkeypatch.setattr(host, "_RUNTIMES", {"torch eager": host._RUNTIMES["torch eager"]})
    port, out = free_port(), tmp_path / "out"
    asked = ("--rpc", f"{LOOPBACK}:{port}", "--out", out)
    eager, away = compared(capsys, models_file, *asked)
    assert (eager["runtime"], eager["status"]) == ("torch eager", "measured")
    assert (away["runtime"], away["status"], away["latency_ms"]) == (f"tvm at {LOOPBACK}:{port}", "unavailable", None)
    assert f"{LOOPBACK}:{port} cannot be reached (Connection refused): is python -m tvm.exec" in away["note"]
    with serving(port):
        again, there = compared(capsys, models_file, *asked, "--resume")
    assert there["status"] == "measured"
    assert 0 < there["latency_ms"]["p50"] <= there["latency_ms"]["p90"]
    assert 0 <= there["max_abs_error"] < 1e-5
    assert re.match(
        r"timed by the device's own clock over 30 calls; schedule: attnrewrite CPU schedules", there["note"]
    )
    assert again["latency_ms"] == eager["latency_ms"]
    assert "measured in an earlier run, 20" in again["note"]
    last = compared(capsys, models_file, *asked, "--resume")
    assert [row["latency_ms"] for row in last] == [eager["latency_ms"], there["latency_ms"]]
    assert last[0] == again


@contextmanager
def device(answer: bytes | None) -> Iterator[rpc.Device]:
    """Something that listens, and gives each connection an answer and then drops it; None: it never answers."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve() -> None:
            held = []
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield rpc.Device(LOOPBACK, server.getsockname()[1], 1.0 if answer is None else 60.0)
        server.shutdown(socket.SHUT_RDWR)


# What a device does: (what it answers to a connection, what is said of it).
BROKEN = {
    "hangs": (None, r":\d+ did not answer within 1 s"),
    "drops": (struct.pack("<ii", MAGIC, 11) + b"server:gone", r":\d+: it cannot be reached \(.+\)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_device_is_told_after_its_timeout(case: str, tmp_path: Path) -> None:
    answer, said = BROKEN[case]
    (tmp_path / "model.so").write_bytes(b"")
    with device(answer) as broken, pytest.raises(Unavailable, match=said) as caught:
        rpc.measure(broken, tmp_path / "model.so", [np.zeros(3, np.float32)], threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rpc": "board"}, "--rpc 'board' is not HOST:PORT, such as"),
        ({"rpc": "board:70000"}, "--rpc 'board:70000' is not HOST:PORT"),
        ({"rpc": "board:9090", "rpc_timeout": 0.0}, "--rpc-timeout 0.0 must be a number of seconds above zero"),
    ],
)
@pytest.mark.parametrize("name", ["host", "arm-cpu"])
def test_what_is_no_device(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_target(name).configured(**options)


def test_the_arm_target_is_measured_where_a_device_is_given() -> None:
    target = get_target("arm-cpu")
    assert target.availability().measure is not None
    assert target.configured(rpc="board:9090").availability().measure is None
