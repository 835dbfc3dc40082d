"""Train the demo's ViT from nothing, offline, on one thread, and say what its attention is worth.

    python examples/train_digits_vit.py            # trains, then rewrites examples/digits_vit.safetensors
    python examples/train_digits_vit.py --check    # test accuracy of the committed checkpoint, softmax and uniform

Most patches of a canvas are empty. The first stage reads the inked ones and a few others alone, which is fast; the
second reads every patch.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from digits import CANVAS, CHECKPOINT, MEAN, PATCH, STD, canvases, digits_vit, strokes, trained_digits_vit
from safetensors.torch import save_file
from scipy.ndimage import affine_transform
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

GRID = CANVAS // PATCH
STAGES = ((40, 96, 1500, 2e-3), (GRID * GRID, 32, 300, 7e-4))  # patches that are read, batch, steps, peak rate
COPIES = 8  # of every digit, each turned, sheared and scaled a little differently
COUNT = 2000  # canvases that an accuracy is taken on


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
def place_patches(model: Any) -> None:
    """Start the position embeddings from sines and cosines of row and column."""
    from timm.layers import build_sincos2d_pos_embed

    width = model.pos_embed.shape[-1]
    places = build_sincos2d_pos_embed((GRID, GRID), width, temperature=100.0)
    model.pos_embed[:, 1:].copy_(0.3 * places.reshape(1, GRID * GRID, width))


def read_inked(model: Any, x: Tensor, count: int) -> Tensor:
    """Logits [B, 10] from `count` patches of x [B, 1, CANVAS, CANVAS]: the inked ones first, then any."""
    patches = model.patch_embed.proj(x).flatten(2).transpose(1, 2) + model.pos_embed[:, 1:]
    if count < GRID * GRID:
        inked = max_pool2d(x, PATCH).flatten(1) > -MEAN / STD
        chosen = (inked + torch.rand(inked.shape)).topk(count, 1).indices
        patches = patches.gather(1, chosen.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
    prefix = (model.cls_token + model.pos_embed[:, :1]).expand(len(patches), -1, -1)
    return model.forward_head(model.norm(model.blocks(torch.cat([prefix, patches], dim=1))))


@torch.no_grad()
def accuracy(model: nn.Module, count: int | None = None) -> float:
    """Share of `count` (COUNT) canvases of held-out digits that the model reads correctly."""
    model.eval()
    canvas, labels = canvases(*strokes(held_out=True), count or COUNT, seed=2)
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


def train(model: nn.Module, patches: int, batch: int, steps: int, rate: float, seed: int) -> None:
    """One stage: `steps` of AdamW with a one-cycle rate, on fresh canvases at every step."""
    images, labels = augmented(*strokes(held_out=False))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    model.train()
    started = time.monotonic()
    for step in range(steps):
        x, y = canvases(images, labels, batch, seed=seed + step)
        loss = cross_entropy(read_inked(model, prepared(x), patches), torch.from_numpy(y), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            print(f"{patches} patches, step {step + 1}/{steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


def check() -> None:
    """Print the committed checkpoint's accuracy with its own attention and with uniform averaging."""
    model = trained_digits_vit()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{CHECKPOINT.name}: {CHECKPOINT.stat().st_size} bytes, {parameters} parameters")
    print(f"softmax attention: {accuracy(model):.1%} of {COUNT} held-out canvases")
    with UniformAttention():
        print(f"uniform averaging: {accuracy(model):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="no training: evaluate the committed checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.check:
        torch.manual_seed(0)
        model = digits_vit()
        place_patches(model)
        for stage, (patches, batch, steps, rate) in enumerate(STAGES):
            train(model, patches, batch, steps, rate, seed=100_000 * stage)
        save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, CHECKPOINT)
    check()


if __name__ == "__main__":
    main()
