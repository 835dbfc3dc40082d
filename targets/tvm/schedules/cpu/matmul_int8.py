"""The rule for products of integers of eight bits: what was rounded as it came, times weights that are such integers.

It knows them by what they are, not by where they come from: a value that is rounded and then bounded, and constants.
"""

import math
from typing import Any

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly
from attnrewrite.targets.tvm.schedules.cpu.dot import DEEPEST, MOST, dot_of, packed, starts
from attnrewrite.targets.tvm.schedules.cpu.integers import IntegerProduct, Words
from attnrewrite.targets.tvm.schedules.expression import Apply, Arguments, Expression, Number, joined, loads, moved
from attnrewrite.targets.tvm.schedules.graph import Graph, is_float, shape
from attnrewrite.targets.tvm.schedules.profile import Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import elementwise, trace

OTHER = "other-operator"


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, ("relax.matmul",))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    weight, rows = _weights(call.graph, node.args[1]), _rounded(call.graph, node.args[0])
    if weight is None or rows is None:
        return Refusal(OTHER, "is no product of integers with constant ones")
    dot = dot_of(profile)
    if dot is None:
        return Refusal(OTHER, "is a product of integers, for which the processor has no instructions")
    depth = len(weight)
    if depth > DEEPEST:
        return Refusal(OTHER, "sums more products of integers than fit in 32 bits")
    value, covers = rows
    *lead, _ = shape(node.args[0])
    read, tile = Arguments(), Tile(min(profile.dot_tile.rows, math.prod(lead)), profile.dot_tile.columns)
    _, value = joined([], read.loading(value), len(lead))
    assembly = Assembly((*traced.covers, *covers))
    words = Words(next(loads(value)).layout.shape[:-1], depth, tile.rows, value)
    left = assembly.add(words, read.bases, words.shape, "int32")
    given = Arguments()
    after = given.loading(traced.epilogue)
    (out,), after = joined([traced.out], after, len(lead))
    first, second = (given.number(base) for base in (left, packed(weight, tile.columns)))
    start = given.number(starts(weight, tile.columns)) if dot.unsigned else None
    assembly.add(IntegerProduct(depth, first, second, start, out, after, tile), given.bases, shape(call.var))
    return assembly.kernel()


def is_of_integers(graph: Graph, product: Any) -> bool:
    """Whether a product is one of this rule's, for which a processor may have no instructions."""
    left, right = product.args
    return _weights(graph, right) is not None and _rounded(graph, left) is not None


def _weights(graph: Graph, expression: Any) -> np.ndarray | None:
    """A constant matrix of integers of eight bits."""
    found = graph.constant(expression)
    if found is None or found.ndim != 2 or not (np.abs(found) <= MOST).all() or (found != np.rint(found)).any():
        return None
    return found.astype(np.int8)


def _rounded(graph: Graph, expression: Any) -> tuple[Expression, tuple[Any, ...]] | None:
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


MATMUL_INT8 = Rule("matmul int8", _apply)
