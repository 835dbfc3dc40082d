"""What a stage of calibration works on, how far the student is from the teacher, and the record of a stage."""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.calibration.answers import Answer, Answers
from attnrewrite.calibration.importance import Importance
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.resume import State
from attnrewrite.calibration.room import sized
from attnrewrite.images.pool import Pool
from attnrewrite.passes.spread import squared_norm
from attnrewrite.passes.verify import tensors
from attnrewrite.request import Execution


@dataclass(frozen=True)
class StageInput:
    """What a stage works on: the original, which distances are measured to; the teacher, the same with softmax
    re-emitted at the sites, which has their activations; the student; the images that are fitted to, and those held
    out, which only measure and choose what is kept; how the work is run, and by which processes. `importance` gives
    what each token of the teacher counts, for the images in batches; None: a fit finds it out.
    """

    original: GraphModule
    teacher: GraphModule
    student: GraphModule
    images: Pool
    held_out: Pool
    execution: Execution = field(default_factory=Execution)
    processes: Processes = field(default_factory=Processes)
    importance: Callable[[Pool], Importance] | None = None

    @cached_property
    def answers(self) -> Answers:
        """The original's answers to the held-out images, in batches that a forward pass has room for, with what comes
        out of it three times: the original's, the student's, and their difference.
        """

        def measure(*inputs: Tensor) -> object:
            made = tuple(tensors(self.original(*inputs)))
            return made, [each.clone() for each in (*made, *made)]

        device = self.processes.device
        held_out = sized(self.held_out, "measuring the model", torch.no_grad()(measure), self.execution, device)
        return Answers.of(self.original, held_out, self.execution, device, self.images.images.class_count)

    @property
    def answer(self) -> Answer:
        """What of the original's output counts."""
        return self.answers.answer

    @property
    def state(self) -> State:
        """The checkpoints of an interrupted run."""
        return State(self.execution.state)

    def report(self, what: str, done: int, total: int) -> None:
        """Progress, reported by the first process alone."""
        if self.processes.rank == 0:
            self.execution.report(what, done, total)


class Stage(Protocol):
    """One step of calibration, with its options as attributes."""

    @property
    def name(self) -> str: ...

    def run(self, given: StageInput, before: "Distance | None" = None) -> "StageResult":
        """Change the student in place, which is `before` from the original; None: that is measured.

        Raises:
            CheckFailedError: a fit or a loss is not finite; the message names the site.
        """


@dataclass(frozen=True)
class Distance:
    """How far the student's output is from the original's on the held-out images.

    `error` is the squared difference over the original's energy around its mean, of several outputs on average. `kl`
    (nats an image) and `agreement` (percent of images with the same highest logit) are None where there are no logits.
    """

    error: float
    kl: float | None
    agreement: float | None

    @property
    def loss(self) -> float:
        """What stages are held to: the divergence of the logits, or the error where the output is no logits."""
        return self.error if self.kl is None else self.kl


@dataclass(frozen=True)
class StageResult:
    """How far a stage left the student from the original, and remarks, a sentence each."""

    after: Distance
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageReport:
    """What a stage did.

    error, kl, agreement: the `Distance` on the held-out images, before and after.
    peak_memory: the process's so far, in bytes; `spilled`: the bytes that the stage wrote to temporary files.
    seconds: by the clock; `cpu_seconds`: on all processors together.
    notes: remarks, a sentence each.
    """

    name: str
    seconds: float
    error_before: float
    error_after: float
    kl_before: float | None
    kl_after: float | None
    agreement_before: float | None
    agreement_after: float | None
    peak_memory: int
    notes: tuple[str, ...] = ()
    spilled: int = 0
    cpu_seconds: float | None = None


def distance(given: StageInput) -> Distance:
    """How far the student is from the original on the held-out images."""
    answers, logits = given.answers, given.answer.logits
    squares = kl = 0.0
    agreed = 0
    for wanted, found in answers.beside(given.student):
        squares += squared_norm(found - wanted)
        if logits:
            kl += divergence(wanted.double(), found.double()) * len(wanted)
            agreed += int((wanted.argmax(1) == found.argmax(1)).sum())
    error = squares / max(answers.energy, torch.finfo(torch.float32).tiny)
    images = len(answers.pool.images)
    return Distance(error, kl / images, 100 * agreed / images) if logits else Distance(error, None, None)


def divergence(wanted: Tensor, found: Tensor) -> float:
    """The Kullback-Leibler divergence KL(wanted || found) of logits [images, classes], in nats an image."""
    gap = wanted.log_softmax(1) - found.log_softmax(1)
    return float((wanted.softmax(1) * gap).sum(1).mean())


def peak_memory() -> int:
    """The most memory this process has held, in bytes; on a GPU, the most that torch has held there."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
