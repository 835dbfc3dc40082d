"""What targets share whose products are computed in a precision that the user chooses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import Refusal
from attnrewrite.targets.devices.in_float16 import InFloat16
from attnrewrite.targets.prepare import Prepared, quantised
from attnrewrite.targets.tvm.schedules.precision import FP32, INT8, stored
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, profile


def meant(wide: Prepared, precision: str, core: str) -> Prepared:
    """What an artifact for a processor in a precision is to compute, and how it is held to that: a module in float32 as
    it is or with its linear layers on integers, to the tolerance of the type that the processor stores the rest in.

    Raises:
        InputError: torch.export cannot capture the module, or nothing in it is computed in that precision.
        CheckFailedError: written out, it gives other outputs.
    """
    if precision == FP32:
        return wide
    dtype, made = stored(precision, profile(core)), wide
    if precision == INT8:
        made = quantised(wide)
        made = replace(made, notes=(*made.notes, f"what is not of int8 is stored and multiplied in {dtype}"))
    return InFloat16(made.module, made.inputs, made.notes, made.unrounded) if dtype == FLOAT16 else made


def loss(precision: str) -> Refusal | None:
    """What an artifact in a precision loses beyond rounding in float32, None where it is nothing."""
    return Refusal("int8", "loses accuracy with --precision int8") if precision == INT8 else None


def answering(call: Callable[[Sequence[Tensor]], Sequence[np.ndarray]]) -> Callable[..., tuple[Tensor, ...]]:
    """What a program gives that takes inputs like its module's, of any floating-point type in float32."""

    def answer(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, call([t.float() if t.is_floating_point() else t for t in given])))

    return answer
