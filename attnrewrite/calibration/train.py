"""Gradient descent for the stages that distil: seeded batches, a learning rate that falls, and the best kept."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.resume import resume_key
from attnrewrite.calibration.room import sized
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.augment import moved, pasted
from attnrewrite.passes.verify import rewritten_sites

IMAGES = 256  # of a step, as many at a time as there is room for
WARM_UP = 0.1  # the share of the steps in which the learning rate rises
LARGEST_GRADIENT = 1.0
SAVE_EVERY = 20  # steps between checkpoints


@dataclass(frozen=True)
class Schedule:
    """`steps` of Adam, a batch each; the learning rate rises to `rate` over the first tenth of them and falls to zero
    along a cosine (Loshchilov and Hutter 2017, without restarts).
    """

    steps: int
    rate: float

    def rate_at(self, step: int) -> float:
        rise = max(1, round(WARM_UP * self.steps))
        if step < rise:
            return self.rate * (step + 1) / rise
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


# a batch of inputs -> losses to add up, by what they are of: each the mean of what it is of every image
Losses = Callable[[Tensor], Mapping[str, Tensor]]


class Best:
    """The tensors of the lowest held-out loss so far, the ones it started from included."""

    def __init__(self, given: StageInput) -> None:
        self.given, self.step = given, 0
        self.loss = distance(given).loss
        self.tensors = snapshot(given.student)

    def look(self, step: int) -> None:
        """Measure the student as it is after `step` steps."""
        loss = distance(self.given).loss
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.tensors = snapshot(self.given.student)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "step": self.step, "tensors": self.tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss, self.step, self.tensors = state["loss"], state["step"], state["tensors"]


def train(name: str, given: StageInput, losses: Losses, schedule: Schedule, every: int) -> Best:
    """Minimise the sum of `losses` over the calibration images; what was best, looked for every `every` steps.

    `losses` gets this process' share of each batch, as many images at a time as memory has room for; gradients are
    averaged. Every step draws its images from the seed and its own number alone, so that a run goes on from a
    checkpoint as if it had never stopped.

    Raises:
        CheckFailedError: a loss is not finite: the message names which.
        InputError: memory has no room for one image.
    """
    student, best = given.student, Best(given)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=schedule.rate)
    parts: dict[str, Any] = {"student": student, "optimizer": optimizer, "best": best}
    key = training_key(given, name, schedule)
    found = checkpoint(given, name, key) or {"step": 0}
    for part in parts.keys() & found.keys():
        parts[part].load_state_dict(found[part])
    at_once = _room_for_steps(name, given, losses, parameters)
    for step in range(found["step"], schedule.steps):
        optimizer.zero_grad()
        share = given.processes.part(draw(given, step))
        for images in share.split(at_once):
            _backward(name, given, losses, images, len(images) / max(1, len(share)))
        descend(optimizer, schedule.rate_at(step), given.processes)
        done = step + 1
        if done % every == 0 or done == schedule.steps:
            best.look(done)
        given.report(name, done, schedule.steps)
        if done % SAVE_EVERY == 0 or done == schedule.steps:
            state = {part: holder.state_dict() for part, holder in parts.items()}
            if given.processes.rank == 0:
                given.state.save(name, key, {"step": done, **state})
    return best


def _room_for_steps(name: str, given: StageInput, losses: Losses, parameters: Sequence[nn.Parameter]) -> int:
    """How many images there is room for at once beside the gradients, which are made here, and Adam's two moments."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    moments = 2 * sum(parameter.nbytes for parameter in parameters)
    one = partial(_backward, name, given, losses, share=1.0)
    return sized(given.images, name, one, given.execution, given.processes.device, moments).batch_size


def _backward(name: str, given: StageInput, losses: Losses, images: Tensor, share: float) -> None:
    """Add the gradients of the losses of `images`, which are so large a `share` of their batch."""
    with given.processes.autocast():
        found = losses(images.to(given.processes.device))
    check_losses(name, found, rewritten_sites(given.student))
    (torch.stack(list(found.values())).sum() * share).backward()  # type: ignore[no-untyped-call]


def descend(optimizer: torch.optim.Optimizer, rate: float, processes: Processes) -> None:
    """A step of `rate` down the mean of every process' gradients, which count as LARGEST_GRADIENT where longer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _average_gradients(parameters, processes)
    nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def training_key(given: StageInput, *options: object) -> str:
    """What a checkpoint has to have started from to be taken up: the student as it is, the images and the options."""
    how = (given.execution.seed, given.processes.size, given.images.batch_size)
    images = (given.images.digest, given.held_out.digest)
    return resume_key(given.student.state_dict().values(), *options, *how, *images)


def checkpoint(given: StageInput, name: str, key: str) -> dict[str, Any] | None:
    """What the first process has kept of this very training, if anything."""
    processes = given.processes
    return processes.from_owner(given.state.load(name, key) if processes.rank == 0 else None, 0)


def _average_gradients(parameters: Sequence[nn.Parameter], processes: Processes) -> None:
    """The mean of every process' gradients, where there are several."""
    if processes.size == 1:
        return
    used = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in used]) / processes.size
    processes.add_up(flat)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.reshape(parameter.shape)


def snapshot(student: nn.Module) -> dict[str, Tensor]:
    """A copy of every tensor of the student."""
    return {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}


def draw(given: StageInput, step: int) -> Tensor:
    """The images of a step, mirrored, moved and pasted over: the teacher answers for whatever it is shown. Where images
    are few, a student that sees nothing but them learns them by heart.
    """
    generator = torch.Generator().manual_seed(given.execution.seed * 1_000_003 + step)
    pool = given.images
    least = pool.batch_size * given.processes.size if pool.filled else 1  # every process has whole batches
    count = least * max(1, IMAGES // least)
    (images,) = pool.draw(torch.randint(len(pool.images), (count,), generator=generator))
    return pasted(moved(images, generator), generator)


def check_losses(name: str, losses: Mapping[str, Tensor], sites: Collection[str]) -> None:
    """Raise CheckFailedError where one of the losses is not finite, for the site of that name, if it is one's."""
    for what, loss in losses.items():
        if not bool(torch.isfinite(loss)):
            told = f"{name}: the loss at {what} is NaN or infinite; use fewer steps or other images"
            raise CheckFailedError(told, site=what if what in sites else None)
