"""Images as a model's inputs: in batches, at random, moved and mixed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.data import Images
from attnrewrite.preprocessing import Preprocessing, Size


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

    def batch(self, index: int) -> Tensor:
        """Batch `index`, float32 [batch_size, C, H, W]."""
        start = index * self.batch_size
        return self.draw(torch.arange(start, start + self.batch_size) % len(self.images))

    def draw(self, indices: Tensor) -> Tensor:
        """The images at `indices` [b], as float32 [b, C, H, W]."""
        return self.images.x[indices.numpy()].read(self.preprocessing, self.input_size)

    @torch.no_grad()
    def outputs(self, model: GraphModule, device: str) -> Tensor:
        """What `model` makes of every image, in float64, each image once where the output follows the batch."""
        found = []
        for index in range(len(self)):
            output = first_tensor(model(self.batch(index).to(device)))
            left = len(self.images) - index * self.batch_size
            found.append(output[:left] if output.shape[:1] == (self.batch_size,) else output)
        return torch.cat(found).double()


def first_tensor(output: object) -> Tensor:
    """The first tensor of a model's output: the logits, for a classifier."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output
    return first_tensor(next(iter(parts)))  # type: ignore[call-overload]


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them mirrored; all moved by up to an eighth of their size, the edge repeated."""
    mirror = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(mirror[:, None, None, None], images.flip(3), images)
    reach = [size // 8 for size in images.shape[2:]]
    padded = nn.functional.pad(images, (reach[1], reach[1], reach[0], reach[0]), mode="replicate")
    rows, columns = (torch.randint(2 * r + 1, (len(images),), generator=generator).tolist() for r in reach)
    height, width = images.shape[2:]
    return torch.stack([p[:, i : i + height, j : j + width] for p, i, j in zip(padded, rows, columns, strict=True)])


def mixed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them blended with another image of the batch, in a share drawn evenly (mixup)."""
    share = torch.rand(len(images), generator=generator)
    share = torch.where(torch.rand(len(images), generator=generator) < 0.5, share, torch.ones(())).reshape(-1, 1, 1, 1)
    return share * images + (1 - share) * images[torch.randperm(len(images), generator=generator)]
