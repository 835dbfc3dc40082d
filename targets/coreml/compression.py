"""A confirmed package with its weights in fewer bytes, by coremltools.optimize, confirmed again.

A compressed model does not agree with its module to rounding: its weights are others. So the check has two parts. The
compressed program must be the confirmed one, operator by operator and wire by wire, but for weights that stand for the
original ones within what the method may change (here); and with these weights it must give in float16 what it gives in
float32, to rounding (`lowering.py`). What the change costs in accuracy is measured, on real images (`lower --data`).
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnrewrite.errors import CheckFailedError, InputError, Refusal, first_line, unknown_name
from attnrewrite.targets.base import size_bytes
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.record import Compression

PRUNED = 0.5  # the share of a weight's values that become zero
ULP = 2.0**-10  # of float16, relative: coremltools computes steps and palettes in it
DENORMAL = 2.0**-24  # the least float16 above zero, as far as the smallest numbers are apart


@dataclass(frozen=True)
class Method:
    """One way to compress: coremltools' function and configuration by name, and whether a weight may stand for another.

    `stands_for` is given the original weight, the one that the package holds now, and the operands of the operator that
    holds it.
    """

    function: str
    configuration: str
    options: dict[str, Any]
    stands_for: Callable[[Tensor, Tensor, dict[str, Any]], bool]


def _within_half_a_step(original: Tensor, found: Tensor, operands: dict[str, Any]) -> bool:
    """Every value is rounded to a multiple of its row's step."""
    step = operands["scale"]
    if step.dim() == 1:
        step = step.reshape([-1 if axis == int(operands["axis"]) else 1 for axis in range(original.dim())])
    return bool(((original - found).abs() <= step / 2 + 127 * (step * ULP).clamp(min=DENORMAL)).all())


def _nearest_of_palette(original: Tensor, found: Tensor, operands: dict[str, Any]) -> bool:
    """Every value is the palette's nearest to the original."""
    palette = operands["lut"].float().reshape(-1).sort().values
    above = torch.bucketize(original, palette).clamp(0, len(palette) - 1)
    nearest = torch.minimum((original - palette[above]).abs(), (original - palette[(above - 1).clamp(0)]).abs())
    return bool(((original - found).abs() <= nearest + ULP * original.abs().max()).all())


def _smallest_are_zero(original: Tensor, found: Tensor, operands: dict[str, Any]) -> bool:
    """Every value is the original or zero, and none that is zero now was larger than one that is left."""
    gone = (found == 0) & (original != 0)
    left = original[found != 0].abs()
    kept = torch.equal(torch.where(gone, original, found), original)
    return kept and (not gone.any() or not len(left) or bool(original[gone].abs().max() <= left.min()))


def _palette(bits: int) -> Method:
    options = {"mode": "kmeans", "nbits": bits}
    return Method("palettize_weights", "OpPalettizerConfig", options, _nearest_of_palette)


METHODS = {
    "int8": Method(
        "linear_quantize_weights",
        "OpLinearQuantizerConfig",
        {"mode": "linear_symmetric", "dtype": "int8"},
        _within_half_a_step,
    ),
    "palette6": _palette(6),
    "palette4": _palette(4),
    "prune": Method("prune_weights", "OpMagnitudePrunerConfig", {"target_sparsity": PRUNED}, _smallest_are_zero),
}


def refusal(method: str) -> Refusal | None:
    """Why this machine cannot compress so; None where it can. Raises InputError for a method that there is not."""
    if method not in METHODS:
        raise unknown_name("compression", method, METHODS)
    if METHODS[method].function == "palettize_weights" and find_spec("sklearn") is None:
        return Refusal("not-installed", "finds its palettes with scikit-learn: pip install scikit-learn")
    return None


