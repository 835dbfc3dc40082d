"""The papers' iPhone times of models with their attention replaced, beside our estimates of the same conversions.

    python benchmarks/papers_npu.py [--models deit_small ...]

A paper trained its model with another attention and timed both; here the timm model, with random weights, is converted
as `convert` and `lower` do it, and both are priced by the estimate of `coreml-npu` (benchmarks/coreml_latency.py says
how far off that is). Only the ratio of the two is printed: it is estimated, nothing was run on a device. What a paper
changed beside the attention (tokens pooled, layers of convolutions) is not in ours.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from scipy.stats import spearmanr
from torch import nn

import attnrewrite as ar
from attnrewrite.conversion.record import deployed
from attnrewrite.errors import AttnRewriteError, InputError, Refusal, first_line
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.base import get_target
from attnrewrite.targets.coreml.latency import fitted


@dataclass(frozen=True)
class Published:
    """Milliseconds of a timm model and of the same with the attention of `form`, on one iPhone; `left` where the times
    look as if the model had left the Neural Engine.
    """

    name: str
    form: str
    size: int
    original: float
    converted: float
    source: str
    left: bool = False


MOBILE, SWIFT = (
    "Mobile-Attention (Yao et al. 2024), table {}, iPhone 12",
    "SwiftFormer (Shaker et al. 2023), table 1, iPhone 14",
)
PUBLISHED = (
    Published("deit_tiny_patch16_224", "mobile", 224, 4.5, 3.8, MOBILE.format(1)),
    Published("deit_small_patch16_224", "mobile", 224, 9.0, 7.2, MOBILE.format(1)),
    Published("deit_base_patch16_224", "mobile", 224, 18.2, 13.3, MOBILE.format(1)),
    Published("deit_small_patch16_224", "hydra", 224, 9.0, 7.0, MOBILE.format(2)),
    Published("efficientformerv2_s0", "mobile", 224, 0.9, 0.7, MOBILE.format(1)),
    Published("efficientformerv2_s2", "mobile", 224, 1.6, 1.2, MOBILE.format(1)),
    Published("efficientformerv2_l", "mobile", 224, 2.7, 2.2, MOBILE.format(1)),
    Published("pvt_v2_b0", "mobile", 224, 78.4, 57.3, MOBILE.format(1), left=True),
    Published("pvt_v2_b2", "mobile", 224, 101.0, 65.6, MOBILE.format(1), left=True),
    Published("efficientformer_l1", "additive", 224, 1.1, 1.0, SWIFT),
)


def prices(row: Published) -> tuple[float, float, str]:
    """Estimated milliseconds of the original and of the conversion, and at how many of its sites the form stands."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(row.name).eval()
    inputs = (torch.randn(1, 3, row.size, row.size),)
    done = ar.convert(model, inputs, variant=row.form)
    stands = sum(site["variant"] == row.form for site in done.report["sites"])
    return _price(model, inputs), _price(deployed(done.module), inputs), f"{stands}/{len(done.report['sites'])}"


def _price(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    pricing = get_target("coreml-npu").pricing()
    if isinstance(pricing, Refusal):
        raise InputError(pricing.sentence)
    return pricing.of(module, inputs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[""], help="what the names of the models begin with")
    given = parser.parse_args(arguments)
    import_torchvision()
    torch.set_num_threads(1)
    known = fitted()
    pairs = []
    print("| model | form | sites | published ms | published ratio | estimated ratio | source |\n|-|-|-|-|-|-|-|")
    for row in (row for row in PUBLISHED if row.name.startswith(tuple(given.models))):
        published = f"{row.original} -> {row.converted}{' (left the engine?)' if row.left else ''}"
        try:
            original, converted, stands = prices(row)
        except AttnRewriteError as error:
            print(f"{row.name} with {row.form}: unavailable: {first_line(error)}", file=sys.stderr)
            continue
        if not row.left:
            pairs.append((row.converted, converted))
        ratios = f"{row.converted / row.original:.2f} | {converted / original:.2f}"
        print(f"| {row.name} | {row.form} | {stands} | {published} | {ratios} | {row.source} |", flush=True)
    if len(pairs) > 2:
        told, estimated = zip(*pairs, strict=True)
        rank = spearmanr(told, estimated).statistic
        print(f"rank correlation of converted models that stayed on the engine: {rank:.2f} ({len(pairs)} models)")
    trust = "trusted" if known.trusted else "not trusted: rows of `compare` say unavailable"
    print(f"estimates are {trust} (on families held out: error {known.error:.0%}, rank {known.ranking:.2f})")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "coremltools", "timm")))


if __name__ == "__main__":
    main()
