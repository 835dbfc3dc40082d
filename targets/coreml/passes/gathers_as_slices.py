"""Gathers of known places as slices and a concat, which stay on the engine.

A roll, a token picked or neighbours taken in order are a few runs of places; what is more than that stays a gather.
"""

from typing import Any

import numpy as np

MOST_RUNS = 8


def apply(block: Any) -> int:
    """Replace every gather of a few runs of places; how many."""
    return sum(_sliced(operation, block) for operation in list(block.operations) if operation.op_type == "gather")


def _sliced(operation: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    x, indices = operation.inputs["x"], operation.inputs["indices"]
    batch_dims = operation.inputs.get("batch_dims")
    if indices.val is None or x.val is not None or (batch_dims is not None and int(batch_dims.val)):
        return False
    axis = int(operation.inputs["axis"].val) % x.rank
    if np.ndim(indices.val) > 1 or not isinstance(x.shape[axis], (int, np.integer)):
        return False
    places = np.atleast_1d(indices.val).astype(np.int64) % x.shape[axis]
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    if len(runs) > MOST_RUNS:
        return False
    parts = []
    for run in runs:
        open_axes = [other != axis for other in range(x.rank)]
        begin, end = np.zeros(x.rank, np.int32), np.zeros(x.rank, np.int32)
        begin[axis], end[axis] = run[0], run[-1] + 1
        parts.append(
            Builder.slice_by_index(
                x=x, begin=begin, end=end, begin_mask=open_axes, end_mask=open_axes, before_op=operation
            )
        )
    made = parts[0] if len(parts) == 1 else Builder.concat(values=parts, axis=axis, before_op=operation)
    if np.ndim(indices.val) == 0:
        made = Builder.squeeze(x=made, axes=[axis], before_op=operation)
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=operation.outputs[0], new_var=made))
