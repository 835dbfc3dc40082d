"""OpenCL kernels executed on whatever OpenCL device this machine has, to check them; PoCL makes one of the processor.

Needs pyopencl and an OpenCL driver (Debian: pocl-opencl-icd). It runs in a process of its own, which a bad kernel may
take down or hang.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets.runners import opencl_process, programs


@dataclass(frozen=True)
class Launch:
    """One kernel on its buffers, in the order of its parameters. Sizes are in work-items, along x, y and z."""

    kernel: str
    buffers: tuple[str, ...]
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]


@dataclass(frozen=True)
class Output:
    """A result: the buffer that holds it, its shape, and its type as numpy names it."""

    buffer: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class DeviceProgram:
    """A model as OpenCL: source text, buffers (sizes in bytes; some are inputs or constants), and launches in order."""

    inputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    buffers: Mapping[str, int]
    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]
    source: str


def execute(
    program: DeviceProgram, inputs: Sequence[np.ndarray], timeout_s: float
) -> tuple[tuple[np.ndarray, ...], str]:
    """The outputs of a program, and the name of the device that computed them, in `timeout_s` seconds at most.

    Raises:
        programs.Unavailable: there is no OpenCL here, or it takes longer.
        CheckFailedError: a kernel does not compile or crashes.
    """
    if find_spec("pyopencl") is None:
        raise programs.Unavailable("pyopencl is not installed (pip install pyopencl)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / opencl_process.SOURCE).write_text(program.source)
        (folder / opencl_process.LAUNCHES).write_text(launches_json(program))
        given = dict(zip(program.inputs, inputs, strict=True))
        np.savez(folder / opencl_process.VALUES, allow_pickle=False, **program.constants, **given)
        # -P keeps this folder, whose modules have common names, off the path.
        command = [sys.executable, "-P", opencl_process.__file__, str(folder)]
        try:
            said = json.loads(programs.run(command, timeout_s))
        except programs.Failed as error:
            raise CheckFailedError(f"the OpenCL kernels crash: {error}") from error
        if said["device"] is None:
            raise programs.Unavailable(said["reason"])
        with np.load(folder / opencl_process.RESULTS) as results:
            outputs = [results[output.buffer].view(output.dtype).reshape(output.shape) for output in program.outputs]
    return tuple(outputs), said["device"]


def launches_json(program: DeviceProgram) -> str:
    """Everything about a program but its source and its weights, for whoever launches the kernels."""
    record = {
        "inputs": program.inputs,
        "constants": sorted(program.constants),
        "buffers": dict(program.buffers),
        "launches": [asdict(launch) for launch in program.launches],
        "outputs": [asdict(output) for output in program.outputs],
    }
    return json.dumps(record, indent=1)
