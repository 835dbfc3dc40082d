"""Gradient descent for the stages that distil: seeded batches, a learning rate that falls, and the best kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnrewrite.calibrate_stage import Calibration
from attnrewrite.errors import CheckFailedError

WARM_UP = 0.1  # the share of the steps in which the learning rate rises
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Schedule:
    """`steps` of Adam on `batch` images each; the learning rate rises to `rate` and falls to zero along a cosine."""

    steps: int
    batch: int
    rate: float

    def rate_at(self, step: int) -> float:
        rise = max(1, round(WARM_UP * self.steps))
        if step < rise:
            return self.rate * (step + 1) / rise
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


Losses = Callable[[Tensor], Mapping[str, Tensor]]  # a batch of inputs -> losses to add up, by what they are of


def train(
    name: str,
    calibration: Calibration,
    parameters: Sequence[nn.Parameter],
    losses: Losses,
    schedule: Schedule,
    after_step: Callable[[int], bool] = lambda step: True,
) -> None:
    """Minimise the sum of `losses` over the calibration images. `after_step` is told of each and may end the training.

    Every step draws its images from the seed and its own number alone, so that a run can start anywhere.

    Raises:
        CheckFailedError: a loss is not finite: the message names which.
    """
    optimizer = torch.optim.Adam(parameters, lr=schedule.rate)
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        found = losses(draw(calibration, schedule.batch, step))
        _check_finite(name, found)
        optimizer.zero_grad()
        torch.stack(list(found.values())).sum().backward()
        nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        optimizer.step()
        calibration.report(name, step + 1, schedule.steps)
        if not after_step(step):
            break


def draw(calibration: Calibration, batch: int, step: int) -> Tensor:
    """The images of a step, mirrored, shifted and mixed in pairs: the teacher answers for whatever it is shown."""
    generator = torch.Generator().manual_seed(calibration.seed * 1_000_003 + step)
    count = len(calibration.images)
    images = calibration.images.draw(torch.randint(count, (batch,), generator=generator))
    return mixed(shifted(images, generator), generator)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
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


def _check_finite(name: str, losses: Mapping[str, Tensor]) -> None:
    for what, loss in losses.items():
        if not bool(torch.isfinite(loss)):
            raise CheckFailedError(f"{name}: the loss at {what} is NaN or infinite; use fewer steps or other images")
