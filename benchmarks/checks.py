"""What a conversion without calibration costs: in torch's own exports of the same module, and the checks' share of it.

    python benchmarks/checks.py [--models deit_tiny_patch16_224:512 ...] [--variant l1:approximate=true] [--times 3]

`NAME:SIDE` is a timm model for pictures of that side. Random weights, one thread, each model in a process of its own.
An export is torch.export.export with an open batch; exports, conversions and saves take turns, garbage collected before
each and the first turn not counted, and ratios are of processor time, the middle of `--times` of them. `saved` has
`Conversion.save` in it, which exports the result and holds it to the module. A forward pass is of one picture, peak
memory the process's beyond what it held before the first conversion.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forms import named

import attnrewrite as ar
from attnrewrite.calibration.stage import peak_memory
from attnrewrite.conversion import convert, proof, replacing
from attnrewrite.evaluation.latency import environment
from attnrewrite.frontends import capture
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.resources import format_bytes

CHECKS = [
    *((proof, name) for name in ("agreement", "site_errors", "rewriting_error", "drawn")),
    (replacing, "float64_errors"),
]
MODELS = [*(f"deit_tiny_patch16_224:{side}" for side in (224, 512, 1024)), "deit_small_patch16_224:224"]


def seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    started = time.process_time()
    call()
    return time.process_time() - started


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **how: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **how)
        finally:
            spent.append(time.process_time() - started)

    return run


def measured(model_name: str, variant: str, times: int) -> dict[str, Any]:
    import_torchvision()
    import timm

    name, _, side = model_name.partition(":")
    model = timm.create_model(name, **({"img_size": int(side)} if side else {})).eval()
    size = (3, int(side), int(side)) if side else model.default_cfg["input_size"]
    form, options = named(variant)
    inputs, pair = (torch.randn(1, *size),), (torch.randn(2, *size),)
    checks, scans, done = [], [], []
    for module, check in CHECKS:
        setattr(module, check, timed(getattr(module, check), checks))
    convert.scan_graph = timed(convert.scan_graph, scans)  # type: ignore[assignment]

    def saved() -> None:
        with tempfile.TemporaryDirectory() as folder:
            done[-1].save(Path(folder) / "out")

    rounds = []
    with torch.no_grad():
        model(*inputs)
        forward = seconds(lambda: model(*inputs))
    before = peak_memory()
    for _ in range(1 + times):
        checks.clear()
        scans.clear()
        export = seconds(lambda: torch.export.export(model, pair, dynamic_shapes=capture.open_batch(pair)))
        whole = seconds(lambda: done.append(ar.convert(model, inputs, variant=form, options=options)))
        peak = peak_memory()
        parts = (whole, sum(checks), sum(scans), seconds(saved), forward)
        rounds.append([part / export for part in parts] + [export, peak])
        done.clear()
    middle = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
    whole, share, scan, save, forward, export, _ = middle
    return {
        "model": model_name, "export_s": export, "exports": whole, "saved": whole + save, "checks": share, "scan": scan,
        "pass": forward, "peak": format_bytes(int(rounds[0][-1] - before)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="timm models, NAME or NAME:SIDE")
    parser.add_argument("--variant", default="l1", help="NAME or NAME:option=value,...")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(json.dumps(measured(given.models[0], given.variant, given.times)))
        return
    print("| model | an export | converted | saved | of it checks | scan | a forward pass | peak memory |")
    print(f"|{'-|' * 8}", flush=True)
    for name in given.models:
        how = ["--variant", given.variant, "--times", str(given.times)]
        line = [sys.executable, __file__, "--one", "--models", name, *how]
        found = json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
        ratios = " | ".join(f"{found[part]:.2f}" for part in ("exports", "saved", "checks", "scan", "pass"))
        print(f"| {name} | {found['export_s']:.2f} s | {ratios} | {found['peak']} |", flush=True)
    known = environment(1)
    print(", ".join(f"{name} {known[name]}" for name in ("processor", "cores", "torch") if name in known))


if __name__ == "__main__":
    main()
