"""A program as a package that the interpreter has confirmed, in float32 first and then as it will be stored."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.coreml import compression, interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.coreml.interpreter import Interpretation
from attnrewrite.targets.coreml.labels import Probabilities, chosen_by
from attnrewrite.targets.limits import TYPES, require_compilable
from attnrewrite.targets.prepare import arrays, canonical, exact, specialise
from attnrewrite.targets.record import Compression, Labels

SHOWN = 5  # operators named in a note


@dataclass(frozen=True)
class Confirmed:
    """A float16 package, how far from the module it is as float32 and as it is, and what of it the engine can run.

    `wide` names the operators that compute in float32, as float16 cannot hold their values. Of a compressed package,
    `float16` is how far it is from itself in float32, with the weights that it has.
    """

    path: Path
    float32: check.Agreement
    float16: check.Agreement
    engine: EngineReport
    wide: tuple[str, ...] = ()
    compression: Compression | None = None

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
    compressed: str | None = None,
) -> Confirmed:
    """`program`, exported for the shapes of `inputs`, as a package in the folder `out`, made as `wanted`.

    Once it is confirmed, its weights are `compressed`, by a method of `compression.METHODS`.

    With labels, the numbers that these are chosen by are held against `expected`, not the probabilities, among which a
    wrong number may be lost.

    Raises:
        InputError: coremltools cannot convert the program, or the interpreter lacks an operator; both are named.
        CheckFailedError: a package does not give `expected`, the module's outputs for `inputs`, or a compressed one is
            another program.
    """
    if compressed is None:
        return _confirmed(subject, program, inputs, expected, out, wanted)
    made = _confirmed(subject, program, inputs, expected, out, replace(wanted, settled=True))
    smaller = compression.compress(made.path, compressed)
    stored = _loaded(made.path)
    found, wide = (answers(stored, inputs, wanted.labels, rounded=each)[1] for each in (True, False))
    relative = min(check.FLOAT16 * made.float16.sensitivity, check.MOST)
    own = check.agree(f"{subject}, compressed by {compressed}", found, wide, relative)
    return replace(made, float16=own, engine=lint(stored), compression=smaller)


def _confirmed(
    subject: str,
    program: ExportedProgram,
    inputs: tuple[Tensor, ...],
    expected: Sequence[np.ndarray],
    out: Path,
    wanted: package.Wanted,
) -> Confirmed:
    require_compilable(program, "Core ML", TYPES - {torch.bfloat16})
    prepared = canonical(_with_softmax(program, inputs) if wanted.labels and wanted.labels.softmax else program)
    agree = partial(
        _check, inputs=inputs, expected=expected, labels=wanted.labels, exact=partial(exact, program, inputs)
    )
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


def _with_softmax(program: ExportedProgram, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    return specialise(Probabilities(program.module()), inputs)


def answers(
    program: Any, inputs: tuple[Tensor, ...], labels: Labels | None, *, rounded: bool = True
) -> tuple[Interpretation, tuple[np.ndarray, ...]]:
    """What the interpreted program gives, and of this what the module gives too: with labels, what they are chosen by.

    Raises:
        InputError: the interpreter lacks an operator, which is named.
        CheckFailedError: the program does not answer with these labels and the softmax that they ask for.
    """
    feed = _feed(program, inputs)
    if labels is None:
        plain = interpreter.interpret(program, feed, rounded=rounded)
        return plain, arrays(tuple(plain.outputs.values()))
    name = chosen_by(program, labels)
    result = interpreter.interpret(program, feed, rounded=rounded, also=(name,))
    return result, arrays(result.outputs[name])


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
    labels: Labels | None,
    relative: float,
    exact: check.Exact,
) -> check.Agreement:
    """The interpreted program against the module's outputs."""
    result, found = answers(program, inputs, labels)
    try:
        return check.agree(subject, found, expected, relative, exact)
    except CheckFailedError as error:
        if not result.overflowed:
            raise
        raise CheckFailedError(f"{error}; float16 overflows first in {result.overflowed[0]!r}") from error
