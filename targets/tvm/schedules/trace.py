"""From a value back to what computes it: where the result is written, what is done to it on the way.

Matching returns a record; kernels are made from it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.expression import (
    Apply,
    Expression,
    Leaf,
    Number,
    Result,
    factored,
    leaves,
    moved,
    replaced,
)
from attnrewrite.targets.tvm.schedules.graph import Graph, is_float, same, shape
from attnrewrite.targets.tvm.schedules.view import Layout, View, contiguous, inverse

ONE = (
    *("abs", "negative", "exp", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "nn.relu", "nn.gelu", "nn.silu"),
    *("log", "sin", "cos", "floor", "ceil", "round", "square"),
)
TWO = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
ORDERS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
# Their kernels do the arithmetic on their results, too.
WITH_EPILOGUE = ("relax.matmul", "relax.nn.conv2d", "relax.sum", "relax.mean")
UNARY = {f"relax.{name}": name.removeprefix("nn.") for name in ONE}
BINARY = {f"relax.{name}": name for name in TWO}
COMPARISONS = {f"relax.{name}": name for name in ORDERS}


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A value as arithmetic over views, and the variables whose operators that arithmetic is, the value's own first."""

    expression: Expression
    covers: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """The operator `anchor` behind a value, in the index space of the anchor's result.

    `out`: where the value's elements are written; `epilogue`: what becomes of the anchor's result (`Result`) before.
    """

    anchor: Any
    out: Layout
    epilogue: Expression
    covers: tuple[Any, ...]


def elementwise(graph: Graph, var: Any) -> Elementwise:
    """The arithmetic that makes a value, back to operands that others read too or that no arithmetic makes; a single
    leaf where there is none.
    """
    applied = _applied(graph, var)
    if applied is None:
        return Elementwise(Leaf(graph.view(var)), ())
    operation, operands = applied
    expressions: list[Expression] = []
    covers = [var]
    for operand in operands:
        if isinstance(operand, Number | Leaf):
            expressions.append(operand)
            continue
        inner = _inlined(graph, operand, shape(var))
        covers += inner.covers
        expressions.append(inner.expression)
    return Elementwise(_build(operation, expressions), tuple(covers))


def destination(graph: Graph, var: Any) -> tuple[Any, Layout, tuple[Any, ...]]:
    """The value that a chain of movement makes `var` from, where its elements have to be written for the buffer to be
    `var`, and the variables of the chain.
    """
    return destinations(graph, var)[-1]


def destinations(graph: Graph, var: Any) -> list[tuple[Any, Layout, tuple[Any, ...]]]:
    """The same for each step of the chain, from the value itself back to its `destination`."""
    place = contiguous(shape(var))
    found: list[tuple[Any, Layout, tuple[Any, ...]]] = [(var, place, ())]
    while (call := graph.call(var, *relax_graph.MOVEMENT)) is not None:
        operand = call.args[0]
        before = relax_graph.moved_back(call, place)
        if before is None or not graph.is_sole(operand) or not is_float(operand) or operand not in graph.definitions:
            break
        found.append((operand, before, (*found[-1][2], var)))
        var, place = operand, before
    return found


def trace(graph: Graph, var: Any, operators: tuple[str, ...]) -> Traced | Refusal:
    """The last of `operators` on the way to a value, when all that follows it is arithmetic and movement."""
    source, place, passed = destination(graph, var)
    whole = elementwise(graph, source)
    found = [
        leaf
        for leaf in leaves(whole.expression)
        if graph.call(leaf.view.base, *operators) is not None and (leaf.view.sole or same(leaf.view.base, source))
    ]
    if not found:
        return Refusal("other-operator", f"comes from none of {', '.join(operators)}")
    anchor = max(found, key=lambda leaf: relax_graph.multiply_adds(graph, leaf.view.base))
    base, taken = anchor.view.base, anchor.view.layout
    order = inverse(taken, shape(base))
    if order is None:
        return Refusal("layout", f"reads {graph.operator(base)} in an order that is no permutation of its axes")

    def move(layout: Layout) -> Layout | None:
        return layout.permute(order).reshape(shape(base))

    # Arithmetic may read it more than once, as that of a leaky rectifier does.
    marked = replaced(
        whole.expression, lambda leaf: Result() if isinstance(leaf, Leaf) and same(leaf.view.base, base) else leaf
    )
    assert marked is not None
    out, epilogue = move(place), moved(marked, move)
    if out is None or epilogue is None:
        return Refusal("layout", f"writes or reads beside {graph.operator(base)} what no strides describe")
    covers = (*passed, *whole.covers, base)
    return Traced(base, out, epilogue, tuple(dict.fromkeys(covers)))


def operand(graph: Graph, var: Any) -> Elementwise:
    """What an operator reads as one operand: arithmetic that nobody else reads, else a view.

    Arithmetic on the result of a product is left to the product's own kernel, and so is what moves it, unless that only
    takes a part of it.
    """
    found = _inlined(graph, var, shape(var))
    if any(_is_computed(graph, leaf) for leaf in leaves(found.expression)) and found.covers:
        source, *_ = destination(graph, var)
        whole = same(graph.view(source).base, source)
        view = View(var, contiguous(shape(var)), graph.is_sole(var)) if whole else graph.view(var)
        return Elementwise(Leaf(view), ())
    return found


