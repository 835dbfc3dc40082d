"""The check of every artifact: the same input through it and through the module, and how far apart they may be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnrewrite.errors import CheckFailedError

# The allowed error, relative to the largest value of each output, in units of the type's own precision. Rounding alone
# gives up to 16 in float32 and 2 in float16 (trained and random ViTs and Swins of 2 to 24 blocks, all targets); where
# sums are of float16, too, mostly 1 to 5, and 15 at worst (a random DeiT-3, a picture on which no output is large).
FLOAT32 = 2.0**-23 * 128
FLOAT16 = 2.0**-10 * 16
BFLOAT16 = 2.0**-7 * 16
# What is stored in float16 keeps few digits below its smallest normal number, in whatever type it is handed over.
STORED_FLOOR = {FLOAT16: 2.0**-14}
# All of the following are parts of an output's largest value.
ORDINARY = 2.0**-23 * 16  # the error that rounding to float32 causes in most modules
ROUNDING = 2.0**-12  # a larger error in float32 is not caused by rounding
MOST = 2.0**-3  # the most that is ever allowed
STEP = 2.0**-7  # a step of an integer of eight bits


@dataclass(frozen=True)
class Agreement:
    """The largest difference between an artifact's outputs and the module's, and the most that was allowed there.

    `sensitivity`: how many times the ORDINARY error the module itself has in float32, by which the tolerance was
    widened; 1 where that was not needed.
    """

    max_abs_error: float
    tolerance: float
    sensitivity: float = 1.0


Exact = Callable[[], Sequence[np.ndarray]]


def agree(
    subject: str,
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    relative: float,
    exact: Exact | None = None,
) -> Agreement:
    """Compare the outputs `found` of `subject` with `expected`, the module's own in float32. The error allowed in an
    output is `relative` times its largest value.

    Where that is exceeded and `exact` is given, which computes the module's outputs in float64, the tolerance is
    widened by how many times the ORDINARY error the module itself has in float32, to MOST of the largest value.

    Raises:
        CheckFailedError: an output is missing, has another shape, is not finite or is too far off; the message says so
            where the module's own output depends on rounding (a choice among equal numbers).
    """
    if [array.shape for array in found] != [array.shape for array in expected]:
        raise CheckFailedError(
            f"{subject}: its outputs have the shapes {[array.shape for array in found]}, "
            f"the module's have {[array.shape for array in expected]}"
        )
    worst, moved = _worst(found, expected, relative, [1.0] * len(found)), 0.0
    if exact is not None and not worst.max_abs_error <= worst.tolerance:
        precise = exact()
        sensitivities = [_sensitivity(one, other) for one, other in zip(expected, precise, strict=True)]
        worst = _worst(found, expected, relative, sensitivities)
        moved = _worst(precise, expected, relative, [1.0] * len(found)).max_abs_error
    if worst.max_abs_error <= worst.tolerance:
        return worst
    differs = f"{subject}: its output differs from the module's by {worst.max_abs_error:.3g} on the same input"
    if moved > worst.tolerance:
        raise CheckFailedError(
            f"{differs}; computed in float64 the module itself differs from that by {moved:.3g}, so that the input "
            "proves nothing: give others, or trained weights"
        )
    raise CheckFailedError(f"{differs}, more than the {worst.tolerance:.3g} that rounding explains")


def agree_rounded(
    subject: str,
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    unrounded: Sequence[np.ndarray],
    relative: float = 0.0,
) -> Agreement:
    """Compare outputs of two programs that round to integers of eight bits in the same places.

    A number halfway between two integers may be rounded to either, as float32 errors before it decide. That is one
    step, but it changes what is rounded next, so that after some layers two correct programs differ by about what
    rounding to integers costs. Allowed are twice the distance of `expected` from `unrounded` (the outputs without
    rounding to integers) or a STEP, whichever is more, and `relative` beside it for what is not of integers; MOST at
    most. A wrong scale is further off than that; that kernels round and add exactly, their own tests check.

    Raises:
        CheckFailedError: as `agree`.
    """
    costs = [
        float(np.abs(one.astype(np.float64) - other).max(initial=0.0))
        for one, other in zip(expected, unrounded, strict=True)
    ]
    scales = [float(np.abs(array).max(initial=0.0)) or 1.0 for array in expected]
    shares = [min(max(STEP, 2 * cost / scale) + relative, MOST) for cost, scale in zip(costs, scales, strict=True)]
    found_by_output = [
        agree(subject, [one], [other], share) for one, other, share in zip(found, expected, shares, strict=True)
    ]
    return max(found_by_output, key=lambda result: result.max_abs_error / result.tolerance)


def _worst(
    found: Sequence[np.ndarray], expected: Sequence[np.ndarray], relative: float, sensitivities: Sequence[float]
) -> Agreement:
    results = [
        _compare(one, other, relative, times) for one, other, times in zip(found, expected, sensitivities, strict=True)
    ]
    return max(results, key=lambda result: result.max_abs_error / result.tolerance)


def _sensitivity(rounded: np.ndarray, exact: np.ndarray) -> float:
    rounded, exact = rounded.astype(np.float64), exact.astype(np.float64)
    error, scale = np.abs(rounded - exact).max(initial=0.0), np.abs(exact).max(initial=0.0)
    return max(float(error / (scale * ORDINARY)), 1.0) if error <= scale * ROUNDING and scale else 1.0


def _compare(found: np.ndarray, expected: np.ndarray, relative: float, sensitivity: float) -> Agreement:
    least = max(_smallest_normal(array.dtype) for array in (found, expected))
    expected = expected.astype(np.float64)
    errors = np.abs(found.astype(np.float64) - expected)
    # Processors take denormal numbers for zero, and kernels may: their digits are no result.
    error = np.where(errors < least, 0.0, errors).max(initial=0.0)
    scale = np.abs(expected).max(initial=0.0)
    share = max(relative, min(relative * sensitivity, MOST))
    allowed = max(float(scale * share), STORED_FLOOR.get(relative, 0.0)) if scale else relative
    # An error that is not a number must not pass for a small one.
    return Agreement(float(error) if np.isfinite(error) else float("inf"), allowed, share / relative)


def _smallest_normal(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).smallest_normal) if np.issubdtype(dtype, np.floating) else 0.0
