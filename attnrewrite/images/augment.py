"""Images moved at random: what a student is shown beside the calibration images themselves."""

import torch
from torch import Tensor, nn


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them mirrored; all moved by up to an eighth of their size, the edge repeated."""
    mirror = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(mirror[:, None, None, None], images.flip(3), images)
    reach = [size // 8 for size in images.shape[2:]]
    padded = nn.functional.pad(images, (reach[1], reach[1], reach[0], reach[0]), mode="replicate")
    rows, columns = (torch.randint(2 * r + 1, (len(images),), generator=generator).tolist() for r in reach)
    height, width = images.shape[2:]
    return torch.stack([p[:, i : i + height, j : j + width] for p, i, j in zip(padded, rows, columns, strict=True)])
