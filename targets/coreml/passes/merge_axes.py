"""Axes that an operator treats alike made one, where it has more than Core ML or the engine takes.

Linear layers and products over windows come with as many axes as the model's code had; the engine has no linear layer
of rank 5 nor product of rank 5, and Core ML no tensor of rank 6. The axes before those that an operator computes along
are merged wherever every operand has all of them or none.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from attnrewrite.targets.coreml.operators import arithmetic
from attnrewrite.targets.coreml.passes import views

_OPERANDS = ("x", "y", "a", "b", "cond")


def _own_axes(operation: Any) -> list[int] | None:
    """The axes that a softmax, a normalisation or a reduction computes along."""
    given = operation.inputs.get("axes") or operation.inputs.get("axis")
    if given is None or given.val is None:
        return None
    return sorted(int(axis) % operation.inputs["x"].rank for axis in np.atleast_1d(given.val))


# For each operator, the axes that it does not treat like its others.
KEPT: dict[str, Callable[[Any], list[int] | None]] = {
    **dict.fromkeys(("select", "cast", *arithmetic.ELEMENTWISE), lambda operation: []),
    **dict.fromkeys(("softmax", "layer_norm", *arithmetic.REDUCTIONS), _own_axes),
    "linear": lambda operation: [operation.outputs[0].rank - 1],
    "matmul": lambda operation: [operation.outputs[0].rank - 2, operation.outputs[0].rank - 1],
}


def apply(block: Any, linear: int = views.RANK, others: int = views.RANK) -> int:
    """Merge axes of every operator that has more than linear layers, or others, should; how many that were."""
    return sum(
        _merged(operation, block, linear if operation.op_type == "linear" else others)
        for operation in list(block.operations)
    )


def _merged(operation: Any, block: Any, most: int) -> bool:
    from coremltools.converters.mil.mil import Builder

    if operation.op_type not in KEPT or len(operation.outputs) != 1:
        return False
    output = operation.outputs[0]
    operands = {name: operation.inputs[name] for name in _OPERANDS if operation.inputs.get(name) is not None}
    shapes = [output.shape, *(each.shape for each in operands.values())]
    rank = max(map(len, shapes))
    kept = KEPT[operation.op_type](operation)
    if rank <= most or kept is None or not all(map(views.is_static, (output, *operands.values()))):
        return False
    groups = _groups(kept, most, [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes[1:]])
    if groups is None:
        return False
    given = {name: each for name, each in operation.inputs.items() if each is not None}
    given |= {name: _with(groups, each, rank, operation) for name, each in operands.items()}
    for name in {"axis", "axes"} & set(given):
        axes = [groups.index([axis]) for axis in kept]
        given[name] = np.int32(axes[0]) if name == "axis" else np.array(axes, np.int32)
    made = getattr(Builder, operation.op_type)(**given, before_op=operation)
    made = views.reshaped(made, output.shape, operation)
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=output, new_var=made))


def _groups(kept: list[int], most: int, operands: list[Sequence[int]]) -> list[list[int]] | None:
    """The axes in `most` groups of neighbours that every operand can merge; None where that cannot be."""

    def mergeable(one: list[int], other: list[int]) -> bool:
        axes = one + other
        if any(axis in kept for axis in axes):
            return False
        sizes = [[operand[axis] for axis in axes] for operand in operands]
        whole = [max(each) for each in zip(*sizes, strict=True)]
        return all(each in (whole, [1] * len(axes)) for each in sizes)

    groups = [[axis] for axis in range(len(operands[0]))]
    while len(groups) > most:
        place = next((n for n, neighbours in enumerate(pairwise(groups)) if mergeable(*neighbours)), None)
        if place is None:
            return None
        groups[place : place + 2] = [groups[place] + groups[place + 1]]
    return groups


def _with(groups: list[list[int]], operand: Any, rank: int, before: Any) -> Any:
    """The operand with its axes merged as the groups say; those of rank 0 stay."""
    if operand.rank == 0:
        return operand
    shape = (1,) * (rank - operand.rank) + tuple(operand.shape)
    merged = [math.prod(shape[axis] for axis in group) for group in groups]
    if operand.val is not None:
        return operand.val.reshape(merged)
    return views.reshaped(operand, merged, before)
