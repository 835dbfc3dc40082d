"""A softmax that a model writes out itself: exponentials over their sum, or of its logarithm."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation

LOG_SOFTMAX = "log softmax"  # the name of such an operation, which has an `axis` as softmax has


def softmax_by_hand(graph: GraphView, operation: Operation) -> Operation:
    """`operation`, read as a softmax where it is exp(scores) / sum(exp(scores)) along one axis, or exp(log softmax), or
    exp(scores) whose sum divides only their product with the values: `divided` in its attributes.

    What is taken away from the scores before, most often their largest, is a term like any other.
    """
    if (operation.kind, operation.name) == ("map", "exp"):
        inner = graph.operation(operation.inputs[0])
        if inner.name == LOG_SOFTMAX:
            return Operation(operation.value, "softmax", "softmax", inner.inputs, inner.attributes)
        return _divided_later(graph, operation) or operation
    if (operation.kind, operation.name) != ("map", "div") or len(operation.inputs) != 2:
        return operation
    exponential = graph.operation(operation.inputs[0])
    if (exponential.kind, exponential.name) != ("map", "exp"):
        return operation
    total = _sum_of(graph, exponential.value, operation.inputs[1])
    if total is None or not np.array_equal(total.rows, _rows(graph, exponential.value, total.axis)):
        return operation
    return Operation(operation.value, "softmax", "softmax", exponential.inputs, {"axis": total.axis})


def is_loose(graph: GraphView, operation: Operation) -> bool:
    """Whether `operation` is an exponential that no softmax is made of."""
    if operation.kind != "map" or operation.name not in ("exp", "exp2"):
        return False
    return not any(graph.operation(user).kind == "softmax" for user in _behind_moves(graph, operation.value))


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


def _divided_later(graph: GraphView, exponential: Operation) -> Operation | None:
    """exp(scores) as a softmax, where nothing reads them but a product, and that is divided by their own sum."""
    terms = exponential.value
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
    attributes = {"axis": total.axis, "divided": division.value}
    return Operation(terms, "softmax", "softmax", exponential.inputs, attributes)


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
