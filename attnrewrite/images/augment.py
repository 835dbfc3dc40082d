"""Images changed at random: what a student is shown beside the calibration images themselves."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attnrewrite.images.dataset import Images, Pixels
from attnrewrite.images.preprocessing import Preprocessing, Size, is_channels_last


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, C, H, W] or [B, H, W, C], of any type, half of them mirrored; all moved by up to an eighth of their
    size, the edge repeated.
    """
    if is_channels_last(images.shape):
        return moved(images.permute(0, 3, 1, 2), generator).permute(0, 2, 3, 1)
    mirror = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(mirror[:, None, None, None], images.flip(3), images)
    rows, columns = (_shifts(size, len(images), generator) for size in images.shape[2:])
    return torch.stack([image[:, i][:, :, j] for image, i, j in zip(images, rows, columns, strict=True)])


def _shifts(size: int, count: int, generator: torch.Generator) -> Tensor:
    """For each of `count` images, which of `size` places each place shows: [count, size]."""
    reach = size // 8
    shifts = torch.randint(2 * reach + 1, (count,), generator=generator) - reach
    return (torch.arange(size) + shifts[:, None]).clamp(0, size - 1)


def pasted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each with a part of another of them over the same place: a rectangle of the image's own form, which covers any
    share of it, all equally likely (Yun et al. 2019, CutMix, equation 2 with alpha 1). [B, C, H, W] or [B, H, W, C].
    """
    others = images[torch.randperm(len(images), generator=generator)]
    return _pasted(images, others, generator)


def _pasted(images: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
    if is_channels_last(images.shape):
        return _pasted(images.permute(0, 3, 1, 2), others.permute(0, 3, 1, 2), generator).permute(0, 2, 3, 1)
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


def repeated(images: Images, parts: Sequence[tuple[int, int]]) -> Images:
    """Part by part, of which each is so many images, so many times: as they are, and every further time moved and each
    with a part of another of them over it, otherwise each time. Nothing is read or copied until it is asked for.
    """
    chosen, others, draws = [], [], []
    first = 0
    for count, times in parts:
        numbers = np.arange(first, first + count)
        first += count
        for time in range(times):
            chosen.append(numbers)
            others.append(np.random.default_rng(time).permutation(numbers) if time else numbers)
            draws.append(numbers + time * len(images) if time else 0 * numbers)
    order = np.concatenate(chosen)
    varied = Varied(images.x, order, np.concatenate(others), np.concatenate(draws))
    return replace(images, x=varied, y=None if images.y is None else images.y[order])


@dataclass(frozen=True)
class Varied:
    """The images of `pixels` at `chosen` [n]: as they are where `draws` [n] is 0, else moved and with a part of the one
    at `others` [n] over them, as that seed has it.
    """

    pixels: Pixels
    chosen: np.ndarray
    others: np.ndarray
    draws: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def size(self) -> Size | None:
        return self.pixels.size

    def __getitem__(self, indices: np.ndarray) -> "Varied":
        return Varied(self.pixels, self.chosen[indices], self.others[indices], self.draws[indices])

    def digest(self) -> str:
        how = self.chosen.tobytes() + self.others.tobytes() + self.draws.tobytes()
        return hashlib.blake2b(self.pixels.digest().encode() + how, digest_size=16).hexdigest()

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        self.pixels.check(preprocessing, size)

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Varied, np.ndarray]":
        pixels, whole = self.pixels.decoded(preprocessing, size)
        places = np.full(len(self.pixels), -1)
        places[whole] = np.arange(len(whole))
        chosen, others = places[self.chosen], places[self.others]
        left = np.flatnonzero((chosen >= 0) & (others >= 0))
        return Varied(pixels, chosen[left], others[left], self.draws[left]), left

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        images = self.pixels[self.chosen].read(preprocessing, size)
        changed = self.draws.nonzero()[0]
        if len(changed):
            others = self.pixels[self.others[changed]].read(preprocessing, size)
            for number, other in zip(changed, others, strict=True):
                generator = torch.Generator().manual_seed(int(self.draws[number]))
                own = moved(images[number : number + 1], generator)
                images[number] = _pasted(own, other[None], generator)[0]
        return images
