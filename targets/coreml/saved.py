"""A saved package laid out for the engine: its own program through our passes, held to itself on drawn inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets import agreement as check
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.coreml.pipeline import coreml_pipeline
from attnrewrite.targets.prepare import arrays

SCALES = (1.0, 0.1, 4.0)  # of the numbers of each draw
MOST_DRAWN = 4  # of integers, which may number classes or places


@dataclass(frozen=True)
class LaidOut:
    """The package at `path`, and what its program gives for the first of the drawn `inputs`.

    `float32` and `float16` are how far it is from the package before, at most, without rounding and with it; `before`
    and `after` what of each stays on the engine.
    """

    path: Path
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    float32: check.Agreement
    float16: check.Agreement
    before: EngineReport
    after: EngineReport


def lay_out(source: Path, out: Path, layout: str) -> LaidOut:
    """The package `source` through the passes of a layout of `pipeline.LAYOUTS`, into the folder `out`.

    Raises:
        InputError: it cannot be read, is for older systems, or holds what would be lost: inputs that are images or of
            several shapes, names of classes, states, compressed weights.
        CheckFailedError: the package does not give what it gave before.
    """
    with package.quiet():
        program = interpreter.load(source)
        _require_plain(source, program)
        before = lint(program)
        path = _through_passes(source, program, layout, out)
        # The passes have changed the program that they were given.
        one, other = interpreter.load(source), interpreter.load(path)
    draws = [_drawn(one, number) for number in range(len(SCALES))]
    whole, stored = [], []
    for feed in draws:
        wide, narrow = (_given(one, feed, rounded) for rounded in (False, True))
        whole.append(check.agree(str(source), _given(other, feed, False), wide, check.FLOAT32))
        # As far from its own values without rounding as the package before was, twice, or as float16 explains.
        relative = max(check.FLOAT16, min(2 * _share(narrow, wide), check.MOST))
        stored.append(check.agree(str(source), _given(other, feed, True), wide, relative))
    float32, float16 = (max(each, key=lambda one: one.max_abs_error / one.tolerance) for each in (whole, stored))
    inputs, outputs = arrays(tuple(draws[0].values())), _given(other, draws[0], True)
    return LaidOut(path, inputs, outputs, float32, float16, before, lint(other))


def _require_plain(source: Path, program: Any) -> None:
    import coremltools as ct

    model = ct.models.MLModel(str(source), skip_model_load=True)
    description, main = model.get_spec().description, program.functions["main"]
    kinds = {each.type.WhichOneof("Type") for each in description.input} - {"multiArrayType"}
    targets = {getattr(ct.target, name) for name in package.MINIMUMS}
    open_shapes = {each.type.multiArrayType.WhichOneof("ShapeFlexibility") for each in description.input} - {None}
    found = (
        (len(program.functions) > 1, "has several functions"),
        (main.opset_version not in targets, f"is for systems before {package.MINIMUMS[0]}"),
        (bool(kinds), f"takes what is no array ({', '.join(sorted(map(str, kinds)))})"),
        (bool(description.predictedFeatureName), "answers with names of classes"),
        (bool(getattr(description, "state", ())), "keeps a state"),
        (bool(open_shapes), "takes several shapes"),
        (not all(isinstance(size, int) for each in main.inputs.values() for size in each.shape), "has open shapes"),
        (any(each.op_type.startswith("constexpr_") for each in main.operations), "has compressed weights"),
    )
    why = next((reason for holds, reason in found if holds), None)
    if why is not None:
        raise InputError(
            f"{source} {why}, which laying it out anew would lose: lower the model that it was made of, or run "
            "attnrewrite.passes.coreml_pipeline() in its own ct.convert"
        )


def _through_passes(source: Path, program: Any, layout: str, out: Path) -> Path:
    import coremltools as ct

    path, before = out / package.NAME, ct.models.MLModel(str(source), skip_model_load=True)
    try:
        made = ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            minimum_deployment_target=program.functions["main"].opset_version,
            compute_precision=ct.precision.FLOAT32,  # each operator keeps the type that it has
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            pass_pipeline=coreml_pipeline(layout),
            skip_model_load=True,
        )
        for key, value in before.user_defined_metadata.items():
            made.user_defined_metadata[key] = value
        made.short_description, made.author, made.license = before.short_description, before.author, before.license
        made.user_defined_metadata["attnrewrite.layout"] = layout
        made.save(str(path))
    except Exception as error:  # coremltools raises what its parts raise
        package.require_written(error, out)
        raise InputError(f"coremltools cannot write {source} anew: {first_line(error)}") from error
    return path


def _drawn(program: Any, number: int) -> dict[str, Tensor]:
    """Inputs of the program's shapes and types: numbers of both signs, and small integers."""
    from coremltools.converters.mil.mil import types

    generator = torch.Generator().manual_seed(number)

    def values(variable: Any) -> Tensor:
        shape = tuple(map(int, variable.shape))
        if types.is_float(variable.dtype):
            return torch.randn(shape, generator=generator) * SCALES[number]
        return torch.randint(0, MOST_DRAWN, shape, generator=generator, dtype=torch.int32)

    return {name: values(variable) for name, variable in program.functions["main"].inputs.items()}


def _given(program: Any, feed: Mapping[str, Tensor], rounded: bool) -> tuple[np.ndarray, ...]:
    return arrays(tuple(interpreter.interpret(program, feed, rounded=rounded).outputs.values()))


def _share(rounded: tuple[np.ndarray, ...], exact: tuple[np.ndarray, ...]) -> float:
    """What rounding moves an output by at most, of its largest value."""
    moved = [np.abs(one - other).max(initial=0.0) for one, other in zip(rounded, exact, strict=True)]
    largest = [np.abs(other).max(initial=0.0) or 1.0 for other in exact]
    return max((float(each / most) for each, most in zip(moved, largest, strict=True)), default=0.0)
