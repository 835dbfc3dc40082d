"""Our CPU schedules beside torch, onnxruntime and, where installed, OpenVINO and ExecuTorch: the same graph, in turns.

    python benchmarks/lowering.py [--models deit_tiny_patch16_224 ...] [--size 224] [--forms l1 ...] [--rounds 30]
                                  [--peers onnxruntime openvino ...] [--threads 1 2]

float32, batch 1, random weights from one seed. Two tables: one thread in CPU time, which a busy machine disturbs least,
and two threads in wall time. Every runtime's output is compared with torch's first. A row has the median and the
quartiles. Below them stand ratios to the best of the others, below 1 where ours is faster: on the same graph, and for
a converted model (`--forms`) on the original, too. Compare within a table only. The one-thread table is followed by its
roofline: what all multiply-adds of a graph's products take at the processor's peak, which is measured in turns with the
rest (`peak.py`). Last comes how many times as fast our artifact is on two threads as on one, in turns, in wall time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from forms import converted
from peak import MULTIPLY_ADDS, peak
from runtimes import OURS, PEERS, Call, Loader, environment, loaders, measured
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnrewrite.errors import InputError
from attnrewrite.frontends.torchvision import import_torchvision

ORIGINAL = "original"
PEAK = ("", "the peak's loop")
Times = dict[tuple[str, str], list[float]]  # by what stands at the sites, and runtime


def built(name: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=size).eval()
    except TypeError:  # models of convolutions take any size
        model = timm.create_model(name).eval()
    return model, (torch.randn(1, 3, size, size),)


def show(title: str, times: Times) -> None:
    medians = {case: statistics.median(each) for case, each in times.items()}
    print(title)
    for (form, runtime), each in times.items():
        low, _, high = statistics.quantiles(each, n=4)
        print(f"  {form:20} {runtime:18} {medians[form, runtime]:9.2f} ms  ({low:.2f} to {high:.2f})")
    for form in dict.fromkeys(form for form, runtime in times if runtime == OURS):
        for graph in dict.fromkeys((form, ORIGINAL)):
            peers = {runtime: each for (on, runtime), each in medians.items() if on == graph and runtime != OURS}
            best = min(peers, key=lambda runtime: peers[runtime])
            ratio = medians[form, OURS] / peers[best]
            print(f"  {form}, ours over the best of the others on {graph} ({best}): {ratio:.2f}")


def compare(
    name: str, size: int, forms: Sequence[str], rounds: int, peers: Sequence[str], threads: Sequence[int]
) -> None:
    model, inputs = built(name, size)
    modules = {ORIGINAL: model} | {form: converted(model, inputs, form) for form in forms}
    found = {form: loaders(f"{name}, {form}", module, inputs, (OURS, *peers)) for form, module in modules.items()}

    def calls(threads: int) -> dict[tuple[str, str], Call]:
        return {(form, name): load(threads) for form, each in found.items() for name, load in each.items()}

    if 1 in threads:
        with tempfile.TemporaryDirectory() as folder:
            times = measured(calls(1) | {PEAK: peak(Path(folder))}, time.process_time, rounds)
        show(f"{name}, {size} x {size}, 1 thread, CPU time", times)
        roofline({form: multiply_adds(module, inputs) for form, module in modules.items()}, times)
    if 2 in threads:
        show(f"{name}, {size} x {size}, 2 threads, wall time", measured(calls(2), time.perf_counter, rounds))
        for form, each in found.items():
            print(f"  {form}, ours on two threads over one: {gain(each[OURS], rounds):.2f} times as fast")


def roofline(work: Mapping[str, int], times: Times) -> None:
    """How far our times are from what the multiply-adds alone take, and what is the least that direct products can be
    of the others' best on the original.
    """
    medians = {case: statistics.median(each) for case, each in times.items()}
    best = min(each for (form, runtime), each in medians.items() if form == ORIGINAL and runtime != OURS)
    for form, count in work.items():
        least = medians[PEAK] * count / MULTIPLY_ADDS
        told = f"{form}, {count / 1e9:.2f} G multiply-adds: {least:.2f} ms at the peak"
        share = f"{least / best:.2f} of the best of the others on {ORIGINAL}"
        print(f"  {told}, {share}; ours takes {medians[form, OURS] / least:.2f} of that")


def multiply_adds(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Those of products and convolutions, as torch counts them."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(*inputs)
    return int(counter.get_total_flops()) // 2


def gain(load: Loader, rounds: int) -> float:
    """The wall time on one thread over that on two; each is called once before the call that is timed."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for threads, each in times.items():
            call = load(threads)
            call()
            started = time.perf_counter()
            call()
            each.append(time.perf_counter() - started)
    return statistics.median(times[1]) / statistics.median(times[2])


def main() -> None:
    parser = argparse.ArgumentParser(description="Our CPU schedules beside other runtimes.")
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--size", type=int, default=224, help="rows and columns of the image")
    parser.add_argument("--forms", nargs="+", default=[], help="also converted: l1, polynomial:rank=2, ...")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="by default all", metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, choices=[1, 2], default=[1, 2], help="by default both tables")
    arguments = parser.parse_args()
    if import_torchvision() is None:
        raise InputError("timm and torchvision are not installed (pip install 'attnrewrite[models]')")
    print(environment())
    for name in arguments.models:
        compare(name, arguments.size, arguments.forms, arguments.rounds, arguments.peers, arguments.threads)


if __name__ == "__main__":
    main()
