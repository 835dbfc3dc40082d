"""Our CPU schedules beside torch, onnxruntime and, where installed, OpenVINO and ExecuTorch: the same graph, in turns.

    python benchmarks/lowering.py [--models deit_tiny_patch16_224 ...] [--size 224] [--forms l1 ...] [--rounds 30]

float32, batch 1, random weights from one seed. Two tables: one thread in CPU time, which a busy machine disturbs least,
and two threads in wall time. Every runtime's output is compared with torch's first. A row has the median and the
quartiles. Below them stand ratios to the best of the others, below 1 where ours is faster: on the same graph, and for
a converted model (`--forms`) on the original, too. Compare within a table only.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from forms import converted
from runtimes import OURS, environment, loaders, measured
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.frontends.torchvision import import_torchvision

ORIGINAL = "original"
CLOCKS = ((1, time.process_time, "CPU time"), (2, time.perf_counter, "wall time"))
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


def compare(name: str, size: int, forms: Sequence[str], rounds: int) -> None:
    model, inputs = built(name, size)
    modules = {ORIGINAL: model} | {form: converted(model, inputs, form) for form in forms}
    found = {form: loaders(f"{name}, {form}", module, inputs) for form, module in modules.items()}
    for threads, clock, unit in CLOCKS:
        calls = {(form, name): load(threads) for form, each in found.items() for name, load in each.items()}
        show(f"{name}, {size} x {size}, {threads} thread(s), {unit}", measured(calls, clock, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Our CPU schedules beside other runtimes.")
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--size", type=int, default=224, help="rows and columns of the image")
    parser.add_argument("--forms", nargs="+", default=[], help="also converted: l1, polynomial:rank=2, ...")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if import_torchvision() is None:
        raise InputError("timm and torchvision are not installed (pip install 'attnrewrite[models]')")
    print(environment())
    for name in arguments.models:
        compare(name, arguments.size, arguments.forms, arguments.rounds)


if __name__ == "__main__":
    main()
