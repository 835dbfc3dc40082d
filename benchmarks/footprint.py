"""How long our CPU schedules take to compile a model, and what memory running it takes beside onnxruntime.

    python benchmarks/footprint.py [--models deit_small_patch16_224 ...] [--threads 1]

float32, batch 1, random weights from one seed. Compiling is `attnrewrite lower` without its check: import, schedules,
LLVM and linking. Memory is the resident set at its peak while a model is loaded and called three times in a process of
its own, and what of it stays as long as the model is loaded, less what the process had once the runtime was imported
and had run a model of one layer: weights, what is packed of them, and activations. Linux only.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnrewrite.evaluation.latency import environment
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.prepare import specialise
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

CALLS = 3


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    program = import_program(specialise(module, inputs))
    tvm_compat.library_for_cpu(program, "host", folder / "model.so", tvm_compat.host_linker())


def written(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    (folder / "model.onnx").write_bytes(onnx_runtime.export(module, inputs))


@contextmanager
def with_tvm(folder: Path, threads: int) -> Iterator[None]:
    import tvm

    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(folder / "model.so")), tvm.cpu())
    tvm.get_global_func("runtime.config_threadpool")(1, threads)
    given = tvm.runtime.tensor(np.load(folder / "input.npy"))
    for _ in range(CALLS):
        machine["main"](given)
    yield


@contextmanager
def with_onnxruntime(folder: Path, threads: int) -> Iterator[None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: np.load(folder / "input.npy")}
    for _ in range(CALLS):
        session.run(None, given)
    yield


RUNTIMES: dict[str, tuple[Callable[..., None], Callable[[Path, int], AbstractContextManager[None]]]] = {
    "tvm, our schedules": (compiled, with_tvm),
    "onnxruntime": (written, with_onnxruntime),
}


def resident(what: str) -> int:
    """A line of this process's status, in bytes: VmHWM, VmRSS, or RssFile, pages of files that are not its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def alone(runtime: str, small: Path, model: Path, threads: int) -> None:
    """In a process of its own: print the bytes that `model` adds to those with `small` run, at its peak, and for good,
    of these in pages of its file.
    """
    run = RUNTIMES[runtime][1]
    with run(small, threads):
        pass
    before, files = resident("VmRSS"), resident("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    with run(model, threads):
        print(resident("VmHWM") - before, resident("VmRSS") - before, resident("RssFile") - files)


def show(name: str, module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> None:
    weights = sum(each.numel() * each.element_size() for each in module.state_dict().values())
    print(f"{name}: {weights / 2**20:.0f} MiB of weights")
    for runtime, (make, _) in RUNTIMES.items():
        with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
            tiny = torch.randn(1, 8)
            for stands, given, folder in ((nn.Linear(8, 8).eval(), tiny, small), (module, inputs[0], large)):
                wall, cpu = time.perf_counter(), time.process_time()
                make(stands, (given,), Path(folder))
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                np.save(Path(folder) / "input.npy", given.numpy())
            command = [sys.executable, __file__, "--alone", runtime, small, large, "--threads", str(threads)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        peak, stays, pages = (int(number) / 2**20 for number in told)
        print(f"  {runtime}: ready after {wall:.1f} s ({cpu:.1f} s of processors)")
        print(f"  {runtime}: {peak:.0f} MiB at its peak, {stays:.0f} MiB stay, {pages:.0f} of them pages of its file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224", "deit_small_patch16_224"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        runtime, small, model = given.alone
        alone(runtime, Path(small), Path(model), given.threads)
        return
    import_torchvision()
    import timm

    for name in given.models:
        torch.manual_seed(0)
        module: Any = timm.create_model(name).eval()
        show(name, module, (torch.randn(1, *module.default_cfg["input_size"]),), given.threads)
    known = environment(given.threads)
    print(", ".join(f"{name} {known[name]}" for name in ("processor", "cores", "tvm", "onnxruntime") if name in known))


if __name__ == "__main__":
    main()
