"""Train the demo's ViT from nothing, offline, on one thread, and say what its attention is worth.

    python examples/train_digits_vit.py            # trains, then rewrites examples/digits_vit.safetensors
    python examples/train_digits_vit.py --check    # test accuracy of the committed checkpoint, softmax and uniform

Three stages, the position embeddings resampled between them: one digit on 16x16 teaches the digits, 32x32 teaches to
look for the underline, 64x64 to look far. A step on the first costs a twentieth of one on the last.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import CANVAS, MEAN, STD, canvases, digits_vit, strokes
from safetensors.torch import load_file, save_file
from scipy.ndimage import affine_transform
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

CHECKPOINT = Path(__file__).with_name("digits_vit.safetensors")
STAGES = ((16, 128, 1500, 2e-3), (32, 64, 2500, 2e-3), (CANVAS, 32, 1500, 1e-3))  # canvas, batch, steps, peak rate
COPIES = 8  # of every digit, each turned, sheared and scaled a little differently


class UniformAttention(TorchFunctionMode):
    """Every softmax attention called inside becomes the plain average of its values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is scaled_dot_product_attention:
            query, _, value = args[:3]
            return value.mean(dim=-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
        return function(*args, **(kwargs or {}))


def prepared(canvas: np.ndarray) -> Tensor:
    """uint8 [N, S, S] -> what the model reads, [N, 1, S, S]."""
    return (torch.from_numpy(canvas).unsqueeze(1) / 255 - MEAN) / STD


@torch.no_grad()
def accuracy(model: nn.Module, count: int = 2000, size: int = CANVAS) -> float:
    """Share of `count` canvases of held-out digits that the model reads correctly."""
    model.eval()
    canvas, labels = canvases(*strokes(held_out=True), count, seed=2, size=size)
    predicted = torch.cat([model(batch).argmax(1) for batch in prepared(canvas).split(100)])
    return (predicted == torch.from_numpy(labels)).double().mean().item()


def augmented(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """COPIES of every image, each under a small affine map of its own: uint8 [COPIES * N, 8, 8] with their labels."""
    rng = np.random.default_rng(0)
    centre = (np.array(images.shape[1:]) - 1) / 2

    def moved(image: np.ndarray) -> np.ndarray:
        matrix = np.eye(2) + rng.normal(scale=0.12, size=(2, 2))
        return affine_transform(image, matrix, centre - matrix @ centre, order=1)

    return np.stack([moved(image) for _ in range(COPIES) for image in images]), np.tile(labels, COPIES)


def train(model: nn.Module, size: int, batch: int, steps: int, rate: float) -> None:
    """One stage: `steps` of AdamW with a one-cycle rate, on fresh canvases at every step."""
    images, labels = augmented(*strokes(held_out=False))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    model.train()
    started = time.monotonic()
    for step in range(steps):
        x, y = canvases(images, labels, batch, seed=1000 * size + step, size=size)
        loss = cross_entropy(model(prepared(x)), torch.from_numpy(y), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 200 == 0:
            print(
                f"{size}x{size} step {step + 1}/{steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def check() -> None:
    """Print the committed checkpoint's accuracy with its own attention and with uniform averaging."""
    model = digits_vit()
    model.load_state_dict(load_file(CHECKPOINT))
    print(
        f"{CHECKPOINT.name}: {CHECKPOINT.stat().st_size} bytes, {sum(p.numel() for p in model.parameters())} parameters"
    )
    print(f"softmax attention: {accuracy(model):.1%} of 2000 held-out canvases")
    with UniformAttention():
        print(f"uniform averaging: {accuracy(model):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="no training: evaluate the committed checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.check:
        torch.manual_seed(0)
        model = digits_vit(STAGES[0][0])
        for size, batch, steps, rate in STAGES:
            model.set_input_size((size, size))  # timm resamples the position embeddings
            train(model, size, batch, steps, rate)
            print(f"{size}x{size}: {accuracy(model, size=size):.1%} on held-out digits", flush=True)
        save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, CHECKPOINT)
    check()


if __name__ == "__main__":
    main()
