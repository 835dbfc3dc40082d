"""An estimate of how long the Neural Engine takes: a sum over a program's operators, fitted to published times.

    t = scale(device) * sum of coefficient(term) * quantity(term)

The quantities are counted on the program: multiply-adds by kind of product, bytes moved by kind of operator, and
operators by kind, each with a cost of its own. Coefficients, and how far off they were on model families that they
were not fitted to, are data (latency.toml), written by benchmarks/coreml_latency.py. Where those errors are above
`MOST_ERROR` or the ranking below `LEAST_RANKING` there is no time, only an order (`Estimate.trusted`).
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attnrewrite.errors import unknown_name
from attnrewrite.targets.base import Estimate
from attnrewrite.targets.coreml.engine_rules import is_constant, multiply_adds

FITTED = Path(__file__).with_name("latency.toml")
MOST_ERROR = 0.15  # the median, relative, on families that were not fitted to
LEAST_RANKING = 0.95  # Spearman's correlation there
HALF = 2  # bytes of a float16 value


@dataclass(frozen=True)
class Fitted:
    """Coefficients by term (ms for a million of its unit), scales by device, and errors on families held out.

    `low` and `high` are what true times there were of the estimated ones, at the tenth and the ninetieth of a hundred.
    """

    coefficients: Mapping[str, float]
    devices: Mapping[str, float]
    ranking: float
    error: float
    low: float
    high: float

    @property
    def trusted(self) -> bool:
        """Whether the errors are small enough for times to be told."""
        return self.error <= MOST_ERROR and self.ranking >= LEAST_RANKING

    def milliseconds(self, quantities: Mapping[str, float], device: str) -> float:
        """InputError where nothing was measured on such a device."""
        if device not in self.devices:
            raise unknown_name("device", device, self.devices)
        return self.devices[device] * sum(self.coefficients.get(term, 0.0) * of for term, of in quantities.items())


@cache
def fitted() -> Fitted:
    """What latency.toml holds."""
    told = tomllib.loads(FITTED.read_text(encoding="utf-8"))
    held_out = told["held_out"]
    return Fitted(
        told["coefficients"], told["devices"], held_out["ranking"], held_out["error"], held_out["low"], held_out["high"]
    )


def estimate(program: Any, device: str | None = None) -> Estimate:
    """Of a MIL program, loaded or in memory; `device` is one of latency.toml, by default its last."""
    known = fitted()
    device = device or list(known.devices)[-1]
    ms = known.milliseconds(quantities(program), device)
    return Estimate(device, ms, ms * known.low, ms * known.high, known.ranking, known.error, known.trusted)


def quantities(program: Any) -> dict[str, float]:
    """The terms of the sum for a program's main function, in millions of their unit; a call is one."""
    found = dict.fromkeys(TERMS, 0.0)
    for operation in program.functions["main"].operations:
        if operation.op_type in _FREE or all(map(is_constant, operation.outputs)):
            continue  # what is constant is computed once
        kind = _kind(operation)
        for term, (kinds, quantity) in TERMS.items():
            found[term] += quantity(operation) / 1e6 if kind in kinds else 0.0
    return found


def _kind(operation: Any) -> str:
    name = operation.op_type
    if name in ("linear", "matmul", "einsum"):
        return "product"
    if name in ("conv", "conv_transpose"):
        return "convolution"
    if name == "softmax":
        return name
    if name.startswith("reduce_") or name.endswith(("_norm", "_pool")):
        return "reduction"
    return "movement" if name in _MOVES else "elementwise"


def _moved(operation: Any) -> int:
    """Bytes that an operator reads and writes, in float16, without its weights."""
    given = [
        each
        for value in operation.inputs.values()
        for each in (value if isinstance(value, (list, tuple)) else (value,))
        if each is not None
    ]
    return HALF * sum(_size(each) for each in (*given, *operation.outputs) if not is_constant(each))


def _size(variable: Any) -> int:
    return math.prod(int(size) if isinstance(size, (int, np.integer)) else 1 for size in variable.shape)


# Norms of batches become convolutions'; a label is looked up after the program has run.
_FREE = ("reshape", "expand_dims", "squeeze", "identity", "cast", "batch_norm", "classify")
_MOVES = (
    "transpose", "concat", "split", "stack", "slice_by_index", "slice_by_size", "pad", "tile", "pixel_shuffle",
    "pixel_unshuffle", "reverse", "gather", "gather_along_axis", "gather_nd", "scatter", "scatter_along_axis",
    "scatter_nd", "upsample_bilinear", "upsample_nearest_neighbor", "resample",
)  # fmt: skip
# What is summed up: for operators of these kinds, this quantity. Elementwise operators join those before them.
TERMS: dict[str, tuple[tuple[str, ...], Callable[[Any], int]]] = {
    "multiply-adds of convolutions": (("convolution",), multiply_adds),
    "multiply-adds of products": (("product",), multiply_adds),
    "bytes of convolutions": (("convolution",), _moved),
    "bytes of movement": (("movement",), _moved),
    "bytes of softmax": (("softmax",), _moved),
    "bytes of reductions": (("reduction",), _moved),
    "operators": (("convolution", "product", "softmax", "reduction", "movement", "elementwise"), lambda operation: 1),
}
