"""What the tutorials (registers.py, swin.py, detr.py) share: pictures, weights that matter, and how they tell.

    python examples/tutorial.py --out out/pictures     # the pictures as files, for the command line

Nothing is downloaded: the models are small and their weights random, so that what is lost and repaired says nothing
about trained ones. What is found, what is refused and why is the same for the large models of the same kind.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import canvases, strokes
from PIL import Image
from torch import nn

import attnrewrite as ar

SIDE = 112  # pixels a side, of the pictures and of what the models take
COUNT = 40
HOW = {"input_size": f"3x{SIDE}x{SIDE}", "mean": 0.5, "std": 0.5}


def pictures() -> np.ndarray:
    """uint8 [COUNT, SIDE, SIDE, 3]: handwritten digits scattered over a canvas, each picture in a colour of its own."""
    grey, _ = canvases(*strokes(held_out=False), COUNT, seed=3)
    tiled = np.tile(grey, (1, 2, 2))[:, :SIDE, :SIDE, None]
    return (tiled * np.random.default_rng(3).uniform(0.3, 1, (COUNT, 1, 1, 3))).astype(np.uint8)


@torch.no_grad()
def attentive(model: nn.Module) -> nn.Module:
    """`model` with larger random weights: fresh ones attend to every token alike, and any form can do that."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(3)
    return model


def show_sites(scan: ar.Scan) -> None:
    """Each attention that was found, and the grid that its tokens are."""
    print(f"{len(scan.sites)} attentions found, {len(scan.near_misses)} that only look like one")
    for site in scan.sites:
        tokens = f"{site.n_queries} x {site.n_keys} tokens"
        grid = f", {site.grid.prefix} before a grid of {site.grid.rows}x{site.grid.columns}" if site.grid else ""
        windows = f", {site.windows} windows" if site.windowed else ""
        bias = f", {site.bias} bias" if site.bias != "none" else ""
        print(f"  {site.name}: {site.kind}, {site.heads} heads, {tokens}{grid}{windows}{bias}")


def show_conversion(done: ar.Conversion) -> None:
    """What became of each site, how exactly it was extracted, and what calibration did."""
    for site in done.report["sites"]:
        if site["identity_error"] is None:
            print(f"  {site['name']} {site['note']}")
        else:
            note = f" ({site['note']})" if site["note"] else ""
            within = 10.0 ** math.ceil(math.log10(max(site["identity_error"], 1e-12)))  # less is rounding
            print(f"  {site['name']} is {site['variant']}{note}; extracted to within {within:.0e}")
    for stage in done.report["calibration"]["stages"]:
        print(f"  after {stage['name']}, the output is {stage['error_after']:.2g} of its variance off")


def command_line(
    source: str, out: str, variant: str, options: Mapping[str, Any] | None = None, keep: Sequence[str] = ()
) -> str:
    """The same conversion as a command, on the pictures that this file writes."""
    how = [f"--{name.replace('_', '-')} {value}" for name, value in HOW.items()]
    chosen = [f"--option {name}={str(value).lower()}" for name, value in (options or {}).items()]
    kept = [f"--keep '{site}'" for site in keep]
    what = ["attnrewrite convert", source, *how, f"--variant {variant}", *chosen, *kept]
    return " ".join([*what, "--calibrate out/pictures", f"--out {out}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures()):
        Image.fromarray(picture).save(options.out / f"{index:03}.png")
    print(f"{options.out}: {COUNT} pictures of {SIDE}x{SIDE}")


if __name__ == "__main__":
    main()
