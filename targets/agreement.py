"""The check of every artifact: the same input through it and through the module, and how far apart they may be."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnrewrite.errors import CheckFailedError

# The allowed error, relative to the largest value of each output, in units of the type's own precision. Rounding alone
# gives up to 16 in float32 and 2 in float16 (trained and random ViTs and Swins of 2 to 24 blocks, all targets).
FLOAT32 = 2.0**-23 * 128
FLOAT16 = 2.0**-10 * 16
BFLOAT16 = 2.0**-7 * 16
# What is stored in float16 keeps few digits below its smallest normal number, in whatever type it is handed over.
STORED_FLOOR = {FLOAT16: 2.0**-14}


@dataclass(frozen=True)
class Agreement:
    """The largest difference between an artifact's outputs and the module's, and the most that was allowed there."""

    max_abs_error: float
    tolerance: float


def agree(subject: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray], relative: float) -> Agreement:
    """Compare outputs. `relative` times the largest value of an output is the error allowed in it.

    Raises:
        CheckFailedError: an output of `subject` is missing, has another shape, is not finite or is too far off.
    """
    if [array.shape for array in found] != [array.shape for array in expected]:
        raise CheckFailedError(
            f"{subject}: its outputs have the shapes {[array.shape for array in found]}, "
            f"the module's have {[array.shape for array in expected]}"
        )
    results = [_compare(one, other, relative) for one, other in zip(found, expected, strict=True)]
    worst = max(results, key=lambda result: result.max_abs_error / result.tolerance)
    if not worst.max_abs_error <= worst.tolerance:
        raise CheckFailedError(
            f"{subject}: its output differs from the module's by {worst.max_abs_error:.3g} on the same input, "
            f"more than the {worst.tolerance:.3g} that rounding explains"
        )
    return worst


def _compare(found: np.ndarray, expected: np.ndarray, relative: float) -> Agreement:
    least = max(_smallest_normal(array.dtype) for array in (found, expected))
    expected = expected.astype(np.float64)
    errors = np.abs(found.astype(np.float64) - expected)
    # Processors take denormal numbers for zero, and kernels may: their digits are no result.
    error = np.where(errors < least, 0.0, errors).max(initial=0.0)
    scale = np.abs(expected).max(initial=0.0)
    allowed = max(float(scale * relative), STORED_FLOOR.get(relative, 0.0)) if scale else relative
    # An error that is not a number must not pass for a small one.
    return Agreement(float(error) if np.isfinite(error) else float("inf"), allowed)


def _smallest_normal(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).smallest_normal) if np.issubdtype(dtype, np.floating) else 0.0
