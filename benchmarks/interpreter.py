"""How long the Core ML interpreter takes for a picture, as parts of what torch takes for the model itself.

    python benchmarks/interpreter.py [MODEL ...] [--repeats N]

The models are timm's, with random weights. Seconds of the processor on one thread (other jobs on the machine do not
count), medians of calls in turns: torch eager, the package in float32, and with every result rounded to float16.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from attnrewrite.frontends.sources import load_source
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.prepare import canonical, specialise

MODELS = ("vit_tiny_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224")


def seconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median of each, over calls in turns; the first of each is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def measured(name: str, repeats: int) -> dict[str, float]:
    """The seconds of one model in torch, and of its packages."""
    source = load_source(f"timm:{name}")
    model, inputs = source.model.eval(), tuple(each[:1] for each in source.example_inputs)
    calls: dict[str, Callable[[], object]] = {"torch eager": lambda: model(*inputs)}
    with tempfile.TemporaryDirectory() as folder, package.quiet():
        program = canonical(specialise(model, inputs))
        for precision in ("FLOAT32", "FLOAT16"):
            (part := Path(folder) / precision).mkdir()
            made = interpreter.load(package.convert(program, part, precision))
            given = dict(zip(made.functions["main"].inputs, inputs, strict=True))
            calls[precision.lower()] = partial(interpreter.interpret, made, given)
        with torch.inference_mode():
            return seconds(calls, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="of timm")
    parser.add_argument("--repeats", type=int, default=7, help="calls of each")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | torch eager, s | interpreted in float32 | with float16's rounding |\n|-|-|-|-|")
    for name in asked.models:
        found = measured(name, asked.repeats)
        eager = found["torch eager"]
        print(f"| {name} | {eager:.3f} | {found['float32'] / eager:.2f} | {found['float16'] / eager:.2f} |", flush=True)


if __name__ == "__main__":
    main()
