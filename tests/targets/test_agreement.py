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
