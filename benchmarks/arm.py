"""Instructions that an aarch64 processor executes for a call: our schedules, forms beside softmax, others' counts.

    python benchmarks/arm.py [--models deit_tiny_patch16_224] [--sizes 224 512] [--forms original l1]
        [--precisions fp32 int8] [--peers FILE]

Batch 1, one thread, random weights from one seed; counted exactly under qemu's user-mode emulation in a second call,
and held to what torch computes in the same precision. The agreement is that of the largest output with float32's, on
inputs drawn at random. Instructions are no time: a prefetch counts like a multiply-add. As many multiply-adds fit in
one instruction as a precision allows, which makes the floor of direct multiplication. Cycles are LLVM's estimate
(llvm-mca) for these instructions where all loads hit the cache, by the tables that it has for the core. `FILE` holds
what other runtimes execute for the original at the first size, a line each that begins "NAME: total X G", as a count of
(N2 - N1) inferences under qemu gives it.
"""

import argparse
import itertools
import math
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from forms import converted
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError, first_line
from attnrewrite.evaluation.compare import CompareModel, cost
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.base import Artifact, get_target

ORIGINAL = "original"
EMULATION_S = 1800.0  # seconds that two calls of a model may take
LANES = {"fp32": 4, "fp16": 8, "int8": 16}  # multiply-adds in an instruction of NEON
PEER = re.compile(r"^(?P<name>[^:]+): total (?P<billions>[0-9.]+) G")


def built(model: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    torch.manual_seed(0)
    options = {"img_size": size} if timm.get_pretrained_cfg(model).fixed_input_size else {}
    return timm.create_model(model, **options).eval(), (torch.randn(1, 3, size, size),)


@dataclass(frozen=True)
class Counted:
    """What was made, which knows what was counted and checked, and its agreement with float32 (of one hundred)."""

    made: Artifact
    agreement: float


def counted(module: nn.Module, inputs: tuple[Tensor, ...], cpu: str, precision: str, draws: int) -> Counted:
    target = get_target("arm-cpu").configured(cpu=cpu, emulation_s=EMULATION_S, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        made = target.lower("the model", module, inputs, Path(folder), threads=1)
        answer = target.answers(made, module, inputs)
    if made.instructions is None:
        raise InputError("; ".join((made.check, *made.notes)))
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(inputs[0].shape, generator=generator) for _ in range(draws)]
    with torch.no_grad():
        agreed = sum(int(answer(x).argmax() == module(x).argmax()) for x in drawn)
    return Counted(made, 100 * agreed / draws)


def peers(file: Path) -> list[tuple[str, float]]:
    """Names and counts, in billions of instructions."""
    found = [PEER.match(line) for line in file.read_text().splitlines()]
    return [(each["name"], float(each["billions"])) for each in found if each is not None]


def show(model: str, size: int, given: argparse.Namespace) -> None:
    module, inputs = built(model, size)
    first: float | None = None
    for form, precision in itertools.product(given.forms, given.precisions):
        started = time.perf_counter()
        try:
            stands = module if form == ORIGINAL else converted(module, inputs, form)
            found = counted(stands, inputs, given.cpu, precision, given.draws)
        except AttnRewriteError as failed:
            why = f"unavailable: {first_line(failed)}"
            print(f"| {model} | {size} | {form} | {precision} | {why} | | | | | | |", flush=True)
            continue
        instructions, cycles = float(found.made.instructions or math.nan), found.made.cycles
        first = first or instructions
        _, multiply_adds = cost(CompareModel(form, stands, inputs))
        ratios = f"{instructions / first:.3f} | {LANES[precision] * instructions / multiply_adds:.2f}"
        counts = f"{instructions / 1e9:.3f} | {ratios} | {'unavailable' if cycles is None else f'{cycles / 1e9:.3f}'}"
        rest = f"{found.made.max_abs_error:.1e} | {found.agreement:.1f} % | {time.perf_counter() - started:.0f}"
        print(f"| {model} | {size} | {form} | {precision} | {counts} | {rest} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224"], help="names in timm")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224], help="rows and columns of the image")
    parser.add_argument("--forms", nargs="+", default=[ORIGINAL, "l1"], help="original, or l1, polynomial:rank=2, ...")
    parser.add_argument("--cpu", default="cortex-a76")
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=LANES, help="the first is 1")
    parser.add_argument("--draws", type=int, default=32, help="inputs for the agreement")
    parser.add_argument("--peers", type=Path, help="a file with the counts of other runtimes")
    given = parser.parse_args(arguments)
    if import_torchvision() is None:
        raise InputError("timm and torchvision are not installed (pip install 'attnrewrite[models]')")
    others = [] if given.peers is None else peers(given.peers)
    print(f"{given.cpu} emulated on {platform.machine()}, torch {version('torch')}, TVM {version('apache-tvm')}")
    columns = (
        "model,size,form,precision,G instructions,of the first row's,of the floor,G cycles,max error,agreement,seconds"
    )
    print(f"| {columns.replace(',', ' | ')} |")
    print("|-" * len(columns.split(",")) + "|")
    for model in given.models:
        for size in given.sizes:
            show(model, size, given)
    for name, billions in others:
        print(f"| {given.models[0]} | {given.sizes[0]} | original in {name} | fp32 | {billions:.3f} | | | | | | |")


if __name__ == "__main__":
    main()
