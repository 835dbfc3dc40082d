"""What the checks of a conversion cost: the share of `convert` and `save`, without calibration, that they take.

    python benchmarks/checks.py [--models deit_tiny_patch16_224 ...] [--variant l1] [--times 3]

Random weights, one thread, processor time of this process; the middle of `--times` runs after one that is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnrewrite as ar
from attnrewrite.conversion import proof
from attnrewrite.evaluation.latency import environment
from attnrewrite.frontends.torchvision import import_torchvision

CHECKS = ("agreement", "site_errors", "rewriting_error", "drawn")


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **how: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **how)
        finally:
            spent.append(time.process_time() - started)

    return run


def measured(name: str, variant: str, times: int) -> tuple[float, float]:
    """Seconds of the whole conversion, and of the checks in it."""
    import_torchvision()
    import timm

    model = timm.create_model(name).eval()
    inputs = (torch.randn(1, *model.default_cfg["input_size"]),)
    found = []
    for _ in range(1 + times):
        spent: list[float] = []
        own = {check: getattr(proof, check) for check in CHECKS}
        for check, function in own.items():
            setattr(proof, check, timed(function, spent))
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            ar.convert(model, inputs, variant=variant).save(Path(folder) / "out")
        found.append((time.process_time() - started, sum(spent)))
        for check, function in own.items():
            setattr(proof, check, function)
    whole, checks = zip(*found[1:], strict=True)
    return statistics.median(whole), statistics.median(checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=["deit_tiny_patch16_224", "deit_small_patch16_224"], help="timm models"
    )
    parser.add_argument("--variant", default="l1")
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        whole, checks = measured(name, given.variant, given.times)
        print(f"{name}: {whole:.2f} s, of which the checks take {checks:.2f} s ({100 * checks / whole:.0f} %)")
    known = environment(1)
    print(", ".join(f"{name} {known[name]}" for name in ("processor", "cores") if name in known))


if __name__ == "__main__":
    main()
