"""What the benchmarks of lowering run side by side: our schedules, and what people use today, each from one export.

A runtime is a function of a module and its inputs that gives a `Loader`: a call of the compiled module on so many
threads. ImportError or an error of ours where it is not installed or does not take the module.
"""

import importlib.util
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError, first_line
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import arrays, reference, specialise
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

OURS = "tvm, our schedules"
WARM = 3  # calls that are not timed
SAMPLE_S = 0.1  # seconds
Call = Callable[[], object]
Loader = Callable[[int], Call]
Name = TypeVar("Name")


def ours(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    """The library that `lower --target host` writes."""
    folder = tempfile.TemporaryDirectory()  # lives as long as what is returned
    program = import_program(specialise(module, inputs))
    library = Path(folder.name) / "model.so"
    tvm_compat.library_for_cpu(program, "host", library, tvm_compat.host_linker())
    return lambda threads: tvm_compat.bind(Path(folder.name) / library.name, inputs, threads)


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    return _torch(module, inputs)


def inductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    torch._dynamo.reset()
    try:
        compiled = torch.compile(module)
        reference(compiled, inputs)  # type: ignore[arg-type]
    except Exception as error:
        raise InputError(f"torch.compile fails: {first_line(error)}") from error
    return _torch(compiled, inputs)  # type: ignore[arg-type]


def _torch(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    def load(threads: int) -> Call:
        torch.set_num_threads(threads)
        return lambda: reference(module, inputs)

    return load


def onnxruntime(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    model = onnx_runtime.export(module, inputs)
    return lambda threads: onnx_runtime.load(model, inputs, threads)


def openvino(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    import openvino as ov

    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        Path(file.name).write_bytes(onnx_runtime.export(module, inputs))
        model = ov.Core().read_model(file.name)
    given = dict(enumerate(arrays(inputs)))

    def load(threads: int) -> Call:
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda: tuple(request.infer(given).values())

    return load


def executorch(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    """Through its delegate for processors, XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    try:
        program = to_edge_transform_and_lower(specialise(module, inputs), partitioner=[XnnpackPartitioner()])
        held = program.to_executorch().buffer
    except Exception as error:
        raise InputError(f"executorch cannot take the module: {first_line(error)}") from error

    def load(threads: int) -> Call:
        _unsafe_reset_threadpool(threads)
        method = Runtime.get().load_program(held).load_method("forward")
        if method is None:
            raise InputError("executorch gives no method for the module")
        return lambda: tuple(each.numpy() for each in method.execute(inputs))

    return load


RUNTIMES: Mapping[str, Callable[[nn.Module, tuple[Tensor, ...]], Loader]] = {
    OURS: ours,
    "torch eager": eager,
    "torch.compile": inductor,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "executorch": executorch,
}
PEERS = tuple(name for name in RUNTIMES if name != OURS)


def loaders(
    name: str, module: nn.Module, inputs: tuple[Tensor, ...], runtimes: Iterable[str] = tuple(RUNTIMES)
) -> dict[str, Loader]:
    """What gives a call of the module on so many threads, for each of the `runtimes` that takes it and gives torch's
    outputs.
    """
    found: dict[str, Loader] = {}
    for runtime in runtimes:
        started = time.perf_counter()
        try:
            load = RUNTIMES[runtime](module, inputs)
            check.agree(f"{name} in {runtime}", arrays(load(1)()), reference(module, inputs), check.FLOAT32)
        except (AttnRewriteError, ImportError) as error:
            print(f"{name}: not in {runtime}: {error}", flush=True)
            continue
        found[runtime] = load
        print(f"{name}: ready in {runtime} after {time.perf_counter() - started:.0f} s", flush=True)
    return found


def measured(calls: Mapping[Name, Call], clock: Callable[[], float], rounds: int) -> dict[Name, list[float]]:
    """Milliseconds of every call, in turns.

    A sample is of as many calls as take SAMPLE_S: some kernels count processor time in ticks of milliseconds.
    """
    repeats = {name: _several(call) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append(1e3 * (clock() - start) / repeats[name])
    return times


def _several(call: Call) -> int:
    """How many calls, once warm, take SAMPLE_S."""
    for _ in range(WARM):
        start = time.perf_counter()
        call()
    return max(1, round(SAMPLE_S / (time.perf_counter() - start)))


def environment() -> str:
    packages = {"torch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino", "executorch": "executorch"}
    packages["tvm"] = "apache-tvm"
    there = [f"{name} {version(name)}" for each, name in packages.items() if importlib.util.find_spec(each)]
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, {', '.join(there)}"
