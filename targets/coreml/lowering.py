"""A program as a package that the interpreter has confirmed, in float32 first and then as it will be stored."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.wide import Wide
from attnrewrite.targets import agreement as check
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.limits import TYPES, require_compilable
from attnrewrite.targets.prepare import arrays, canonical

SHOWN = 5  # operators named in a note


@dataclass(frozen=True)
class Confirmed:
    """A float16 package, how far from the module it is as float32 and as it is, and what of it the engine can run.

    `wide` names the operators that compute in float32, as float16 cannot hold their values.
    """

    path: Path
    float32: check.Agreement
    float16: check.Agreement
    engine: EngineReport
    wide: tuple[str, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """What to know about its precision; empty where it is all in float16 and as accurate as others are."""
        notes = []
        if self.wide:
            shown = ", ".join(self.wide[:SHOWN]) + (", ..." if len(self.wide) > SHOWN else "")
            notes.append(f"{len(self.wide)} operators stay in float32, float16 cannot hold their values: {shown}")
        if self.float16.sensitivity > 1:
            notes.append(f"rounding costs this model {self.float16.sensitivity:.1f} times what it costs others")
        return tuple(notes)


def lower(
    subject: str,
    program: ExportedProgram,
    inputs: tuple[Tensor, ...],
    expected: Sequence[np.ndarray],
    out: Path,
    wanted: package.Wanted = package.DEFAULT,
) -> Confirmed:
    """`program`, exported for the shapes of `inputs`, as a package in the folder `out`, made as `wanted`.

    Raises:
        InputError: coremltools cannot convert the program, or the interpreter lacks an operator; both are named.
        CheckFailedError: a package does not give `expected`, the module's outputs for `inputs`.
    """
    require_compilable(program, "Core ML", TYPES - {torch.bfloat16})
    prepared = canonical(program)
    agree = partial(_check, inputs=inputs, expected=expected, exact=lambda: arrays(_exact(program, inputs)))
    with tempfile.TemporaryDirectory() as folder:
        # The same conversion without float16, whose rounding would hide a small mistake of the converter.
        whole = _loaded(package.convert(prepared, Path(folder), "FLOAT32", wanted))
    float32 = agree(f"{subject} as float32", whole, relative=check.FLOAT32)
    path = package.convert(prepared, out, "FLOAT16", wanted)
    stored = _loaded(path)
    try:
        return Confirmed(path, float32, agree(subject, stored, relative=check.FLOAT16), lint(stored))
    except CheckFailedError:
        wide = interpreter.beyond_half(whole, _feed(whole, inputs))
        if not wide:
            raise
    path = package.convert(prepared, out, "FLOAT16", wanted, wide)
    stored = _loaded(path)
    return Confirmed(path, float32, agree(subject, stored, relative=check.FLOAT16), lint(stored), wide)


def _exact(program: ExportedProgram, inputs: tuple[Tensor, ...]) -> Any:
    """What the program gives in float64."""
    module = program.module()
    assert isinstance(module, GraphModule)
    return Wide(module).run(*inputs)


def _feed(program: Any, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(program.functions["main"].inputs, inputs, strict=True))


def _loaded(path: Path) -> Any:
    with package.quiet():
        return interpreter.load(path)


def _check(
    subject: str,
    program: Any,
    inputs: tuple[Tensor, ...],
    expected: Sequence[np.ndarray],
    relative: float,
    exact: check.Exact,
) -> check.Agreement:
    """The interpreted program against the module's outputs."""
    result = interpreter.interpret(program, _feed(program, inputs))
    try:
        return check.agree(subject, arrays(tuple(result.outputs.values())), expected, relative, exact)
    except CheckFailedError as error:
        if not result.overflowed:
            raise
        raise CheckFailedError(f"{error}; float16 overflows first in {result.overflowed[0]!r}") from error