def scaled_view(graph: Graph, var: Any) -> tuple[Leaf, float, tuple[Any, ...]]:
    """An operand as a view times a number, and the variables whose operators the scaling is."""
    found = operand(graph, var)
    inner, factor = factored(found.expression)
    if isinstance(inner, Leaf):
        return inner, factor, found.covers
    return Leaf(graph.view(var)), 1.0, ()


def _is_computed(graph: Graph, leaf: Leaf) -> bool:
    return leaf.view.sole and graph.call(leaf.view.base, *WITH_EPILOGUE) is not None


def _inlined(graph: Graph, var: Any, space: tuple[int, ...]) -> Elementwise:
    """An operand broadcast to an index space, with the arithmetic behind it where this is its only reader."""
    number = graph.number(var)
    if number is not None:
        return Elementwise(Number(number), ())
    if math.prod(shape(var)) < math.prod(space):
        return _leaf(graph, var, space)  # what is read many times is computed once
    moves: list[Any] = []
    source = var
    while graph.is_sole(source):
        if _applied(graph, source) is not None:
            return _moved_inline(graph, source, moves, space) or _leaf(graph, var, space)
        call = graph.call(source, *relax_graph.MOVEMENT)
        if call is None or not isinstance(graph.definitions.get(source), relax.Call):
            break
        moves.append(call)
        source = call.args[0]
    return _leaf(graph, var, space)


def _moved_inline(graph: Graph, source: Any, moves: list[Any], space: tuple[int, ...]) -> Elementwise | None:
    inner = elementwise(graph, source)

    def move(layout: Layout) -> Layout | None:
        for call in reversed(moves):
            if (after := relax_graph.movement(call, layout)) is None:
                return None
            layout = after
        return layout.expand(space)

    expression = moved(inner.expression, move)
    return None if expression is None else Elementwise(expression, inner.covers)


def _leaf(graph: Graph, var: Any, space: tuple[int, ...]) -> Elementwise:
    view = graph.view(var)
    return Elementwise(Leaf(replace(view, layout=view.layout.expand(space))), ())


def _applied(graph: Graph, var: Any) -> tuple[str, list[Any]] | None:
    """The operation that gives a value, and its operands (variables, numbers, leaves), if it is one on elements."""
    if not is_float(var):
        return None
    value = graph.value(var)
    if isinstance(value, relax.TupleGetItem):
        return _batch_norm(graph, value, shape(var))
    call = graph.call(value)
    if call is None:
        return None
    name = call.op.name
    if name in UNARY and is_float(call.args[0]):
        return UNARY[name], [call.args[0]]
    if name in BINARY and all(map(is_float, call.args)):
        return BINARY[name], list(call.args)
    if name == "relax.clip":
        return "clip", [call.args[0], *(Number(graph.number(bound)) for bound in call.args[1:])]  # type: ignore[arg-type]
    if name == "relax.power" and all(map(is_float, call.args)):
        return ("square", [call.args[0]]) if graph.number(call.args[1]) == 2 else ("power", list(call.args))
    if name == "relax.nn.leakyrelu" and float(call.attrs.alpha) <= 1:
        return "leaky", [call.args[0], Number(float(call.attrs.alpha))]
    if name == "relax.where" and all(map(is_float, call.args[1:])):
        compared = graph.call(call.args[0], *COMPARISONS)
        if compared is not None and graph.is_sole(call.args[0]) and all(map(is_float, compared.args)):
            return f"where_{COMPARISONS[compared.op.name]}", [*compared.args, *call.args[1:]]
    return None


def _batch_norm(graph: Graph, item: Any, space: tuple[int, ...]) -> tuple[str, list[Any]] | None:
    """Normalisation over the batch with trained statistics: a factor and a summand for each channel."""
    call = graph.call(item.tuple_value, "relax.nn.batch_norm")
    if call is None or item.index != 0 or call.attrs.training:
        return None
    found = [graph.constant(argument) for argument in call.args[1:5]]
    values = [array for array in found if array is not None]
    if len(values) != len(found):
        return None
    gamma, beta, mean, variance = (array.astype(np.float64) for array in values)
    factor = (gamma if call.attrs.scale else 1.0) / np.sqrt(variance + float(call.attrs.epsilon))
    summand = (beta if call.attrs.center else 0.0) - mean * factor
    axis = int(call.attrs.axis) % len(space)
    strides = tuple(1 if index == axis else 0 for index in range(len(space)))
    layout = Layout(space, strides)
    scale, shift = (Leaf(View(array.astype(np.float32), layout)) for array in (factor, summand))
    return "scale_and_shift", [call.args[0], scale, shift]


def _build(operation: str, operands: list[Expression]) -> Expression:
    """An operation in those that kernels know."""
    if operation == "clip":
        value, low, high = operands
        return Apply("minimum", (high, Apply("maximum", (low, value))))
    if operation == "leaky":
        value, slope = operands
        return Apply("maximum", (Apply("multiply", (value, slope)), value))
    if operation == "scale_and_shift":
        value, scale, shift = operands
        return Apply("add", (Apply("multiply", (value, scale)), shift))
    if operation in ("maximum", "minimum") and isinstance(operands[1], Number):
        operands = operands[::-1]  # a number first: so that what is not a number stays none
    return Apply(operation, tuple(operands))