def compress(path: Path, method: str) -> Compression:
    """Replace the package at `path` by one whose weights are compressed by `method`.

    Raises:
        InputError: coremltools cannot compress it so.
        CheckFailedError: what it made is another program, or its weights are others than the method may make of them.
    """
    import coremltools as ct
    from coremltools.optimize import coreml as optimize

    how, before = METHODS[method], size_bytes(path)
    configuration = optimize.OptimizationConfig(getattr(optimize, how.configuration)(**how.options))
    with tempfile.TemporaryDirectory() as folder, package.quiet():
        original = interpreter.load(path)
        made = Path(folder) / package.NAME
        try:
            model = ct.models.MLModel(str(path), skip_model_load=True)
            smaller = getattr(optimize, how.function)(model, configuration)
            smaller.user_defined_metadata["attnrewrite.compression"] = method
            smaller.save(str(made))
        except Exception as error:  # coremltools raises what its parts raise
            package.require_written(error, path.parent)
            raise InputError(
                f"coremltools cannot compress the package by {method} ({first_line(error)}): "
                "choose another way to --compress"
            ) from error
        weights = compare(original, interpreter.load(made), method)
        shutil.rmtree(path)
        shutil.copytree(made, path)
    return Compression(method, len(weights), before, size_bytes(path))


def compare(original: Any, compressed: Any, method: str) -> tuple[str, ...]:
    """The names of the weights that `compressed` holds by `method`; all else is as in `original`.

    Raises:
        CheckFailedError: it is another program; the first operator that differs is named.
    """
    before, after = original.functions["main"], compressed.functions["main"]
    ours, theirs = ([each for each in one.operations if not _holds(each)] for one in (before, after))
    ends = [[*one.inputs, *(each.name for each in one.outputs)] for one in (before, after)]
    if ends[0] != ends[1] or len(ours) != len(theirs):
        raise CheckFailedError(
            f"compressed by {method}, the package is another program ({len(theirs)} operators, not {len(ours)}), as "
            "coremltools changes more of some than their weights: leave --compress out"
        )
    twins = dict(zip(before.inputs, after.inputs, strict=True))  # values of one program by those of the other
    weights = []
    for one, other in zip(ours, theirs, strict=True):
        if _signature(one) != _signature(other):
            raise CheckFailedError(f"compressed by {method}, operator {other.name!r} is another than {one.name!r}")
        twins |= {made.name: now.name for made, now in zip(one.outputs, other.outputs, strict=True)}
        for given, now in zip(interpreter.operands(one), interpreter.operands(other), strict=True):
            if now.op is not None and now.op.op_type.startswith("constexpr_") and given.val is not None:
                weights.append(now.name)
                alike = _stands_for(given, now, method)
            else:
                alike = _same(given, now, twins)
            if not alike:
                raise CheckFailedError(
                    f"compressed by {method}, operator {other.name!r} reads {now.name!r}, which does not stand for "
                    "what it read before"
                )
    if any(twins.get(each.name, each.name) != each.name for each in before.outputs):
        raise CheckFailedError(f"compressed by {method}, the package gives its outputs in another order")
    return tuple(dict.fromkeys(weights))


def _holds(operation: Any) -> bool:
    return operation.op_type == "const" or operation.op_type.startswith("constexpr_")


def _signature(operation: Any) -> tuple[Any, ...]:
    given = [
        (key, len(value) if isinstance(value, (list, tuple)) else None)
        for key, value in operation.inputs.items()
        if value is not None
    ]
    return operation.op_type, given, [(each.shape, each.dtype) for each in operation.outputs]


def _stands_for(given: Any, now: Any, method: str) -> bool:
    operands = {key: interpreter.constant(each.val) for key, each in now.op.inputs.items() if each is not None}
    original, found = interpreter.constant(given.val), interpreter.decompressed(now.op)
    return original.shape == found.shape and METHODS[method].stands_for(original, found, operands)


def _same(given: Any, now: Any, twins: Mapping[str, str]) -> bool:
    """Whether two operands are the same value of their programs, or equal constants."""
    if given.val is None or now.val is None:
        return given.val is now.val and twins.get(given.name) == now.name
    one, other = interpreter.constant(given.val), interpreter.constant(now.val)
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)
