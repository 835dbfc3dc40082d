"""A program as a package that the interpreter has confirmed, in float32 first and then as it will be stored."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.export import ExportedProgram

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.prepare import arrays, canonical


@dataclass(frozen=True)
class Confirmed:
    """A float16 package, how far from the module it is as float32 and as it is, and what of it the engine can run."""

    path: Path
    float32: check.Agreement
    float16: check.Agreement
    engine: EngineReport


def lower(
    subject: str,
    program: ExportedProgram,
    inputs: tuple[Tensor, ...],
    expected: Sequence[np.ndarray],
    out: Path,
    layout: str = "engine",
) -> Confirmed:
    """`program`, exported for the shapes of `inputs`, as a package in the folder `out`; `layout` as in `pipeline`.

    Raises:
        InputError: coremltools cannot convert the program, or the interpreter lacks an operator; both are named.
        CheckFailedError: a package does not give `expected`, the module's outputs for `inputs`.
    """
    prepared = canonical(program)
    with tempfile.TemporaryDirectory() as folder:
        # The same conversion without float16, whose rounding would hide a small mistake of the converter.
        wide = package.convert(prepared, Path(folder), "FLOAT32", layout)
        exact = _check(f"{subject} as float32", _loaded(wide), inputs, expected, check.FLOAT32)
    path = package.convert(prepared, out, "FLOAT16", layout)
    stored = _loaded(path)
    return Confirmed(path, exact, _check(subject, stored, inputs, expected, check.FLOAT16), lint(stored))


def _loaded(path: Path) -> Any:
    with package.quiet():
        return interpreter.load(path)


def _check(
    subject: str, program: Any, inputs: tuple[Tensor, ...], expected: Sequence[np.ndarray], relative: float
) -> check.Agreement:
    """The interpreted program against the module's outputs."""
    names = program.functions["main"].inputs
    result = interpreter.interpret(program, dict(zip(names, inputs, strict=True)))
    try:
        return check.agree(subject, arrays(tuple(result.outputs.values())), expected, relative)
    except CheckFailedError as error:
        if not result.overflowed:
            raise
        raise CheckFailedError(f"{error}; float16 overflows first in {result.overflowed[0]!r}") from error
