"""Runs a Core ML package operator by operator in torch, as Core ML itself predicts on a Mac or iPhone only.

    program = load(Path("model.mlpackage"))
    interpret(program, {"x": image}).outputs       # in the precision that the program declares
    print(diagnose(program, {"x": image}).worst)   # where float16 costs most, and what it costs in the end

Every operator is computed in float32 and its result rounded to the type that the program declares for it, so that
float16 storage and its overflows are seen. How a device accumulates inside an operator is not: it may round more. A
program that coremltools holds in memory (`ct.convert(..., convert_to="milinternal")`) is taken as well.
"""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.coreml.operators import arithmetic, compressed, indexing, movement, recurrent
from attnrewrite.targets.coreml.operators.arithmetic import DTYPES

SMALLEST_NORMAL = 2.0**-14  # of float16
LARGEST_SAFE = 2.0**15  # half of float16's largest: other images reach further than the example
_EXACT = 80.0  # dB: what rounding a value to float16 leaves is some 75
OPERATORS = {
    kind: operator
    for part in (arithmetic, movement, indexing, recurrent, compressed)
    for kind, operator in part.OPERATORS.items()
}


@dataclass(frozen=True)
class Interpretation:
    """The outputs of a program by name, and the operators whose finite results became infinite in float16."""

    outputs: Mapping[str, Tensor]
    overflowed: tuple[str, ...]


@dataclass(frozen=True)
class OperatorError:
    """One operator in the declared precision against float32. `snr` is in dB, of what has gathered up to it.

    `loss` is how far its snr lies below that of its worst operand; `denormal` the share of its values, from 0 to 1,
    that are not zero and below float16's smallest normal number, where devices flush to zero.
    """

    name: str
    kind: str
    snr: float
    loss: float
    max_abs_error: float
    overflowed: bool
    denormal: float


@dataclass(frozen=True)
class Diagnosis:
    """What the declared precision costs. `snr` (dB) and `argmax` (the share of rows that agree) are by output."""

    operators: tuple[OperatorError, ...]
    snr: Mapping[str, float]
    argmax: Mapping[str, float]

    @property
    def worst(self) -> OperatorError | None:
        """The first operator that overflows, else the one that loses most; None where nothing is computed."""
        overflows = (each for each in self.operators if each.overflowed)
        return next(overflows, None) or max(self.operators, key=lambda each: each.loss, default=None)


def load(package: Path) -> Any:
    """The program inside a saved `.mlpackage`.

    Raises:
        InputError: coremltools cannot read it: it is damaged, or holds no program; or it reaches out of its folder.
    """
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load as load_program

    _require_of_its_own(package)
    try:
        model = ct.models.MLModel(str(package), skip_model_load=True)
        spec = model.get_spec()
        held = spec.WhichOneof("Type")
        program = None if held != "mlProgram" else load_program(spec, spec.specificationVersion, model.weights_dir)
    except Exception as error:  # coremltools raises what its parts raise
        raise InputError(
            f"{package} cannot be read as a Core ML program ({first_line(error)}): fetch it again"
        ) from error
    if program is None:
        raise InputError(
            f"{package} holds {held or 'no model'}, not an ML program: convert its model anew with "
            'ct.convert(..., convert_to="mlprogram")'
        )
    if "main" not in program.functions:
        raise InputError(f"{package} has no function main, only {', '.join(program.functions) or 'none'}")
    return program


def _require_of_its_own(package: Path) -> None:
    """Raise InputError where the package names or holds what lies elsewhere, or what is no file: a pipe never ends."""
    home = package.resolve()
    for path in (*package.rglob("*"), *_named(package)):
        lies = os.path.realpath(path)  # a ring of links is left to coremltools, where Path.resolve would raise
        if not Path(lies).is_relative_to(home):
            raise InputError(f"{package} reaches for {lies}, which is outside of it: do not trust it")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is neither a file nor a folder: fetch the package again")


