"""Runs a saved Core ML package operator by operator in torch, as Core ML itself predicts on a Mac or iPhone only.

Every operator is computed in float32 and its result rounded to the type that the program declares for it, so that
float16 storage and its overflows are seen. How a device accumulates inside an operator is not: it may round more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.targets.coreml import movement, operators
from attnrewrite.targets.coreml.operators import DTYPES

OPERATORS = {**operators.OPERATORS, **movement.OPERATORS}


@dataclass(frozen=True)
class Interpretation:
    """The outputs of a program by name, and the operators whose finite results became infinite in float16."""

    outputs: Mapping[str, Tensor]
    overflowed: tuple[str, ...]


def load(package: Path) -> Any:
    """The program inside a saved `.mlpackage`."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load as load_program

    model = ct.models.MLModel(str(package), skip_model_load=True)
    spec = model.get_spec()
    return load_program(spec, spec.specificationVersion, model.weights_dir)


@torch.inference_mode()
def interpret(program: Any, inputs: Mapping[str, Tensor]) -> Interpretation:
    """Run the main function of `program` on inputs by name.

    Raises:
        InputError: the program holds an operator that is not known here, which is named.
    """
    function = program.functions["main"]
    last_use = _last_uses(function)
    values: dict[str, Any] = {name: tensor.float() for name, tensor in inputs.items()}
    overflowed = []
    for position, operation in enumerate(function.operations):
        if operation.op_type == "const":
            continue
        results = _apply(operation, values)
        for variable, result in zip(operation.outputs, results, strict=True):
            rounded = _round(result, DTYPES[_dtype(variable)])
            if rounded.is_floating_point() and bool((rounded.isinf() & result.isfinite()).any()):
                overflowed.append(operation.name)
            values[variable.name] = rounded
        for name in [name for name in values if last_use.get(name) == position]:
            del values[name]
    return Interpretation({variable.name: values[variable.name] for variable in function.outputs}, tuple(overflowed))


def _apply(operation: Any, values: Mapping[str, Any]) -> list[Tensor]:
    kind = operation.op_type
    if kind.startswith("constexpr_"):
        return [_constant(operation.outputs[0].val)]
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
    return values[variable.name] if variable.name in values else _constant(variable.val)


def _constant(value: Any) -> Any:
    if isinstance(value, str):
        return value
    tensor = torch.from_numpy(np.array(value))
    return tensor.float() if tensor.is_floating_point() else tensor


def _round(result: Tensor, declared: torch.dtype) -> Tensor:
    if not declared.is_floating_point:
        return result.to(declared)
    return result.half().float() if declared == torch.float16 else result.float()


def _dtype(variable: Any) -> str:
    from coremltools.converters.mil.mil import types

    return types.builtin_to_string(variable.dtype)  # type: ignore[no-any-return]


def _last_uses(function: Any) -> dict[str, int]:
    """The position of the last operator that reads each value; the function's outputs are kept to the end."""
    uses = {}
    for position, operation in enumerate(function.operations):
        for given in operation.inputs.values():
            for variable in given if isinstance(given, (list, tuple)) else (given,):
                if variable is not None:
                    uses[variable.name] = position
    for variable in function.outputs:
        uses.pop(variable.name, None)
    return uses
