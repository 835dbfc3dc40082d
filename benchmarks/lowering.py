"""Our CPU schedules beside torch eager, onnxruntime and, where installed, OpenVINO: the same graph, in turns.

    python benchmarks/lowering.py [--models deit_tiny_patch16_224 ...] [--size 224] [--rounds 30]

float32, batch 1, random weights from one seed. Two tables: one thread in CPU time, which a busy machine disturbs least,
and two threads in wall time. Every runtime's output is compared with torch's first. A row has the median and the
quartiles; the ratio to the best of the others is below 1 where ours is faster. Compare within a table only.
"""

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import arrays, reference, specialise
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

OURS = "tvm"
WARM = 3
Call = Callable[[], object]
Loader = Callable[[int], Call]


def runtimes(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Loader]:
    """What gives a call of the module on so many threads, for every runtime that takes it: compiled once."""
    found: dict[str, Loader] = {}
    for runtime, prepare in RUNTIMES.items():
        started = time.perf_counter()
        try:
            load = prepare(module, inputs)
            check.agree(f"{name} in {runtime}", arrays(load(1)()), reference(module, inputs), check.FLOAT32)
        except (AttnRewriteError, ImportError) as error:
            print(f"{name}: not in {runtime}: {error}")
            continue
        found[runtime] = load
        print(f"{name}: ready in {runtime} after {time.perf_counter() - started:.0f} s")
    return found


def ours(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    made = tvm_compat.build_for_cpu(import_program(specialise(module, inputs)), "host")
    return lambda threads: tvm_compat.bind(made.executable, inputs, threads)


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    def load(threads: int) -> Call:
        torch.set_num_threads(threads)
        return lambda: reference(module, inputs)

    return load


def onnxruntime(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    model = onnx_runtime.export(module, inputs)
    return lambda threads: onnx_runtime.load(model, inputs, threads)


def openvino(module: nn.Module, inputs: tuple[Tensor, ...]) -> Loader:
    import openvino as ov

    model, given = onnx_runtime.export(module, inputs), dict(enumerate(arrays(inputs)))

    def load(threads: int) -> Call:
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        request = ov.Core().compile_model(model, b"", "CPU", options).create_infer_request()
        return lambda: tuple(request.infer(given).values())

    return load


RUNTIMES: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Loader]] = {
    OURS: ours,
    "torch eager": eager,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def measured(calls: dict[str, Call], clock: Callable[[], float], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, the runtimes in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM + rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if number >= WARM:
                times[name].append(1e3 * (clock() - start))
    return times


def show(title: str, times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(title)
    for name, each in times.items():
        low, _, high = statistics.quantiles(each, n=4)
        print(f"  {name:12} {medians[name]:9.2f} ms  ({low:.2f} to {high:.2f})")
    peers = {name: median for name, median in medians.items() if name != OURS}
    if OURS in medians and peers:
        best = min(peers, key=lambda name: peers[name])
        print(f"  ours over the best of the others ({best}): {medians[OURS] / peers[best]:.2f}")


def environment() -> str:
    packages = ("torch", "onnxruntime", "openvino", "apache-tvm")
    names = {"apache-tvm": "tvm"}
    there = [f"{each} {version(each)}" for each in packages if importlib.util.find_spec(names.get(each, each))]
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, {', '.join(there)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Our CPU schedules beside other runtimes.")
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--size", type=int, default=224, help="rows and columns of the image")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if import_torchvision() is None:
        raise InputError("timm and torchvision are not installed (pip install 'attnrewrite[models]')")
    import timm

    print(environment())
    for name in arguments.models:
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, img_size=arguments.size).eval()
        except TypeError:  # models of convolutions take any size
            model = timm.create_model(name).eval()
        inputs = (torch.randn(1, 3, arguments.size, arguments.size),)
        loaders = runtimes(name, model, inputs)
        for threads, clock, unit in ((1, time.process_time, "CPU time"), (2, time.perf_counter, "wall time")):
            calls = {runtime: load(threads) for runtime, load in loaders.items()}
            times = measured(calls, clock, arguments.rounds)
            show(f"{name}, {arguments.size} x {arguments.size}, {threads} thread(s), {unit}", times)


if __name__ == "__main__":
    main()