def _named(package: Path) -> Iterator[Path]:
    """What the package's manifest names, where it can be read: where it cannot, coremltools says so."""
    manifest = package / "Manifest.json"
    try:
        entries = json.loads(manifest.read_bytes())["itemInfoEntries"].values() if manifest.is_file() else ()
        yield from [package / "Data" / entry["path"] for entry in entries if "\0" not in entry["path"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return


@torch.inference_mode()
def interpret(
    program: Any, inputs: Mapping[str, Tensor], *, rounded: bool = True, also: Collection[str] = ()
) -> Interpretation:
    """Run the main function of `program`: as declared, or all in float32 where not `rounded`.

    The values named `also` are given beside the outputs, after them. A label is given as its place among the classes.

    Raises:
        InputError: an operator is not known here; it is named.
    """
    outputs: dict[str, Tensor] = {}
    overflowed = []
    names = {variable.name for variable in program.functions["main"].outputs} | set(also)
    for operation, results, kept in _steps(program, inputs, rounded):
        outputs |= {name: value for name, value in kept.items() if name in names}
        if any(_overflows(result, value) for result, value in zip(results, kept.values(), strict=True)):
            overflowed.append(operation.name)
    given = {name: tensor.float() for name, tensor in inputs.items() if name in names}
    ordered = {variable.name: _value(variable, given | outputs) for variable in program.functions["main"].outputs}
    return Interpretation(ordered | {name: outputs[name] for name in also}, tuple(overflowed))


@torch.inference_mode()
def beyond_half(program: Any, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The operators that read or give what float16 cannot hold: too large values, or none but denormal ones.

    `program` computes in float32. Raises as `interpret` does.
    """
    beyond = {name for name, tensor in inputs.items() if _is_beyond(tensor)}
    named = []
    for operation, _, kept in _steps(program, inputs, False):
        made = {name for name, value in kept.items() if _is_beyond(value)}
        if made or any(each.name in beyond for each in operands(operation)):
            named.append(operation.name)
        beyond |= made
    return tuple(named)


def _is_beyond(value: Tensor) -> bool:
    if not value.is_floating_point():
        return False
    largest = float(torch.where(value.isfinite(), value.abs(), 0).max()) if value.numel() else 0.0
    return largest > LARGEST_SAFE or 0 < largest < SMALLEST_NORMAL


@torch.inference_mode()
def diagnose(program: Any, inputs: Mapping[str, Tensor]) -> Diagnosis:
    """Run `program` as declared beside float32, and compare them operator by operator. Raises as `interpret` does."""
    names = {variable.name for variable in program.functions["main"].outputs}
    snr: dict[str, float] = {}
    argmax: dict[str, float] = {}
    operators = []
    for (operation, results, found), (_, _, exact) in zip(
        _steps(program, inputs, True), _steps(program, inputs, False), strict=True
    ):
        for name, value in found.items():
            snr[name] = _snr(value, exact[name])
            if name in names and value.dim():
                argmax[name] = float((value.argmax(-1) == exact[name].argmax(-1)).float().mean())
        operators.append(_operator_error(operation, results, found, exact, snr))
    return Diagnosis(tuple(operators), {name: snr[name] for name in names if name in snr}, argmax)


def _operator_error(
    operation: Any,
    results: list[Tensor],
    found: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    snr: dict[str, float],
) -> OperatorError:
    before = min((snr[each.name] for each in operands(operation) if each.name in snr), default=math.inf)
    own = min(snr[name] for name in found)
    values = [value for value in found.values() if value.is_floating_point()]
    small = sum(int(((value != 0) & (value.abs() < SMALLEST_NORMAL)).sum()) for value in values)
    return OperatorError(
        operation.name,
        operation.op_type,
        own,
        0.0 if own == math.inf else min(before, _EXACT) - own,
        max(
            (float((found[name].float() - exact[name].float()).abs().max()) for name in found if found[name].numel()),
            default=0.0,
        ),
        any(_overflows(result, value) for result, value in zip(results, found.values(), strict=True)),
        small / max(sum(value.numel() for value in values), 1),
    )


def _snr(found: Tensor, exact: Tensor) -> float:
    """Signal to noise in dB: infinite where they are equal."""
    noise = (found.double() - exact.double()).square().sum()
    signal = exact.double().square().sum()
    if not noise.isfinite():
        return -math.inf
    return math.inf if noise == 0 else float(10 * torch.log10(signal / noise))


def _overflows(result: Tensor, rounded: Tensor) -> bool:
    if not rounded.is_floating_point() or math.isfinite(rounded.sum()):  # one pass tells where there is nothing to find
        return False
    return bool((rounded.isinf() & result.isfinite()).any())


def _steps(
    program: Any, inputs: Mapping[str, Tensor], rounded: bool
) -> Iterator[tuple[Any, list[Tensor], dict[str, Tensor]]]:
    """Every operator in turn: its results in float32, and by name as they are kept. A value is held to its last use."""
    function = program.functions["main"]
    last_use = _last_uses(function)
    values: dict[str, Any] = {name: tensor.float() for name, tensor in inputs.items()}
    for position, operation in enumerate(function.operations):
        if operation.op_type == "const":
            continue
        results = _apply(operation, values)
        kept = {
            variable.name: _round(result, DTYPES[_dtype(variable)], rounded)
            for variable, result in zip(operation.outputs, results, strict=True)
        }
        values |= kept
        yield operation, results, kept
        for name in [name for name in values if last_use.get(name) == position]:
            del values[name]


def operands(operation: Any) -> Iterator[Any]:
    """The values that an operator reads, those of a list one by one."""
    for given in operation.inputs.values():
        yield from (each for each in (given if isinstance(given, (list, tuple)) else (given,)) if each is not None)


def _apply(operation: Any, values: Mapping[str, Any]) -> list[Tensor]:
    kind = operation.op_type
    if kind not in OPERATORS:
        raise InputError(
            f"the Core ML program holds operator {kind!r} ({operation.name}), which cannot be checked here"
        )
    arguments = {
        name: [_value(item, values) for item in given] if isinstance(given, (list, tuple)) else _value(given, values)
        for name, given in operation.inputs.items()
        if given is not None
    }
    result = OPERATORS[kind](**arguments)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _value(variable: Any, values: Mapping[str, Any]) -> Any:
    return values[variable.name] if variable.name in values else constant(variable.val)


def decompressed(operation: Any) -> Tensor:
    """The constant that an operator `constexpr_...` holds, in the type that it declares. Raises as `interpret` does."""
    (result,) = _apply(operation, {})
    return _round(result, DTYPES[_dtype(operation.outputs[0])], True)


def constant(value: Any) -> Any:
    """A constant of a program as its operators are given it: numbers as tensors, of float32 where they are real."""
    if isinstance(value, str | list):
        return value
    tensor = torch.from_numpy(np.array(value))
    return tensor.float() if tensor.is_floating_point() else tensor


def _round(result: Tensor, declared: torch.dtype, rounded: bool) -> Tensor:
    if not declared.is_floating_point:
        return result.to(declared)
    return result.half().float() if rounded and declared == torch.float16 else result.float()


def _dtype(variable: Any) -> str:
    from coremltools.converters.mil.mil import types

    return types.builtin_to_string(variable.dtype)  # type: ignore[no-any-return]


def _last_uses(function: Any) -> dict[str, int]:
    """The position of the last operator that reads each value; the function's outputs are kept to the end."""
    uses = {}
    for position, operation in enumerate(function.operations):
        for variable in operands(operation):
            uses[variable.name] = position
    for variable in function.outputs:
        uses.pop(variable.name, None)
    return uses
