"""The RPC server of the examples, for devices without Python: here, and for ARM under qemu."""

import os
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cpp_examples import arm_libraries, linked
from tiny_vits import tiny_vit

import attnrewrite as ar
from attnrewrite.targets.base import get_target
from attnrewrite.targets.prepare import reference
from attnrewrite.targets.runners import qemu

pytest.importorskip("tvm")

from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm import rpc

SERVER = "rpc_server.cc"
MAGIC = 0xFF271


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the server on this machine."""
    return [str(linked("g++", SERVER, tmp_path_factory.mktemp("here"), *tvm_compat.runtime_libraries()))]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts it as an ARM program."""
    folder = tmp_path_factory.mktemp("arm")
    libraries = arm_libraries(folder)
    return qemu.emulated(linked(qemu.CROSS_COMPILER, SERVER, folder, *libraries))


def with_runtime() -> dict[str, str]:
    """The environment in which this machine's runtime is found."""
    folders = (str(library.parent) for library in tvm_compat.runtime_libraries())
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(folders)}


@contextmanager
def serving(command: list[str]) -> Iterator[int]:
    """The port that the server waits on."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with (
        tempfile.TemporaryDirectory() as sessions,  # what is killed leaves its session's folder
        subprocess.Popen(
            [*command, str(port)], stdout=subprocess.PIPE, text=True, env=with_runtime() | {"TMPDIR": sessions}
        ) as process,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"waiting on port {port}\n"
            yield port
        finally:
            process.kill()


@pytest.mark.parametrize(("machine", "target"), [("here", "host"), ("on_arm", "arm-cpu")])
def test_it_runs_what_compare_sends(machine: str, target: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if (reason := get_target(target).availability().build) is not None:
        pytest.skip(str(reason))
    command = request.getfixturevalue(machine)
    model, inputs = tiny_vit("softmax", depth=1)
    made = ar.lower(model, target, tmp_path / "out", example_inputs=inputs)
    with serving(command) as port:
        device = rpc.Device("127.0.0.1", port, 120.0)
        for _ in range(2):  # one session after the other
            found = rpc.measure(device, made.path / "model.so", [each.numpy() for each in inputs], threads=1)
            assert len(found.seconds) >= 3
            assert min(found.seconds) > 0
            np.testing.assert_allclose(found.outputs[0], reference(model, inputs)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<ii", MAGIC, 2**30), struct.pack("<ii", MAGIC, 6) + b"client"],
    ids=["nothing", "another protocol", "an endless name", "a name that is cut short"],
)
def test_what_is_no_client_of_tvm_is_left_alone(here: list[str], greeting: bytes) -> None:
    name = b"client:"
    with serving(here) as port:
        with socket.create_connection(("127.0.0.1", port), 10) as other:
            other.sendall(greeting)
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(struct.pack("<ii", MAGIC, len(name)) + name)
            assert client.recv(4, socket.MSG_WAITALL) == struct.pack("<i", MAGIC)


@pytest.mark.parametrize("port", ["none", "0", "70000"])
def test_what_is_no_port(here: list[str], port: str) -> None:
    libraries = os.pathsep.join(str(library.parent) for library in tvm_compat.runtime_libraries())
    done = subprocess.run(
        [*here, port], capture_output=True, text=True, env=os.environ | {"LD_LIBRARY_PATH": libraries}
    )
    assert (done.returncode, done.stderr) == (2, "usage: rpc_server [PORT]\n")
