"""The check of what is compiled to compute in float16: its tolerance, and what it cannot hold, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.fx.functionalise import functional_graph
from attnrewrite.passes.wide import Wide
from attnrewrite.patterns.fx.operators import operator_name
from attnrewrite.targets import agreement
from attnrewrite.targets.prepare import Prepared, exact, reference, specialise

LARGEST = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True)
class InFloat16(Prepared):
    """A module in float32 for an artifact whose weights and products are in float16, all but those of integers."""

    def agree(self, subject: str, found: Sequence[np.ndarray]) -> agreement.Agreement:
        """Hold what was computed to what the module gives, to float16's tolerance (`agreement.FLOAT16`), as many times
        wider as rounding moves the module further than others: weights and what is kept between kernels are rounded,
        and so are sums of up to 96 products. A module that rounds to integers is allowed that beside what they cost.

        Raises:
            CheckFailedError: they disagree; the first operator whose result float16 cannot hold is named, if any is.
        """
        expected, wide = reference(self.module, self.inputs), self.unrounded or self.module
        program = specialise(wide, self.inputs)
        try:
            if self.unrounded is not None:
                unrounded = reference(self.unrounded, self.inputs)
                return agreement.agree_rounded(subject, found, expected, unrounded, agreement.FLOAT16)
            return agreement.agree(subject, found, expected, agreement.FLOAT16, lambda: exact(program, self.inputs))
        except CheckFailedError as error:
            search = _Beyond(functional_graph(program))
            search.run(*self.inputs)
            why = search.first or f"no operator's result is beyond {LARGEST:.0f}, the most, but a sum on the way may be"
            raise CheckFailedError(f"{error}; in float16, {why}: lower it with --precision fp32") from error


class _Beyond(Wide):
    """Runs a graph in float64; `first` tells of the first value that float16 cannot hold."""

    first: str | None = None

    def value(self, n: Node) -> Any:
        result = super().value(n)
        if self.first is None and isinstance(result, Tensor) and result.is_floating_point():
            largest = float(result[result.isfinite()].abs().max()) if result.isfinite().any() else 0.0
            if largest > LARGEST:
                self.first = (
                    f"{operator_name(n)} {n.name!r} overflows: it reaches {largest:.3g}, and {LARGEST:.0f} is the most"
                )
        return result
