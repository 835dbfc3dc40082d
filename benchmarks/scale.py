"""What calibration costs at a user's scale: every stage's seconds, forward passes' worth, images a second, peak memory
and what it wrote to temporary files.

    python benchmarks/scale.py [--models deit-tiny deit-small] [--pictures 256] [--memory 4GiB] [--variant l1]
    python benchmarks/scale.py --auto 0.5 --source FILE.py:FACTORY --checkpoint FILE --input-size 3x32x32 --mean ... \\
        --std ... --data FILE.npz [--pictures 1000]

With --auto POINTS, `--variant auto --max-drop POINTS` over the published forms on a trained model; else
random weights and pictures, each model in a process of its own. A forward pass is that of all pictures in eager torch,
by the same threads in batches of 16, measured on two of them before and on two after in the same process. Times are
those of the processors together, so that what else the machine does falls on neither; with a GPU, which calibration
uses where there is one, forward passes run there, too, and times are those on the clock.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import attnrewrite as ar
from attnrewrite.calibration.stage import peak_memory
from attnrewrite.evaluation.latency import environment
from attnrewrite.frontends.sources import load_source
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.resources import format_bytes

MODELS = {  # name: timm's name, the pictures' side
    "deit-tiny": ("deit_tiny_patch16_224", 224),
    "deit-small": ("deit_small_patch16_224", 224),
    "deit-base": ("deit_base_patch16_224", 224),
    "vit-large": ("vit_large_patch16_224", 224),
    "swin-tiny": ("swin_tiny_patch4_window7_224", 224),
    "pvt-v2-b0": ("pvt_v2_b0", 224),
    "deit-tiny-512": ("deit_tiny_patch16_224", 512),
    "deit-tiny-1024": ("deit_tiny_patch16_224", 1024),
}
BATCH, PASSES, LONG = 16, 2, 32
GPU = torch.cuda.is_available()


def built(name: str) -> tuple[torch.nn.Module, int]:
    import_torchvision()
    import timm

    own, side = MODELS[name]
    torch.manual_seed(0)
    sized = {} if side == 224 else {"img_size": side}
    return timm.create_model(own, **sized).eval(), side


def seconds() -> float:
    """Processor seconds of this process; with a GPU, seconds on the clock when all its work is done."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def forward_seconds(model: torch.nn.Module, size: Sequence[int], passes: int = PASSES) -> float:
    """Seconds of a forward pass, for one picture [C, H, W]."""
    device = "cuda" if GPU else "cpu"
    pictures = torch.randn(BATCH if max(size) <= 224 else 1, *size, device=device)
    model.to(device)(pictures)
    started = seconds()
    for _ in range(passes):
        model(pictures)
    found = (seconds() - started) / passes / len(pictures)
    model.to("cpu")
    return found


def measured(name: str, pictures: int, variant: str, memory: str | None, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model, side = built(name)
    one = forward_seconds(model, (3, side, side))
    images = torch.randint(0, 256, (pictures, 3, side, side), dtype=torch.uint8)
    example = (torch.randn(1, 3, side, side),)
    started = seconds()
    done = ar.convert(
        model, example, variant=variant, calibration=images, samples=pictures, memory=memory, threads=threads,
        mean=0.5, std=0.25, options={"approximate": True} if variant == "l1" else {},
    )  # fmt: skip
    whole = seconds() - started
    one = (one + forward_seconds(model, (3, side, side))) / 2
    stages = done.report["calibration"]["stages"]
    clock = "seconds" if GPU else "cpu_seconds"
    rows = [(stage["name"], stage[clock], stage["peak_memory"], stage["spilled"]) for stage in stages]
    rest = whole - sum(spent for _, spent, *_ in rows)
    rows += [("capture, checks, measuring", rest, peak_memory(), 0), ("the whole", whole, peak_memory(), 0)]
    return {
        "model": name, "pictures": pictures, "forward_seconds": one * pictures, "notes": [s["notes"] for s in stages],
        "rows": rows, "environment": environment(threads),
    }  # fmt: skip


def chosen(asked: argparse.Namespace) -> dict[str, Any]:
    """What --variant auto takes on a trained model: candidates alone, choices, the fit of the last, the rest."""
    torch.set_num_threads(asked.threads)
    how = {name: getattr(asked, name) for name in ("checkpoint", "input_size", "mean", "std") if getattr(asked, name)}
    source = load_source(asked.source, **how)
    before = forward_seconds(source.model, source.input_size, passes=LONG)
    started = seconds()
    ends: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        ends["checks" if "check" in what else what] = seconds()

    done = ar.convert(
        source, variant="auto", max_drop=asked.auto, candidates="published", calibration=asked.data,
        samples=asked.pictures, memory=asked.memory, threads=asked.threads, progress=progress,
    )  # fmt: skip
    ended = seconds()
    one = (before + forward_seconds(source.model, source.input_size, passes=LONG)) / 2
    fit = sum(stage["seconds" if GPU else "cpu_seconds"] for stage in done.report["calibration"]["stages"])
    spent = {
        "capture, checks": ends["checks"] - started,
        "candidates alone": ends["candidates"] - ends["checks"],
        "choices, check of the result": ended - ends["candidates"] - fit,
        "fit of what was chosen": fit,
        "the whole": ended - started,
    }
    rows = [(what, each, peak_memory(), 0) for what, each in spent.items()]
    told = done.report["selection"]
    choices = [each for each in told["frontier"] if each["kind"] == "measured"]
    notes = [
        f"{len(choices)} choices measured, {sum(each['holds'] for each in choices)} hold; "
        f"{told['promise']['replaced']} of {len(told['sites'])} sites replaced, {told['promise']['points']:.2f} points "
        f"lost, at most {told['promise']['bound']:.2f}"
    ]
    return {
        "model": source.name, "pictures": asked.pictures, "forward_seconds": one * asked.pictures, "notes": notes,
        "rows": rows, "environment": environment(asked.threads),
    }  # fmt: skip


def shown(found: dict[str, Any]) -> Table:
    forward, pictures = found["forward_seconds"], found["pictures"]
    table = Table(
        title=f"{found['model']}, {pictures} pictures: a forward pass of all takes {forward:.2f} s{' on the GPU' * GPU}"
    )
    for column in ("stage", "seconds", "forward passes", "images/s", "peak memory", "spilled"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, spent, peak, spilled in found["rows"]:
        rate = f"{pictures / spent:.1f}" if spent else ""
        table.add_row(name, f"{spent:.1f}", f"{spent / forward:.1f}", rate, format_bytes(peak), format_bytes(spilled))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit-tiny", "deit-small"], choices=MODELS)
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--variant", default="l1")
    parser.add_argument("--memory")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--auto", type=float, metavar="POINTS")
    for name in ("--source", "--checkpoint", "--data", "--input-size"):
        parser.add_argument(name, help="of a trained model, for --auto")
    for name in ("--mean", "--std"):
        parser.add_argument(name, type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.auto is not None and not (asked.source and asked.data):
        parser.error("--auto needs --source and --data")
    if asked.auto is not None:
        found = chosen(asked)
        Console().print(shown(found), *found["notes"])
        return
    if asked.one:
        print(json.dumps(measured(asked.models[0], asked.pictures, asked.variant, asked.memory, asked.threads)))
        return
    for name in asked.models:
        line = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", "--models", name]
        run = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        Console().print(shown(json.loads(run.stdout.splitlines()[-1])))


if __name__ == "__main__":
    main()
