"""A softmax that a model writes out itself: exponentials over their sum, or of its logarithm."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation

LOG_SOFTMAX = "log softmax"  # the name of such an operation, which has an `axis` as softmax has


@dataclass(frozen=True)
class _Exponential:
    """exp(factor * scores); the scores lie at `operand`."""

    operand: str
    factor: float


def softmax_by_hand(graph: GraphView, operation: Operation) -> Operation:
    """`operation`, read as a softmax where it is exp(scores) / sum(exp(scores)) along one axis, or exp(log softmax), or
    exp(scores) whose sum divides only their product with the values: `divided` in its attributes. Powers of another
    number are exponentials of scaled scores.

    What is taken away from the scores before, most often their largest, is a term like any other.
    """
    if (exponential := _unspread(graph, operation)) is not None:
        inner = graph.operation(exponential.operand)
        if inner.name == LOG_SOFTMAX and exponential.factor == 1:
            return Operation(operation.value, "softmax", "softmax", inner.inputs, inner.attributes)
        divided = _divided_later(graph, operation.value)
        return operation if divided is None else _softmax(operation.value, exponential, divided)
    if (operation.kind, operation.name) != ("map", "div") or len(operation.inputs) != 2:
        return operation
    terms, sums = operation.inputs
    exponential = _unspread(graph, graph.operation(terms))
    total = None if exponential is None else _sum_of(graph, terms, sums)
    if exponential is None or total is None or not np.array_equal(total.rows, _rows(graph, terms, total.axis)):
        return operation
    return _softmax(operation.value, exponential, {"axis": total.axis})


def loose_scores(graph: GraphView, operation: Operation) -> str | None:
    """What `operation` is the exponential of, where it is one that no softmax is made of."""
    exponential = _exponential(graph, operation)
    if exponential is None:
        return None
    used = any(graph.operation(user).kind == "softmax" for user in _behind_moves(graph, operation.value))
    return None if used else exponential.operand


def _exponential(graph: GraphView, operation: Operation) -> _Exponential | None:
    """`operation`, where it is a power of a number: of e, of 2, or of any other above zero, but of 1."""
    if operation.kind != "map" or not operation.inputs:
        return None
    *base, exponent = operation.inputs
    if operation.name in ("exp", "exp2"):
        return _Exponential(exponent, 1.0 if operation.name == "exp" else math.log(2))
    if operation.name != "pow" or graph.is_constant(exponent):
        return None
    number = _element(graph, base[0]) if base else _left_number(operation)
    return None if number is None or number <= 0 or number == 1 else _Exponential(exponent, math.log(number))


def _unspread(graph: GraphView, operation: Operation) -> _Exponential | None:
    """`operation`, where it is an exponential of its operand's own shape: a base of more axes spreads it."""
    found = _exponential(graph, operation)
    same = found is not None and graph.shape(found.operand) == graph.shape(operation.value)
    return found if same else None


def _element(graph: GraphView, value: str) -> float | None:
    """The only element of a constant."""
    single = graph.is_constant(value) and math.prod(graph.shape(value)) == 1
    return float(graph.constant(value).reshape(())) if single else None


def _left_number(operation: Operation) -> float | None:
    """The number that stands on the left of a map's one tensor operand."""
    return cast(float, operation.attributes["scalar"]) if operation.attributes.get("position") == 0 else None


def _softmax(value: str, exponential: _Exponential, attributes: Mapping[str, object]) -> Operation:
    return Operation(value, "softmax", "softmax", (exponential.operand,), {"factor": exponential.factor, **attributes})


@dataclass(frozen=True)
class _Sum:
    """A sum along one `axis`, moved since: `rows` tells of each of its elements which row it is the sum of."""

    axis: int
    rows: np.ndarray


def _sum_of(graph: GraphView, terms: str, total: str) -> _Sum | None:
    """`total`, where it is the sum of `terms` along one axis."""
    moves = []
    summed = graph.operation(total)
    while summed.kind == "move" and len(summed.inputs) == 1:
        moves.append(summed.value)
        summed = graph.operation(summed.inputs[0])
    if (summed.kind, summed.name, summed.inputs) != ("reduce", "sum", (terms,)):
        return None
    axes = cast(tuple[int, ...], summed.attributes["axes"])
    if len(axes) != 1:
        return None
    rows = np.arange(math.prod(graph.shape(summed.value))).reshape(graph.shape(summed.value))
    for value in reversed(moves):
        rows = graph.move(value, [rows])
    return _Sum(axes[0], rows)


def _rows(graph: GraphView, terms: str, axis: int) -> np.ndarray:
    """The numbers of the rows of `terms` along `axis`, which is kept with length one."""
    kept = [1 if place == axis else size for place, size in enumerate(graph.shape(terms))]
    return np.arange(math.prod(kept)).reshape(kept)


def _divided_later(graph: GraphView, terms: str) -> Mapping[str, object] | None:
    """The `axis` of the softmax that the exponentials `terms` are, and where it is `divided`: where nothing reads them
    but a product, and that is divided by their own sum.
    """
    way = _way_to_product(graph, terms)
    if not way or len(graph.users(terms)) != 2 or len(graph.users(way[-1])) != 1:
        return None
    *moves, product = way
    division = graph.operation(graph.users(product)[0])
    if (division.name, division.inputs[:1]) != ("div", (product,)) or len(division.inputs) != 2:
        return None
    total, spread = _sum_of(graph, terms, division.inputs[1]), graph.shape(division.value)
    if total is None or spread != graph.shape(product):
        return None
    rows = np.broadcast_to(_rows(graph, terms, total.axis), graph.shape(terms))
    for value in moves:
        rows = graph.move(value, [rows])
    contracted = -1 if graph.operation(product).inputs[0] in (terms, *moves) else -2
    weighed = rows.take([0], contracted)  # the row whose terms weigh each of the product's
    whole = (rows == weighed).all()
    if not whole or not np.array_equal(np.broadcast_to(weighed, spread), np.broadcast_to(total.rows, spread)):
        return None
    return {"axis": total.axis, "divided": division.value}


def _way_to_product(graph: GraphView, terms: str) -> list[str]:
    """The moves from `terms` to the product, and that, where it alone reads them, beside their sum; else empty."""
    way: list[str] = []
    readers = [user for user in graph.users(terms) if graph.operation(user).kind != "reduce"]
    while len(readers) == 1:
        way.append(readers[0])
        if graph.operation(readers[0]).kind != "move":
            break
        readers = list(graph.users(readers[0]))
    return way if way and graph.operation(way[-1]).kind == "matmul" else []


def _behind_moves(graph: GraphView, value: str) -> Iterator[str]:
    """What reads a value, as it is or moved."""
    for user in graph.users(value):
        yield user
        if graph.operation(user).kind == "move":
            yield from _behind_moves(graph, user)
