"""What breaks a rule of the Neural Engine in a timm model at its own size, as it is and with each form at every site.

    python benchmarks/engine_rules.py [--model deit_tiny_patch16_224] [--layout engine|as-is] [--forms softmax l1 ...]

Each is made into a float16 package as `lower --target coreml-npu` makes it, with random weights, and held against
`targets/coreml/engine_rules.py`. Printed are its operators, the shares of operators and multiply-adds that stay on the
engine, its transposes, and how many operators break which rule. Nothing is run on a device.
"""

import argparse
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.conversion.record import deployed
from attnrewrite.errors import AttnRewriteError
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.coreml.pipeline import LAYOUTS
from attnrewrite.targets.prepare import canonical, specialise
from attnrewrite.variants.registry import BUILT_IN

ORIGINAL = "softmax"  # a form of the registry, too, which leaves a model as it is


def report(module: nn.Module, inputs: tuple[Tensor, ...], layout: str) -> EngineReport:
    program = canonical(specialise(module, inputs))
    with tempfile.TemporaryDirectory() as folder, package.quiet():
        made = package.convert(program, Path(folder), "FLOAT16", package.Wanted(layout=layout))
        return lint(interpreter.load(made))


def line(form: str, found: EngineReport) -> str:
    operators, multiply_adds = found.staying()
    broken = Counter(rule for each in found.operators for rule in each.broken)
    told = ", ".join(f"{rule} x{count}" for rule, count in broken.most_common()) or "none"
    moves = sum(each.kind == "transpose" for each in found.operators)
    return f"| {form} | {len(found.operators)} | {operators:.1%} | {multiply_adds:.1%} | {moves} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="a name of timm's")
    parser.add_argument("--layout", choices=LAYOUTS, default="engine")
    forms = tuple(each.name for each in BUILT_IN)
    parser.add_argument("--forms", nargs="+", choices=forms, default=forms, metavar="NAME")
    asked = parser.parse_args()
    import_torchvision()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(asked.model, pretrained=False).eval()
    inputs = (torch.randn(1, *model.pretrained_cfg["input_size"]),)
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "coremltools", "timm")))
    print("| attention | operators | that stay | multiply-adds that stay | transposes | rules broken |\n|-|-|-|-|-|-|")
    for form in asked.forms:
        try:
            converted = model if form == ORIGINAL else deployed(ar.convert(model, inputs, variant=form).module)
            print(line(form, report(converted, inputs, asked.layout)), flush=True)
        except AttnRewriteError as error:
            print(f"{form}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
