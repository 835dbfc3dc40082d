"""What targets share whose products are computed in a precision that the user chooses."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import Refusal
from attnrewrite.targets.devices.in_float16 import InFloat16
from attnrewrite.targets.prepare import Prepared, quantised
from attnrewrite.targets.tvm.schedules.precision import FP16, INT8


def meant(wide: Prepared, precision: str) -> Prepared:
    """What an artifact in a precision is to compute, and how it is held to that: a module in float32 as it is, to the
    tolerance of float16, or with its linear layers on integers.

    Raises:
        InputError: torch.export cannot capture the module, or nothing in it is computed in that precision.
        CheckFailedError: written out, it gives other outputs.
    """
    if precision == FP16:
        return InFloat16(wide.module, wide.inputs, wide.notes)
    return quantised(wide) if precision == INT8 else wide


def loss(precision: str) -> Refusal | None:
    """What an artifact in a precision loses beyond rounding in float32, None where it is nothing."""
    return Refusal("int8", "loses accuracy with --precision int8") if precision == INT8 else None


def answering(call: Callable[[Sequence[Tensor]], Sequence[np.ndarray]]) -> Callable[[Tensor], Tensor]:
    """The first output of a program that takes one input, a picture, in float32."""
    return lambda given: torch.from_numpy(call((given.float(),))[0])
