"""Branches stacked to be summed are added: a stack has an axis more, and stands in no layout."""

from functools import reduce
from typing import Any


def apply(block: Any) -> int:
    """Write sums over the axis of a stack as additions; how many."""
    return sum(_added(each, block) for each in list(block.operations) if each.op_type == "reduce_sum")


def _added(operation: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    stack, axes, keeps = operation.inputs["x"].op, operation.inputs.get("axes"), operation.inputs["keep_dims"].val
    if stack is None or stack.op_type != "stack" or axes is None or keeps:
        return False
    rank = operation.inputs["x"].rank
    if [int(axis) % rank for axis in axes.val] != [int(stack.inputs["axis"].val) % rank]:
        return False
    made = reduce(lambda x, y: Builder.add(x=x, y=y, before_op=operation), stack.inputs["values"])
    old = operation.outputs[0]
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=old, new_var=made))
