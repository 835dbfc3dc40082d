"""The demo's task, data and model: read the underlined digit.

Handwritten digits from scikit-learn (8x8, no download) are scattered over a 64x64 canvas and one of them is
underlined; the label is that digit. Knowing which digit counts takes attention over all the places where one may stand.

    python examples/digits.py --out out/demo/digits     # writes calibration.npz (unlabelled) and test.npz
    examples/digits.py:digits_vit                       # the model, as a source for attnrewrite
"""

import argparse
from pathlib import Path

import numpy as np
from torch import nn

CANVAS = 64  # pixels a side
PATCH = 4  # pixels a side: 16 x 16 = 256 tokens, and the class token
CELL = 12  # an 8x8 digit, its underline, and room to jitter
MEAN, STD = 0.5, 0.5  # the model reads (x / 255 - MEAN) / STD
HELD_OUT = 397  # of the 1797 digits: none of these strokes is in a training canvas


def digits_vit(image_size: int = CANVAS) -> nn.Module:
    """An untrained timm ViT for the task: x [B, 1, image_size, image_size] -> logits [B, 10]."""
    from attnrewrite._torchvision import import_torchvision

    import_torchvision()  # timm imports it; a CPU-only torch needs help with that
    import timm

    config = {"mean": (MEAN,), "std": (STD,), "input_size": (1, image_size, image_size), "num_classes": 10}
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained_cfg=config,
        img_size=image_size,
        patch_size=PATCH,
        in_chans=1,
        embed_dim=64,
        depth=4,
        num_heads=4,
        num_classes=10,
    )


def strokes(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, uint8 [N, 8, 8] with their labels [N]: those for training, or those held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    part = slice(-HELD_OUT, None) if held_out else slice(None, -HELD_OUT)
    return images[part], digits.target[part]


def canvases(
    images: np.ndarray, labels: np.ndarray, count: int, seed: int, size: int = CANVAS
) -> tuple[np.ndarray, np.ndarray]:
    """`count` canvases uint8 [count, size, size] with a few of `images` each, one underlined: its label [count]."""
    rng = np.random.default_rng(seed)
    side = size // CELL
    canvas = np.zeros((count, size, size), np.uint8)
    answers = np.zeros(count, np.int64)
    for index in range(count):
        cells = rng.permutation(side * side)[: rng.integers(side, 2 * side)]
        chosen = rng.integers(len(images), size=len(cells))
        for place, (cell, digit) in enumerate(zip(cells, chosen, strict=True)):
            top = CELL * (cell // side) + rng.integers(CELL - 10)
            left = CELL * (cell % side) + rng.integers(CELL - 7)
            canvas[index, top : top + 8, left : left + 8] = images[digit]
            if place == 0:
                canvas[index, top + 9, left : left + 8] = 255
                answers[index] = labels[digit]
    return canvas, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for calibration.npz and test.npz")
    parser.add_argument("--samples", type=int, default=1000, help="canvases in each file")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, held_out, seed in (("calibration", False, 1), ("test", True, 2)):
        x, y = canvases(*strokes(held_out), options.samples, seed)
        columns = {"x": x, "y": y} if held_out else {"x": x}
        np.savez_compressed(options.out / f"{name}.npz", **columns)
        print(f"{options.out / name}.npz: {', '.join(columns)}; {len(x)} canvases of {CANVAS}x{CANVAS}")


if __name__ == "__main__":
    main()
