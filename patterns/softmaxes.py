"""A softmax that a model writes out itself: exponentials over their sum, or of its logarithm."""

import math
from typing import cast

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation

LOG_SOFTMAX = "log softmax"  # the name of such an operation, which has an `axis` as softmax has


def softmax_by_hand(graph: GraphView, operation: Operation) -> Operation:
    """`operation`, read as a softmax where it is exp(scores) / sum(exp(scores)) along one axis, or exp(log softmax).

    What is taken away from the scores before, most often their largest, is a term like any other.
    """
    if (operation.kind, operation.name) == ("map", "exp"):
        inner = graph.operation(operation.inputs[0])
        if inner.name == LOG_SOFTMAX:
            return Operation(operation.value, "softmax", "softmax", inner.inputs, inner.attributes)
    if (operation.kind, operation.name) != ("map", "div") or len(operation.inputs) != 2:
        return operation
    exponentials, total = operation.inputs
    exponential = graph.operation(exponentials)
    if (exponential.kind, exponential.name) != ("map", "exp"):
        return operation
    axis = _summed_axis(graph, exponentials, total)
    if axis is None:
        return operation
    return Operation(operation.value, "softmax", "softmax", exponential.inputs, {"axis": axis})


def _summed_axis(graph: GraphView, terms: str, total: str) -> int | None:
    """The axis of `terms` that `total` is the sum along, kept with length one; None where it is anything else."""
    moves = []
    summed = graph.operation(total)
    while summed.kind == "move" and len(summed.inputs) == 1:
        moves.append(summed.value)
        summed = graph.operation(summed.inputs[0])
    if (summed.kind, summed.name, summed.inputs) != ("reduce", "sum", (terms,)):
        return None
    axes = cast(tuple[int, ...], summed.attributes["axes"])
    kept = [1 if place in axes else size for place, size in enumerate(graph.shape(terms))]
    places = np.arange(math.prod(kept))
    moved = places.reshape(graph.shape(summed.value))
    for value in reversed(moves):
        moved = graph.move(value, [moved])
    stays = moved.shape == tuple(kept) and np.array_equal(moved.reshape(-1), places)
    return axes[0] if stays and len(axes) == 1 else None
