"""Images as a model's inputs: in batches of one size, in order or drawn at random."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.images.dataset import Images
from attnrewrite.images.model_inputs import ModelInputs
from attnrewrite.images.preprocessing import Preprocessing, Size


@dataclass(frozen=True)
class Pool:
    """Images as the model's inputs, in batches of `batch_size`. The last batch is shorter, or `filled` up from the
    first images, for a model that takes one batch size only. No batch reaches over the number of an image in `parts`.
    So many of the images are `copies` of others among them, changed.
    """

    images: Images
    preprocessing: Preprocessing | None
    input_size: Size
    batch_size: int
    filled: bool = False
    parts: tuple[int, ...] = ()
    copies: int = 0

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self.bounds)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first image of each batch, and the one after its last."""
        edges = (0, *self.parts, len(self.images))
        return tuple(
            (start, min(start + self.batch_size, last))
            for first, last in pairwise(edges)
            for start in range(first, last, self.batch_size)
        )

    def size_of(self, index: int) -> int:
        """How many images batch `index` holds, with those that fill it up."""
        start, stop = self.bounds[index]
        return self.batch_size if self.filled else stop - start

    @property
    def pictures(self) -> bool:
        """Whether they can be moved and pasted over each other."""
        return not isinstance(self.images.x, ModelInputs)

    @cached_property
    def digest(self) -> str:
        """A hash of the images, their labels and order, and of how they are read. Batches change nothing."""
        how = (self.preprocessing, self.input_size)
        return hashlib.blake2b(f"{self.images.digest()} {how}".encode(), digest_size=16).hexdigest()

    def take(self, indices: np.ndarray) -> "Pool":
        """The images at `indices` [n] alone, in that order."""
        return replace(self, images=self.images.take(indices), parts=(), copies=0)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """The inputs of batch `index`: float32 [batch_size, C, H, W], of a model that takes pictures."""
        start, stop = self.bounds[index]
        numbers = torch.arange(start, start + self.size_of(index))
        return self.draw(torch.where(numbers < stop, numbers, (numbers - stop) % len(self.images)))

    def draw(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The inputs for the images at `indices` [b]."""
        chosen = self.images.x[indices.numpy()]
        return chosen.values if isinstance(chosen, ModelInputs) else (chosen.read(self.preprocessing, self.input_size),)

    @torch.no_grad()
    def outputs(self, model: GraphModule, device: str) -> Tensor:
        """What `model` makes of every image, float64 [images, ...]."""
        batches = (self.batch(index) for index in range(len(self)))
        return self.joined(first_tensor(model(*(each.to(device) for each in inputs))) for inputs in batches)

    def joined(self, outputs: Iterable[Tensor]) -> Tensor:
        """The outputs of every batch in order as one tensor, in float64: each image once."""
        numbered = zip(range(len(self)), outputs, strict=True)
        return torch.cat([self.own(index, output) for index, output in numbered]).double()

    def own(self, index: int, output: Tensor) -> Tensor:
        """An output of batch `index` without the images that filled it up, where its first axis is the batch's."""
        start, stop = self.bounds[index]
        return output[: stop - start] if output.shape[:1] == (self.size_of(index),) else output


def first_tensor(output: object) -> Tensor:
    """The first tensor of a model's output: the logits, for a classifier."""
    return next(_tensors_of(output))


def _tensors_of(output: object) -> Iterator[Tensor]:
    """The tensors of a model's output in order, in whatever sequences and mappings; what else it gives is left out."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | Sequence) and not isinstance(output, str):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors_of(part)
