"""What counts as the same output: errors relative to the largest value, and none among denormal numbers."""

import numpy as np
import pytest

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets import agreement as check


@pytest.mark.parametrize(
    ("scale", "error", "relative", "agrees"),
    [
        (1.0, 0.01, check.FLOAT16, True),
        (1.0, 0.02, check.FLOAT16, False),
        (1e-3, 5e-5, check.FLOAT16, True),  # below 2^-14, float16's smallest normal number
        (1e-3, 7e-5, check.FLOAT16, False),
        (1e-3, 5e-5, check.FLOAT32, False),
        (0.0, 0.01, check.FLOAT16, True),
        (0.0, float("nan"), check.FLOAT16, False),
    ],
)
def test_errors_that_rounding_explains(scale: float, error: float, relative: float, agrees: bool) -> None:
    expected = [np.array([scale, 0.0])]
    found = [np.array([scale, error])]
    if agrees:
        assert check.agree("it", found, expected, relative).max_abs_error == pytest.approx(error)
    else:
        with pytest.raises(CheckFailedError, match="it: its output differs"):
            check.agree("it", found, expected, relative)


@pytest.mark.parametrize(
    ("moved", "relative", "allowed"),
    [
        (1e-6, check.FLOAT32, check.FLOAT32),  # less than rounding moves others
        (2e-5, check.FLOAT32, 2e-5 * 8),
        (2e-5, check.FLOAT16, check.MOST),
        (2e-5 / 8, check.FLOAT16, 2e-5 * 2**10),
        (1e-3, check.FLOAT32, check.FLOAT32),  # no rounding any more
    ],
)
def test_a_module_that_rounding_moves_further_may_be_missed_by_more(
    moved: float, relative: float, allowed: float
) -> None:
    expected, exact = [np.array([1.0, 0.0])], [np.array([1.0, moved])]
    found = [np.array([1.0, 0.99 * allowed])]
    agreement = check.agree("it", found, expected, relative, lambda: exact)
    assert agreement.tolerance == pytest.approx(allowed)
    with pytest.raises(CheckFailedError, match="differs"):
        check.agree("it", [np.array([1.0, 1.01 * allowed])], expected, relative, lambda: exact)


def test_where_the_module_itself_hangs_on_rounding_the_check_says_so() -> None:
    expected, found = [np.array([1.0, 0.0])], [np.array([1.0, 0.5])]
    with pytest.raises(CheckFailedError, match="the input proves nothing"):
        check.agree("it", found, expected, check.FLOAT32, lambda: [np.array([1.0, 0.3])])


@pytest.mark.parametrize(
    ("cost", "relative", "error", "allowed"),
    [
        (0.0, 0.0, 0.99 * check.STEP, check.STEP),  # one step of an integer
        (0.0, 0.0, 1.01 * check.STEP, None),
        (0.02, 0.0, 0.039, 0.04),  # twice what rounding to integers costs
        (0.02, 0.0, 0.041, None),
        (0.02, 0.01, 0.049, 0.05),  # and what is not of integers
        (0.02, 0.01, 0.051, None),
        (0.5, 0.0, 0.13, None),  # what costs more is no answer
        (0.5, 0.01, 0.13, None),
        (0.5, 0.0, float("nan"), None),
    ],
)
def test_programs_that_round_to_integers_differ_by_what_that_costs(
    cost: float, relative: float, error: float, allowed: float | None
) -> None:
    expected, unrounded = [np.array([1.0, 0.0])], [np.array([1.0, cost])]
    found = [np.array([1.0, error])]
    if allowed is not None:
        assert check.agree_rounded("it", found, expected, unrounded, relative).tolerance == pytest.approx(allowed)
    else:
        with pytest.raises(CheckFailedError, match="it: its output differs"):
            check.agree_rounded("it", found, expected, unrounded, relative)
