"""Masks that float16 can hold: what hides a key is -40000, not minus infinity.

A row whose keys are all hidden is then even, and not the quotient of two zeros; where a key is left, its softmax is the
same: the exponential of -40000 is 0 in every precision.
"""

from typing import Any

import numpy as np

HIDDEN = -4e4
FAR = -1e4  # what is below hides a key already


def apply(block: Any) -> int:
    """Bound the constants added right before a softmax; how many."""
    edits = 0
    for operation in list(block.operations):
        if operation.op_type == "softmax":
            edits += _bounded(operation.inputs["x"], block)
    return edits


def _bounded(scores: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    operation = scores.op
    if operation is None or operation.op_type != "add" or len(scores.child_ops) != 1:
        return False
    x, y = operation.inputs["x"], operation.inputs["y"]
    mask, other = (y, x) if y.val is not None else (x, y)
    if mask.val is None or not np.ndim(mask.val) or not np.any(mask.val < HIDDEN):
        return False
    bounded = np.where(mask.val < FAR, np.asarray(HIDDEN, mask.val.dtype), mask.val)
    made = Builder.add(x=other, y=bounded, before_op=operation)
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=scores, new_var=made))
