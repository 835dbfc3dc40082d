"""Integers of eight bits in a graph of floating-point values: constants, and what is rounded and bounded to be such.

They are known by what they are, not by where they come from.
"""

from typing import Any

import numpy as np

from attnrewrite.targets.tvm.schedules.expression import Apply, Expression, Number, moved
from attnrewrite.targets.tvm.schedules.graph import Graph, is_float, shape
from attnrewrite.targets.tvm.schedules.trace import elementwise

MOST = 127  # of the integers, and of their negatives


def is_of_integers(graph: Graph, product: Any) -> bool:
    """Whether both operands of a product are, for which a processor may have no instructions."""
    left, right = product.args
    return integer_weights(graph, right) is not None and rounded(graph, left) is not None


def integer_weights(graph: Graph, expression: Any) -> np.ndarray | None:
    """A constant matrix of integers of eight bits."""
    found = graph.constant(expression)
    if found is None or found.ndim != 2 or not (np.abs(found) <= MOST).all() or (found != np.rint(found)).any():
        return None
    return found.astype(np.int8)


def rounded(graph: Graph, expression: Any) -> tuple[Expression, tuple[Any, ...]] | None:
    """What is rounded and bounded to integers of eight bits to be a value, over its own shape, and what that covers."""
    if not is_float(expression):
        return None
    view = graph.view(expression)
    if isinstance(view.base, np.ndarray) or not view.layout.is_contiguous():
        return None
    found = elementwise(graph, view.base)
    inner = _before_rounding(found.expression)
    value = None if inner is None else moved(inner, lambda layout: layout.reshape(shape(expression)))
    return None if value is None else (value, found.covers)


def _before_rounding(value: Expression) -> Expression | None:
    for operation, bound in (("minimum", MOST), ("maximum", -MOST)):
        if not isinstance(value, Apply) or value.operation != operation or value.operands[0] != Number(bound):
            return None
        value = value.operands[1]
    return value.operands[0] if isinstance(value, Apply) and value.operation == "round" else None
