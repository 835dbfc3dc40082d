"""What making a Core ML package smaller costs in accuracy: bytes, top-1 and agreement of each way to compress it.

    python benchmarks/compress.py [SOURCE --checkpoint FILE --input-size 3x32x32 --mean ... --std ... --test test.npz]
        [--methods int8 palette6 palette4 prune] [--samples 200] [--minimum-target iOS17]

Without a source: the demo's model, on canvases of its own. Every package answers the same images, one by one, by the
interpreter, float16 rounding and all; the model is torch's. Rows marked with * are the frontier: no other package is as
small and agrees as often with the model. Prints a markdown table, and the machine it was made on.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnrewrite as ar
from attnrewrite.evaluation.accuracy import evaluate_modules
from attnrewrite.evaluation.latency import environment
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.frontends.batches import runnable
from attnrewrite.frontends.sources import Source, load_source
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.targets.base import get_target, size_bytes
from attnrewrite.targets.coreml import compression, package

EXAMPLES = Path(__file__).parents[1] / "examples"
WHOLE = "float16"
CANVASES = 1000  # of the demo, as its test.npz holds


def demo() -> tuple[Source, Images]:
    """The demo's model, and the canvases that it is measured on."""
    sys.path.insert(0, str(EXAMPLES))
    from digits import CANVAS, MEAN, STD, canvases, strokes

    spec, size = f"{EXAMPLES / 'digits.py'}:trained_digits_vit", (1, CANVAS, CANVAS)
    pictures, labels = canvases(*strokes(held_out=True), CANVASES, seed=2)
    return load_source(spec, input_size=size, mean=MEAN, std=STD), replace(load_images(pictures), y=labels)


def made(source: Source, minimum: str, methods: list[str], folder: Path) -> dict[str, tuple[int, Callable[..., Any]]]:
    """The packages by method: the bytes of each, and a call that answers as it does."""
    target = get_target("coreml-npu").configured(minimum_target=minimum)
    whole = ar.lower(source, "coreml-npu", folder / WHOLE, minimum_target=minimum)
    found = {}
    for method in (WHOLE, *methods):
        artifact = replace(whole, path=folder / method)
        if method != WHOLE:
            shutil.copytree(whole.path, artifact.path)
            compression.compress(artifact.path / package.NAME, method)
        answer = target.answers(artifact, runnable(source), source.example_inputs)
        found[method] = (size_bytes(artifact.path / package.NAME), answer)
    return found


def frontier(sizes: dict[str, int], agreeing: dict[str, float]) -> set[str]:
    """Those that no other beats in one thing and equals in the other."""

    def beaten(name: str) -> bool:
        own = (-sizes[name], agreeing[name])
        others = ((-sizes[each], agreeing[each]) for each in sizes)
        return any(other != own and other[0] >= own[0] and other[1] >= own[1] for other in others)

    return {name for name in sizes if not beaten(name)}


def rows(found: dict[str, Evaluation], sizes: dict[str, int]) -> list[str]:
    """A row of the table for each package, the largest first."""
    best = frontier(sizes, {name: found[name].agreement or 0.0 for name in sizes})
    told = []
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        top1 = "" if found[name].top1 is None else f"{found[name].top1:.1f} %"
        share = f"{sizes[name] / sizes[WHOLE]:.2f}"
        mark = "*" if name in best else ""
        told.append(f"| `{name}`{mark} | {sizes[name]:,} | {share} | {top1} | {found[name].agreement:.1f} % |")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?")
    for option in ("checkpoint", "input-size", "mean", "std", "test"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--methods", nargs="+", default=list(compression.METHODS))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--minimum-target", default="iOS17")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.source is None:
        source, images = demo()
    else:
        how = {name: getattr(given, name) for name in ("checkpoint", "input_size", "mean", "std")}
        source, images = load_source(given.source, **how), load_images(given.test)
    with tempfile.TemporaryDirectory() as folder:
        packages = made(source, given.minimum_target, given.methods, Path(folder))
        modules: dict[str, Callable[[Tensor], Any]] = {name: call for name, (_, call) in packages.items()}
        found = evaluate_modules(
            {"model": runnable(source), **modules}, images.sample(given.samples, given.seed), source.preprocessing,
            input_size=source.input_size, reference="model", batch_size=1,
        )  # fmt: skip
    whole = found["model"]
    accuracy = "" if whole.top1 is None else f", top-1 {whole.top1:.1f} % in torch"
    print(f"{source.name}, {whole.n} images{accuracy}, {given.minimum_target}\n")
    print("| package | bytes | of float16's | top-1 | agreement |\n|-|-|-|-|-|")
    print("\n".join(rows(found, {name: size for name, (size, _) in packages.items()})))
    print(f"\n{environment(1)}")


if __name__ == "__main__":
    main()
