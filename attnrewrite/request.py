"""What a conversion is asked for, as records: what it may lose, what to calibrate with, how to run.

The command line, a TOML file (--config) and Python build the same records. A field with an `Option` is an option of the
command line; how it is spelled and explained there stands beside it. A value out of range is refused when a record is
made, whoever makes it.
"""

import numbers
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnrewrite.errors import InputError, required, short, whole_number
from attnrewrite.resources import parse_bytes

MOST_IMAGES = MOST_STEPS = 10**9
MOST_SEED = 2**32 - 1  # what torch, and a multiple of it, and numpy take
MOST_THREADS = 1024  # beyond some thousands, OpenMP takes the process down
Progress = Callable[[str, int, int], None]  # what is being done, how many of it are done, of how many


def names(what: str, given: object) -> tuple[str, ...]:
    """Names, given as one text, as several, or as None for none. Raises InputError where they are no texts."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    return tuple(required(f"each of {what}", name, str) for name in required(what, given, Iterable))


def thread_count(given: object) -> int:
    """Raises InputError where it is no number of threads."""
    return whole_number("--threads", given, 1, MOST_THREADS)


@dataclass(frozen=True)
class Option:
    """A field as an option of the command line.

    `name` is the option's, where that is not the field's, and `flag` its spelling, where that does not follow from the
    name. `type` is what text is read as, where the field takes more than text can say.
    """

    help: str
    name: str | None = None
    flag: str | None = None
    type: Any = None
    metavar: str | None = None
    min: int | None = None
    show_default: bool | str = True


def option(default: Any, help: str, **how: Any) -> Any:
    """A dataclass field with a default that is an option of the command line, too."""
    return field(default=default, metadata={"option": Option(help, **how)})


@dataclass(frozen=True)
class Budget:
    """What `variant="auto"` may lose or spend, and what it chooses from.

    Either `max_drop`, in percentage points (between 0 and 100), or `max_latency`, a part of the original's time on
    `target` (above 0, at most 1). `candidates` are sets ("published", "all") or variants with their options
    ("masked:heads=1"); none: all.
    """

    max_drop: float | None = option(
        None,
        "Replace as much as can be for a loss of at most so many points of top-1 (of agreement with the original, if "
        "the images have no labels), with 95 % confidence.",
        metavar="POINTS",
    )
    max_latency: float | None = option(
        None,
        "Come down to this fraction of the original's time (such as 0.7) and change the output as little as possible.",
        metavar="RATIO",
    )
    target: str | None = option(
        None,
        "Target whose time is to be saved, measured if this machine can, else estimated (see attnrewrite targets).",
        flag="--for",
        metavar="TARGET",
    )
    candidates: tuple[str, ...] = option(
        (),
        "Forms to choose from: published (the five papers'), all, or a variant with its options (masked:heads=1); "
        "may be repeated. Softmax always is one.",
        type=list[str] | None,
        metavar="WHAT",
        show_default="all",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", names("--candidates", self.candidates))
        for what, ratio in (("--max-drop", self.max_drop), ("--max-latency", self.max_latency)):
            if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, numbers.Real)):
                raise InputError(f"{what} {short(ratio)} is no number")
        if self.max_drop is not None and not 0 < self.max_drop < 100:
            raise InputError(
                f"--max-drop {self.max_drop:g} must lie between 0 and 100: it is in percentage points, such as 0.5"
            )
        if self.max_latency is not None and not 0 < self.max_latency <= 1:
            raise InputError(
                f"--max-latency {self.max_latency:g} must lie above 0 and be at most 1: "
                "it is a part of the original's time"
            )


@dataclass(frozen=True)
class Calibration:
    """What to repair the accuracy with, and how far: `samples` of the `images`, and `steps` of gradient descent after
    the closed-form fit. Without images, weights are copied and nothing is repaired.

    `images` is whatever `load_images` takes: a folder, an .npz, an iterable of tensors. Labels are not fitted to.
    """

    images: Any = option(  # noqa: RUF009, it is a dataclasses.field
        None,
        "Images to repair the accuracy with, labels not needed: a folder, or an .npz with x; where the model takes "
        "something else, an .npz with an array for each input.",
        name="calibrate",
        type=str | None,
        metavar="DATA",
    )
    samples: int = option(1000, "Number of those images to use.", min=1)
    steps: int = option(
        0, "Gradient steps after the closed-form fit: so many for every two blocks, then for the whole.", min=0
    )
    skip_bad: bool = option(False, "Leave out damaged image files, and name them.", flag="--skip-bad")

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number("--samples", self.samples, 1, MOST_IMAGES))
        object.__setattr__(self, "steps", whole_number("--steps", self.steps, 0, MOST_STEPS))
        if self.steps and self.images is None:
            raise InputError(f"--steps {self.steps} distils on images, and none are given: add --calibrate DATA")


@dataclass(frozen=True)
class Execution:
    """How work is run: the seed of everything drawn at random, the number of CPU threads (None: as torch has it), who
    hears of progress, the folder that keeps what an interrupted run needs to go on (None: nothing is kept), and the
    bytes of memory that calibration stays within ("4GiB" is read; None: what is held and half of what is free).
    """

    seed: int = option(0, "Seed of all random draws.", min=0)
    threads: int | None = option(None, "CPU threads to use.", min=1, show_default="all")
    progress: Progress | None = None
    state: Path | None = None
    memory: Any = option(  # noqa: RUF009, it is a dataclasses.field
        None,
        "Memory that calibration stays within, such as 4GiB.",
        type=str | None,
        metavar="SIZE",
        show_default="half of what is free",
    )

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory))
        object.__setattr__(self, "seed", whole_number("--seed", self.seed, 0, MOST_SEED))
        if self.threads is not None:
            object.__setattr__(self, "threads", thread_count(self.threads))
        if self.progress is not None and not callable(self.progress):
            raise InputError(f"progress is to be a function of (what, done, total), not {short(self.progress)}")
        if self.state is not None:
            if not isinstance(self.state, str | os.PathLike):
                raise InputError(f"state is to be the path of a folder, not {short(self.state)}")
            object.__setattr__(self, "state", Path(self.state))

    def apply(self) -> None:
        """Seed torch, and set its number of threads where one is given."""
        import torch

        torch.manual_seed(self.seed)
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def report(self, what: str, done: int, total: int) -> None:
        """Tell whoever listens that `done` of `total` are done of `what`."""
        if self.progress is not None:
            self.progress(what, done, total)
