"""What calibration costs at a user's scale: every stage's seconds, forward passes' worth, images a second, peak memory
and what it wrote to temporary files.

    python benchmarks/scale.py [--models deit-tiny deit-small] [--pictures 256] [--memory 4GiB] [--variant l1]

Random weights and pictures, each model in a process of its own. A forward pass is that of all pictures in eager torch,
by the same threads in batches of 16, measured on two of them in the same process. Times are those of the processors
together, so that what else the machine does falls on neither.
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


def built(name: str) -> tuple[torch.nn.Module, int]:
    import_torchvision()
    import timm

    own, side = MODELS[name]
    torch.manual_seed(0)
    sized = {} if side == 224 else {"img_size": side}
    return timm.create_model(own, **sized).eval(), side


@torch.no_grad()
def forward_seconds(model: torch.nn.Module, side: int) -> float:
    """Processor seconds of a forward pass, for one picture."""
    pictures = torch.randn(BATCH if side <= 224 else 1, 3, side, side)
    model(pictures)
    started = time.process_time()
    for _ in range(PASSES):
        model(pictures)
    return (time.process_time() - started) / PASSES / len(pictures)


def measured(name: str, pictures: int, variant: str, memory: str | None, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model, side = built(name)
    one = forward_seconds(model, side)
    images = torch.randint(0, 256, (pictures, 3, side, side), dtype=torch.uint8)
    example = (torch.randn(1, 3, side, side),)
    started = time.process_time()
    done = ar.convert(
        model, example, variant=variant, calibration=images, samples=pictures, memory=memory, threads=threads,
        mean=0.5, std=0.25,
    )  # fmt: skip
    whole = time.process_time() - started
    stages = done.report["calibration"]["stages"]
    rows = [(stage["name"], stage["cpu_seconds"], stage["peak_memory"], stage["spilled"]) for stage in stages]
    rest = whole - sum(seconds for _, seconds, *_ in rows)
    rows += [("capture, checks, measuring", rest, peak_memory(), 0), ("the whole", whole, peak_memory(), 0)]
    return {
        "model": name, "pictures": pictures, "forward_seconds": one * pictures, "notes": [s["notes"] for s in stages],
        "rows": rows, "environment": environment(threads),
    }  # fmt: skip


def shown(found: dict[str, Any]) -> Table:
    forward, pictures = found["forward_seconds"], found["pictures"]
    table = Table(title=f"{found['model']}, {pictures} pictures: a forward pass of all takes {forward:.1f} s")
    for column in ("stage", "seconds", "forward passes", "images/s", "peak memory", "spilled"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, seconds, peak, spilled in found["rows"]:
        rate = f"{pictures / seconds:.1f}" if seconds else ""
        table.add_row(
            name, f"{seconds:.1f}", f"{seconds / forward:.1f}", rate, format_bytes(peak), format_bytes(spilled)
        )
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
