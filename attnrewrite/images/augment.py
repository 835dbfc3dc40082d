"""Images changed at random: what a student is shown beside the calibration images themselves."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from attnrewrite.images.dataset import Images, Pixels
from attnrewrite.images.preprocessing import Preprocessing, Size


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them mirrored; all moved by up to an eighth of their size, the edge repeated."""
    mirror = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(mirror[:, None, None, None], images.flip(3), images)
    reach = [size // 8 for size in images.shape[2:]]
    padded = nn.functional.pad(images, (reach[1], reach[1], reach[0], reach[0]), mode="replicate")
    rows, columns = (torch.randint(2 * r + 1, (len(images),), generator=generator).tolist() for r in reach)
    height, width = images.shape[2:]
    return torch.stack([p[:, i : i + height, j : j + width] for p, i, j in zip(padded, rows, columns, strict=True)])


def pasted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each with a part of another of them over the same place: a rectangle of the image's own form, which covers any
    share of it, all equally likely (Yun et al. 2019, CutMix, equation 2 with alpha 1).
    """
    others = images[torch.randperm(len(images), generator=generator)]
    sides = torch.rand(len(images), generator=generator).sqrt().tolist()
    found = images.clone()
    for image, other, side in zip(found, others, sides, strict=True):
        rows, columns = (_interval(size, side, generator) for size in image.shape[1:])
        image[:, rows, columns] = other[:, rows, columns]
    return found


def _interval(size: int, share: float, generator: torch.Generator) -> slice:
    """So large a `share` of `size` places next to each other, drawn at random."""
    length = int(size * share)
    start = int(torch.randint(size - length + 1, (), generator=generator))
    return slice(start, start + length)


def repeated(images: Images, order: np.ndarray) -> Images:
    """The images at `order` [n], each as it is where it comes first and moved wherever it comes again, otherwise each
    time. Nothing is read or copied until it is asked for.
    """
    times = np.zeros(len(images), np.int64)
    draws = np.empty(len(order), np.int64)
    for place, number in enumerate(order):
        draws[place] = times[number] * len(images) + number if times[number] else 0
        times[number] += 1
    return replace(images, x=Moved(images.x, order, draws), y=None if images.y is None else images.y[order])


@dataclass(frozen=True)
class Moved:
    """The images of `pixels` at `chosen` [n], moved as the seeds `draws` [n] have it; as they are, where that is 0."""

    pixels: Pixels
    chosen: np.ndarray
    draws: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def size(self) -> Size | None:
        return self.pixels.size

    def __getitem__(self, indices: np.ndarray) -> "Moved":
        return Moved(self.pixels, self.chosen[indices], self.draws[indices])

    def digest(self) -> str:
        how = self.chosen.tobytes() + self.draws.tobytes()
        return hashlib.blake2b(self.pixels.digest().encode() + how, digest_size=16).hexdigest()

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        self.pixels.check(preprocessing, size)

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Moved, np.ndarray]":
        pixels, whole = self.pixels[self.chosen].decoded(preprocessing, size)
        return Moved(pixels, np.arange(len(whole)), self.draws[whole]), whole

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        images = self.pixels[self.chosen].read(preprocessing, size)
        for number in self.draws.nonzero()[0]:
            generator = torch.Generator().manual_seed(int(self.draws[number]))
            images[number] = moved(images[number : number + 1], generator)[0]
        return images
