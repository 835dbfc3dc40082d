"""What a target is: something that lowers a module for one family of devices, and what it hands back.

A target is one class. The built-in ones and those of the entry point group `attnrewrite.targets` are found alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.targets.agreement import Agreement

GROUP = "attnrewrite.targets"
BUILT_IN = {
    "host": "attnrewrite.targets.devices.host:Host",
    "arm-cpu": "attnrewrite.targets.devices.arm_cpu:ArmCpu",
    "gpu": "attnrewrite.targets.devices.mobile_gpu:Gpu",
    "coreml-npu": "attnrewrite.targets.devices.apple_npu:CoreMLNpu",
}


@dataclass(frozen=True)
class Availability:
    """Whether a target can build and measure on this machine: None where it can, else one sentence: why not."""

    build: str | None
    measure: str | None


@dataclass(frozen=True)
class Artifact:
    """What `lower` emitted, and how it was checked against the module.

    `files` are relative to `path`. `max_abs_error` is the largest difference to the module's own outputs on the example
    inputs, `tolerance` the most that was allowed; `check` says in words what was run to find out.
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


@dataclass(frozen=True)
class Run:
    """A module in one runtime of a target. `call` runs it once; None where it cannot run here, for `reason`.

    `note` is what to know about how it was built.
    """

    runtime: str
    call: Callable[[], object] | None
    max_abs_error: float | None
    size_bytes: int | None
    reason: str | None
    note: str = ""


class Target:
    """A family of devices. Subclasses set `name` and `summary`; instances hold no state."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def availability(self) -> Availability:
        """What this machine can do for the target. Cheap: it looks for packages and tools, and runs nothing."""
        raise NotImplementedError

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        """Lower `module` for the shapes of `example_inputs` into the existing empty folder `out`, and check the result.

        Raises InputError where the target cannot be built here or the module holds an operator that it lacks, and
        CheckFailedError where the result disagrees with the module.
        """
        raise NotImplementedError

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        """The module in every runtime of this target, ready to be timed where this machine can."""
        raise NotImplementedError

    def require_build(self) -> None:
        """Raise InputError with the reason where this machine cannot build for the target."""
        reason = self.availability().build
        if reason is not None:
            raise InputError(f"target {self.name!r} cannot be built here: {reason}")

    def artifact(
        self, name: str, out: Path, agreement: Agreement, *, check: str, schedule: str, notes: tuple[str, ...] = ()
    ) -> Artifact:
        """The record of what lies in `out` once it has been checked."""
        return Artifact(
            model=name,
            target=self.name,
            path=out,
            files=tuple(sorted(entry.name for entry in out.iterdir())),
            size_bytes=size_bytes(out),
            max_abs_error=agreement.max_abs_error,
            tolerance=agreement.tolerance,
            check=check,
            schedule=schedule,
            notes=notes,
        )


def size_bytes(folder: Path) -> int:
    """The size of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def targets() -> dict[str, Target]:
    """Every known target by name: the built-in ones, and those that installed packages add or put in their place."""
    return {name: _load(point) for name, point in _points().items()}


def get_target(name: str) -> Target:
    """The target called `name`; InputError with the nearest name where there is none."""
    points = _points()
    if name not in points:
        raise unknown_name("target", name, points)
    return _load(points[name])


def _points() -> dict[str, EntryPoint]:
    built_in = [EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()]
    return {point.name: point for point in (*built_in, *entry_points(group=GROUP))}


def _load(point: EntryPoint) -> Target:
    try:
        return point.load()()  # type: ignore[no-any-return]
    except Exception as error:
        raise InputError(
            f"target plug-in {point.name!r} ({point.value}) cannot be loaded ({error}): fix it or uninstall its package"
        ) from error
