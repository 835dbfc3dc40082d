"""The demo's task, data and model: read the bright digit.

Handwritten digits from scikit-learn (8x8, no download) are scattered over a 64x64 canvas. One is drawn at full strength
and the others are dimmed; the label is the bright one. It takes attention over all the places where it may stand.

    python examples/digits.py --out out/demo/digits     # writes calibration.npz (unlabelled) and test.npz
    examples/digits.py:digits_vit                       # the model, as a source for attnrewrite, and
    examples/digits.py:trained_digits_vit               # the same with its weights
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import nn

CHECKPOINT = Path(__file__).with_name("digits_vit.safetensors")
CANVAS = 64  # pixels a side
PATCH = 4  # pixels a side: 16 x 16 = 256 tokens, and the class token
DIGIT = 8  # pixels a side: a digit covers four patches
FEWEST, MOST = 5, 9  # digits on a canvas
DIMMED = 0.45  # strength of the digits that do not count
MEAN, STD = 0.5, 0.5  # the model reads (x / 255 - MEAN) / STD
HELD_OUT = 397  # of the 1797 digits: none of these strokes is in a training canvas


def digits_vit() -> nn.Module:
    """An untrained timm ViT for the task: x [B, 1, CANVAS, CANVAS] -> logits [B, 10]."""
    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()  # timm imports it; a CPU-only torch needs help with that
    import timm

    config = {"mean": (MEAN,), "std": (STD,), "input_size": (1, CANVAS, CANVAS), "num_classes": 10}
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained_cfg=config,
        img_size=CANVAS,
        patch_size=PATCH,
        in_chans=1,
        embed_dim=64,
        depth=4,
        num_heads=4,
        num_classes=10,
    )


def trained_digits_vit() -> nn.Module:
    """The model with the weights that train_digits_vit.py made."""
    model = digits_vit()
    model.load_state_dict(load_file(CHECKPOINT))
    return model


def strokes(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, uint8 [N, 8, 8] with their labels [N]: those for training, or those held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    part = slice(-HELD_OUT, None) if held_out else slice(None, -HELD_OUT)
    return images[part], digits.target[part]


def canvases(images: np.ndarray, labels: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` canvases uint8 [count, CANVAS, CANVAS] with a few of `images` each, one bright: its label [count]."""
    rng = np.random.default_rng(seed)
    side = CANVAS // DIGIT
    canvas = np.zeros((count, CANVAS, CANVAS), np.uint8)
    answers = np.zeros(count, np.int64)
    for index in range(count):
        cells = rng.permutation(side * side)[: rng.integers(FEWEST, MOST + 1)]
        chosen = rng.integers(len(images), size=len(cells))
        answers[index] = labels[chosen[0]]
        for place, (cell, digit) in enumerate(zip(cells, chosen, strict=True)):
            top, left = DIGIT * (cell // side), DIGIT * (cell % side)
            strength = 1.0 if place == 0 else DIMMED
            canvas[index, top : top + DIGIT, left : left + DIGIT] = images[digit] * strength
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
