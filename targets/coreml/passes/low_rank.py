"""Data movement through more than five axes, which Core ML lacks, in steps of five at most.

A window partition or a packed qkv seen as [batch, windows, .., 3, heads, ..] is a slice and a transpose or two.
"""

from typing import Any

from attnrewrite.targets.coreml.passes import views


def apply(block: Any) -> int:
    """Replace every value of rank 5 at most that was moved through a higher rank; how many were."""
    edits = 0
    for operation in list(block.operations):
        if operation.op_type not in views.MOVES or operation.inputs["x"].rank <= views.RANK:
            continue
        for output in operation.outputs:
            edits += output.rank <= views.RANK and _replaced(output, block)
    return edits


def _replaced(output: Any, block: Any) -> bool:
    found = views.origin(output, lambda variable: variable is not output and variable.rank <= views.RANK)
    wanted = None if found is None else views.view(found.index)
    if found is None or wanted is None:
        return False
    made = views.write(wanted, found.base, output.op)
    if made is None:
        return False
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=output.op, old_var=output, new_var=made))
