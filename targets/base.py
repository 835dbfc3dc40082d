"""What a target is: something that lowers a module for one family of devices, and what it hands back.

A target is one class. Other packages register theirs with the entry-point group `attnrewrite.targets`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.plugins import Registry, Rules
from attnrewrite.targets.agreement import Agreement
from attnrewrite.targets.record import FILE, Compression, Decision, Labels, Port, ports, write_record

GROUP = "attnrewrite.targets"
BUILT_IN = {
    "host": "attnrewrite.targets.devices.host:Host",
    "arm-cpu": "attnrewrite.targets.devices.arm_cpu:ArmCpu",
    "gpu": "attnrewrite.targets.devices.mobile_gpu:Gpu",
    "coreml-npu": "attnrewrite.targets.devices.apple_npu:CoreMLNpu",
}


@dataclass(frozen=True)
class Availability:
    """Whether a target can build and measure on this machine: None where it can, else why not."""

    build: Refusal | None
    measure: Refusal | None


@dataclass(frozen=True)
class Artifact:
    """What `lower` emitted, and how it was checked against the module. None and empty fields: not known, or none.

    files: relative to the folder `path`; `size_bytes` is what all files below it take.
    max_abs_error: the largest difference to the module's own outputs on the example inputs, in the outputs' unit;
        `tolerance` is the most that was allowed, `check` says in words what was run to find out.
    schedule: what scheduled the operators; `operators` says what became of each value, where the schedules are ours.
    inputs, outputs: shapes and types.
    preprocessing: from a picture to an input; where the input is an image itself, only its size is left to do.
    labels: what the artifact answers with, where that is not numbers.
    compression: how its weights were made to take fewer bytes.
    measured: how the model and the artifact did on images, each an `Evaluation` as a dictionary.
    processor: what the code is for, in its compiler's words; `runtime` what loads it, packages by version.
    instructions: those of one call on one thread, counted by an emulator; `cycles` the compiler's estimate for them.
    precision: what products are computed in, where the target lets one choose.
    """

    model: str
    target: str
    path: Path
    files: tuple[str, ...]
    size_bytes: int
    max_abs_error: float
    tolerance: float
    check: str
    schedule: str
    notes: tuple[str, ...] = ()
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    operators: tuple[Decision, ...] = ()
    preprocessing: Preprocessing | None = None
    labels: Labels | None = None
    compression: Compression | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, str] = field(default_factory=dict)
    instructions: int | None = None
    cycles: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Estimate:
    """What a model of a device's costs says of an artifact: milliseconds for one call on `device`, and an interval.

    The interval held eight times in ten on model families that the costs were not fitted to; `ranking` is Spearman's
    correlation with true times there, `error` the median relative error. Where those are too bad for the time to be
    told, `trusted` is false, and it serves to put models in order alone.
    """

    device: str
    ms: float
    low: float
    high: float
    ranking: float
    error: float
    trusted: bool


@dataclass(frozen=True)
class Pricing:
    """How a target prices parts of a model where it cannot time them.

    `of` gives what a module costs on its inputs, in `unit`, and raises AttnRewriteError where the target cannot take
    the module; `how` says in words what is priced by what.
    """

    unit: str
    how: str
    of: Callable[[nn.Module, tuple[Tensor, ...]], float]


@dataclass(frozen=True)
class Run:
    """A module in one runtime of a target, ready to be timed, or the reason why it does not run here.

    call: runs it once; None where it cannot be called here, for `reason`.
    max_abs_error: the largest difference to the module's own outputs on the example inputs.
    note: what to know about how it was built.
    estimate, instructions, cycles: what is known of its cost where it does not run, as in `Artifact`.
    seconds: the calls that a device elsewhere has timed by its own clock; there is then no `call`, and nothing more to
        be timed.
    """

    runtime: str
    call: Callable[[], object] | None
    max_abs_error: float | None
    size_bytes: int | None
    reason: Refusal | None
    note: str = ""
    estimate: Estimate | None = None
    instructions: int | None = None
    cycles: int | None = None
    seconds: tuple[float, ...] = ()

    @classmethod
    def refused(cls, runtime: str, reason: Refusal) -> "Run":
        """What does not run here."""
        return cls(runtime, None, None, None, reason)


class Target:
    """A family of devices. Subclasses set `name` and `summary`; one with options is a frozen dataclass of them."""

    name: ClassVar[str]
    summary: ClassVar[str]
    has_answers: ClassVar[bool] = False  # whether an artifact is run here on more than what it is checked with
    answers_note: ClassVar[str] = ""  # what to know about how that is done

    @property
    def takes_pictures(self) -> bool:
        """Whether an artifact's input is an image: `lower` is then given a module of bytes (`targets.pictures`)."""
        return False

    def answers(
        self, artifact: Artifact, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """A call that gives for the model's inputs what the artifact made of `module` does: see `has_answers`."""
        raise NotImplementedError

    def lay_out(self, package: Path, out: Path) -> Artifact:
        """A package that is one already, made better for the target in the folder `out`, and checked against itself.

        Raises:
            InputError: the target has no such packages, or the package cannot be read.
        """
        raise InputError(f"target {self.name!r} lowers models, and {package} is a package of Core ML: give coreml-npu")

    def loses(self, runtime: str | None = None) -> Refusal | None:
        """What an artifact loses beyond rounding, so that it must be measured on images; None where it is nothing.

        Of a `runtime`: what a module loses in that one of the target's.
        """
        return None

    def require_answers(self, data: object | None) -> None:
        """Do nothing where there are `data` and an artifact can be run on them here, or none and it need not be.

        Raises:
            InputError: it cannot, or has to be.
        """
        if data is not None and not self.has_answers:
            raise self._lacks("data", [name for name, target in targets().items() if target.has_answers])
        if data is None and (loss := self.loses()) is not None:
            raise InputError(f"target {self.name!r} {loss}: give images to measure that on (--data)")

    def availability(self) -> Availability:
        """What this machine can do for the target. Cheap: it looks for packages and tools, and runs nothing."""
        raise NotImplementedError

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        """Lower `module` for the shapes of `example_inputs` into the existing empty folder `out`, and check the result.

        `threads` is how many the check may use, where it runs on this machine.

        Raises:
            InputError: the target cannot be built here, or the module holds an operator that it lacks.
            CheckFailedError: the result disagrees with the module.
        """
        raise NotImplementedError

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        """The module in every runtime of this target, ready to be timed on `threads` threads where this machine can."""
        raise NotImplementedError

    def estimate(self, artifact: Artifact) -> Estimate | None:
        """How long an artifact of this target takes, by a model of its device's costs; None where there is no model."""
        return None

    def pricing(self) -> Pricing | Refusal:
        """How parts of a model are priced where they cannot be timed, or why they are not. May fetch what it takes."""
        return Refusal("no-prices", f"target {self.name!r} has no model of its device's costs")

    def options(self) -> tuple[str, ...]:
        """The names of the options that this target has."""
        return tuple(each.name for each in fields(self)) if is_dataclass(self) else ()

    def configured(self, **given: Any) -> Self:
        """This target with options of its own; those given as None stay as they are.

        Raises:
            InputError: it has no such option, or the option no such value.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        for name in chosen:
            if name not in self.options():
                raise self._lacks(name, [each for each, target in targets().items() if name in target.options()])
        return replace(self, **chosen) if chosen else self  # type: ignore[type-var]

    def _lacks(self, option: str, having: Sequence[str]) -> InputError:
        lower_for = f", or lower for {' or '.join(having)}" if having else ""
        return InputError(f"target {self.name!r} has no --{option.replace('_', '-')}: leave it out{lower_for}")

    def require_build(self) -> None:
        """Do nothing where this machine can build for the target.

        Raises:
            InputError: it cannot; the message says why.
        """
        reason = self.availability().build
        if reason is not None:
            raise InputError(f"target {self.name!r} cannot be built here: {reason}")

    def artifact(
        self,
        name: str,
        out: Path,
        agreement: Agreement,
        *,
        check: str,
        schedule: str,
        inputs: Sequence[np.ndarray] = (),
        outputs: Sequence[np.ndarray] = (),
        **known: Any,
    ) -> Artifact:
        """The record of what lies in `out` once it has been checked on `inputs`, for which it gave `outputs`; it is
        written there, too. `known` are further fields of `Artifact`.
        """
        made = Artifact(
            model=name,
            target=self.name,
            path=out,
            files=(),
            size_bytes=0,
            max_abs_error=agreement.max_abs_error,
            tolerance=agreement.tolerance,
            check=check,
            schedule=schedule,
            inputs=ports(inputs),
            outputs=ports(outputs),
            **known,
        )
        return recorded(made, out)


def recorded(artifact: Artifact, folder: Path) -> Artifact:
    """The artifact with what lies in `folder`, artifact.json among it, which is written anew and lists the rest."""
    (folder / FILE).unlink(missing_ok=True)
    write_record(replace(artifact, files=_files(folder), size_bytes=size_bytes(folder)), folder)
    return replace(artifact, files=_files(folder), size_bytes=size_bytes(folder))


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir()))


def size_bytes(folder: Path) -> int:
    """The size of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _built_in() -> dict[str, type[Target]]:
    return {name: EntryPoint(name, value, GROUP).load() for name, value in BUILT_IN.items()}


def _try_out(target: Target) -> Refusal | None:
    able = target.availability()
    if isinstance(able, Availability) and all(isinstance(no, Refusal | None) for no in (able.build, able.measure)):
        return None
    return Refusal("availability-unreadable", "has an availability() that is not an Availability of None or Refusal")


REGISTRY = Registry(
    "target",
    GROUP,
    _built_in,
    Rules(base=Target, texts=("summary",), methods={Target: ("availability", "lower", "runs")}, try_out=_try_out),
)


def targets() -> dict[str, Target]:
    """Every known target by name: the built-in ones first, then those that installed packages register."""
    return {name: target() for name, target in REGISTRY.usable().items()}


def unusable() -> dict[str, str]:
    """What installed packages register by name and cannot be used, and why; a built-in target keeps its name."""
    return REGISTRY.unusable()


def get_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        InputError: the name is unknown, or the package that registers it is broken.
    """
    return REGISTRY.get(name)()
