"""Instructions that an aarch64 processor executes for a call: our schedules, forms beside softmax, others' counts.

    python benchmarks/arm.py [--models deit_tiny_patch16_224] [--sizes 224 512] [--forms original l1]
                             [--precisions fp32 fp16] [--peers FILE]

Batch 1, one thread, random weights from one seed; counted exactly under qemu's user-mode emulation in a second call,
and held to torch. Instructions are no time: a prefetch counts like a multiply-add. As many multiply-adds fit in one
instruction as a precision has numbers in a vector, which makes the floor of direct multiplication. `FILE`
holds what other runtimes execute for the original at the first size, a line each that begins "NAME: total X G", as a
count of (N2 - N1) inferences under qemu gives it.
"""

import argparse
import itertools
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from forms import converted
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError, first_line
from attnrewrite.evaluation.compare import CompareModel, cost
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.base import get_target

ORIGINAL = "original"
EMULATION_S = 1800.0  # seconds that two calls of a model may take
LANES = {"fp32": 4, "fp16": 8}  # numbers in a vector of NEON
PEER = re.compile(r"^(?P<name>[^:]+): total (?P<billions>[0-9.]+) G")


def built(model: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    torch.manual_seed(0)
    return timm.create_model(model, img_size=size).eval(), (torch.randn(1, 3, size, size),)


def counted(module: nn.Module, inputs: tuple[Tensor, ...], cpu: str, precision: str) -> tuple[int, float]:
    """Instructions of a call, and the largest difference to torch."""
    with tempfile.TemporaryDirectory() as folder:
        target = get_target("arm-cpu").configured(cpu=cpu, precision=precision, emulation_s=EMULATION_S)
        made = target.lower("the model", module, inputs, Path(folder), threads=1)
    if made.instructions is None:
        raise InputError("; ".join((made.check, *made.notes)))
    return made.instructions, made.max_abs_error


def peers(file: Path) -> list[tuple[str, float]]:
    """Names and counts, in billions of instructions."""
    found = [PEER.match(line) for line in file.read_text().splitlines()]
    return [(each["name"], float(each["billions"])) for each in found if each is not None]


def show(model: str, size: int, forms: Sequence[str], precisions: Sequence[str], cpu: str) -> None:
    module, inputs = built(model, size)
    first: int | None = None
    for form, precision in itertools.product(forms, precisions):
        started = time.perf_counter()
        try:
            stands = module if form == ORIGINAL else converted(module, inputs, form)
            instructions, error = counted(stands, inputs, cpu, precision)
        except AttnRewriteError as failed:
            print(
                f"| {model} | {size} | {form} | {precision} | unavailable: {first_line(failed)} | | | | |", flush=True
            )
            continue
        first = first or instructions
        _, multiply_adds = cost(CompareModel(form, stands, inputs))
        ratios = f"{instructions / first:.2f} | {LANES[precision] * instructions / multiply_adds:.2f}"
        counts = f"{instructions / 1e9:.3f} | {ratios} | {error:.1e} | {time.perf_counter() - started:.0f}"
        print(f"| {model} | {size} | {form} | {precision} | {counts} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224], help="rows and columns of the image")
    parser.add_argument("--forms", nargs="+", default=[ORIGINAL, "l1"], help="original, or l1, polynomial:rank=2, ...")
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32"], choices=LANES, help="what products are computed in"
    )
    parser.add_argument("--cpu", default="cortex-a76")
    parser.add_argument("--peers", type=Path, help="a file with the counts of other runtimes")
    given = parser.parse_args(arguments)
    if import_torchvision() is None:
        raise InputError("timm and torchvision are not installed (pip install 'attnrewrite[models]')")
    others = [] if given.peers is None else peers(given.peers)
    print(f"{given.cpu} emulated on {platform.machine()}, torch {version('torch')}, TVM {version('apache-tvm')}")
    print(
        "| model | size | form | precision | G instructions | of the first row's | of the floor | max error | seconds |"
    )
    print("|-|-|-|-|-|-|-|-|-|")
    for model in given.models:
        for size in given.sizes:
            show(model, size, given.forms, given.precisions, given.cpu)
    for name, billions in others:
        print(f"| {given.models[0]} | {given.sizes[0]} | original in {name} | | {billions:.3f} | | | | |")


if __name__ == "__main__":
    main()
