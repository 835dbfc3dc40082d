"""Images as a model's inputs: in batches of one size, in order or drawn at random."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.images.dataset import Images
from attnrewrite.images.preprocessing import Preprocessing, Size


@dataclass(frozen=True)
class Pool:
    """Images as the model's inputs, in batches of exactly `batch_size`: the last one is filled up from the first."""

    images: Images
    preprocessing: Preprocessing | None
    input_size: Size
    batch_size: int

    def __len__(self) -> int:
        """How many batches there are."""
        return -(-len(self.images) // self.batch_size)

    @cached_property
    def digest(self) -> str:
        """A hash of the images, their labels and order, and of how they are read and batched."""
        how = (self.preprocessing, self.input_size, self.batch_size)
        return hashlib.blake2b(f"{self.images.digest()} {how}".encode(), digest_size=16).hexdigest()

    def take(self, indices: np.ndarray) -> "Pool":
        """The images at `indices` [n] alone, in that order."""
        return replace(self, images=self.images.take(indices))

    def batch(self, index: int) -> Tensor:
        """Batch `index`, float32 [batch_size, C, H, W]."""
        start = index * self.batch_size
        return self.draw(torch.arange(start, start + self.batch_size) % len(self.images))

    def draw(self, indices: Tensor) -> Tensor:
        """The images at `indices` [b], as float32 [b, C, H, W]."""
        return self.images.x[indices.numpy()].read(self.preprocessing, self.input_size)

    @torch.no_grad()
    def outputs(self, model: GraphModule, device: str) -> Tensor:
        """What `model` makes of every image, float64 [images, ...]."""
        return self.joined(first_tensor(model(self.batch(index).to(device))) for index in range(len(self)))

    def joined(self, outputs: Iterable[Tensor]) -> Tensor:
        """The outputs of every batch in order as one tensor, in float64: each image once, without those that filled up
        the last batch, where the output's first axis is the batch's.
        """
        found = []
        for index, output in enumerate(outputs):
            left = len(self.images) - index * self.batch_size
            found.append(output[:left] if output.shape[:1] == (self.batch_size,) else output)
        return torch.cat(found).double()


def first_tensor(output: object) -> Tensor:
    """The first tensor of a model's output: the logits, for a classifier."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output
    return first_tensor(next(iter(parts)))  # type: ignore[call-overload]
