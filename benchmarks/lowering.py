"""Our CPU schedules beside torch eager, onnxruntime and, where installed, OpenVINO: the same graph, in turns.

    python benchmarks/lowering.py [deit_tiny_patch16_224 ...] [--size 224] [--rounds 40]

float32, batch 1, random weights from one seed. Two tables: one thread in CPU time, which a busy machine disturbs least,
and two threads in wall time. Every runtime's output is compared with torch's first. A row has the median and the
quartiles; the ratio to the best of the others is above 1 where ours is faster. Compare within a table only.
"""

import argparse
import importlib.util
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets import agreement as check
from attnrewrite.targets.devices.host import Host
from attnrewrite.targets.prepare import arrays, reference, specialise

OURS = "tvm"
WARM = 3
Call = Callable[[], object]


def runtimes(name: str, module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> dict[str, Call]:
    """A call of the module in every runtime that takes it, each checked against torch."""
    found: dict[str, Call] = {}
    for run in Host().runs(name, module, inputs, threads=threads):
        if run.call is None:
            print(f"{name}: not in {run.runtime}: {run.reason}")
        else:
            found[run.runtime] = run.call
    if importlib.util.find_spec("openvino"):
        found["openvino"] = openvino(module, inputs, threads)
        expected = reference(module, inputs)
        check.agree(f"{name} in openvino", arrays(found["openvino"]()), expected, check.FLOAT32)
    return found


def openvino(module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> Call:
    import openvino as ov

    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        exported = torch.onnx.export(specialise(module, inputs), dynamo=True, verbose=False)
        assert exported is not None
        exported.save(file.name)
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = ov.Core().compile_model(file.name, "CPU", options)
    request, given = compiled.create_infer_request(), dict(enumerate(arrays(inputs)))
    return lambda: tuple(request.infer(given).values())


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
        print(f"  ratio to the best of the others ({best}): {peers[best] / medians[OURS]:.2f}")


def environment() -> str:
    packages = ("torch", "onnxruntime", "openvino", "apache-tvm")
    names = {"apache-tvm": "tvm"}
    there = [f"{each} {version(each)}" for each in packages if importlib.util.find_spec(names.get(each, each))]
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, {', '.join(there)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Our CPU schedules beside other runtimes.")
    parser.add_argument("models", nargs="*", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--size", type=int, default=224, help="rows and columns of the image")
    parser.add_argument("--rounds", type=int, default=40)
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
        for threads, clock, unit in ((1, time.process_time, "CPU time"), (2, time.perf_counter, "wall time")):
            times = measured(runtimes(name, model, inputs, threads), clock, arguments.rounds)
            show(f"{name}, {arguments.size} x {arguments.size}, {threads} thread(s), {unit}", times)


if __name__ == "__main__":
    main()
