"""What calibration costs at a user's scale: every stage's seconds, forward passes' worth, images a second, peak memory
and what it wrote to temporary files.

    python benchmarks/scale.py [--models deit-tiny deit-small] [--pictures 256] [--memory 4GiB] [--variant l1]

Random weights and pictures, each model in a process of its own. A forward pass is that of all pictures in eager torch,
by the same threads in batches of 16, measured on two of them in the same process. Times are those of the processors
together, so that what else the machine does falls on neither; with a GPU, which calibration uses where there is one,
forward passes run there, too, and times are those on the clock.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import attnrewrite as ar
from attnrewrite.calibration.stage import peak_memory
from attnrewrite.evaluation.latency import environment
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
BATCH, PASSES = 16, 2
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
def forward_seconds(model: torch.nn.Module, side: int) -> float:
    """Seconds of a forward pass, for one picture."""
    device = "cuda" if GPU else "cpu"
    pictures = torch.randn(BATCH if side <= 224 else 1, 3, side, side, device=device)
    model.to(device)(pictures)
    started = seconds()
    for _ in range(PASSES):
        model(pictures)
    found = (seconds() - started) / PASSES / len(pictures)
    model.to("cpu")
    return found


def measured(name: str, pictures: int, variant: str, memory: str | None, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model, side = built(name)
    one = forward_seconds(model, side)
    images = torch.randint(0, 256, (pictures, 3, side, side), dtype=torch.uint8)
    example = (torch.randn(1, 3, side, side),)
    started = seconds()
    done = ar.convert(
        model, example, variant=variant, calibration=images, samples=pictures, memory=memory, threads=threads,
        mean=0.5, std=0.25, options={"approximate": True} if variant == "l1" else {},
    )  # fmt: skip
    whole = seconds() - started
    stages = done.report["calibration"]["stages"]
    clock = "seconds" if GPU else "cpu_seconds"
    rows = [(stage["name"], stage[clock], stage["peak_memory"], stage["spilled"]) for stage in stages]
    rest = whole - sum(spent for _, spent, *_ in rows)
    rows += [("capture, checks, measuring", rest, peak_memory(), 0), ("the whole", whole, peak_memory(), 0)]
    return {
        "model": name, "pictures": pictures, "forward_seconds": one * pictures, "notes": [s["notes"] for s in stages],
        "rows": rows, "environment": environment(threads),
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["deit-tiny", "deit-small"], choices=MODELS)
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--variant", default="l1")
    parser.add_argument("--memory")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.models[0], asked.pictures, asked.variant, asked.memory, asked.threads)))
        return
    for name in asked.models:
        line = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", "--models", name]
        run = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        Console().print(shown(json.loads(run.stdout.splitlines()[-1])))


if __name__ == "__main__":
    main()
