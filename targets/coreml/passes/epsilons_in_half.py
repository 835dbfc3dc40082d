"""Epsilons that float16 can hold: what a model adds before a root, a logarithm or a reciprocal is the operator's own.

coremltools leaves the operators their default, 1e-12 and less, which is zero in float16.
"""

from typing import Any

import numpy as np

SMALLEST = 2.0**-24  # of float16
WITH_EPSILON = ("rsqrt", "log", "inverse")


def apply(block: Any) -> int:
    """Take constants added to an operand into the operator that reads it; how many."""
    return sum(_taken(each, block) for each in list(block.operations) if each.op_type in WITH_EPSILON)


def _taken(operation: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    added, epsilon = operation.inputs["x"].op, float(operation.inputs["epsilon"].val)
    if added is None or added.op_type != "add" or epsilon >= SMALLEST:
        return False
    x, y = added.inputs["x"], added.inputs["y"]
    constant, other = (y, x) if y.val is not None else (x, y)
    if constant.val is None or np.size(constant.val) != 1 or constant.rank > other.rank:
        return False
    own = np.asarray(constant.val).reshape(()) + np.asarray(epsilon, constant.val.dtype)
    if own < SMALLEST:
        return False
    made = getattr(Builder, operation.op_type)(x=other, epsilon=own, before_op=operation)
    old = operation.outputs[0]
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=old, new_var=made))
