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
    number are exponentials of scaled scores, and a product with the inverse of a sum is a quotient.

    What is taken away from the scores before, most often their largest, is a term like any other.
    """
    if (exponential := _unspread(graph, operation)) is not None:
        inner = graph.operation(exponential.operand)
        axis = _axis_of_logarithm(graph, inner) if exponential.factor == 1 else None
        if axis is not None:
            return Operation(operation.value, "softmax", "softmax", inner.inputs[:1], {"axis": axis})
        divided = _divided_later(graph, operation.value)
        return operation if divided is None else _softmax(operation.value, exponential, divided)
    quotient = _quotient(graph, operation)
    if quotient is None:
        return operation
    terms, sums = quotient
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


def _axis_of_logarithm(graph: GraphView, operation: Operation) -> int | None:
    """The axis of the softmax whose logarithm `operation` is: scores less the logarithm of their exponentials' sum."""
    if operation.name == LOG_SOFTMAX:
        return cast(int, operation.attributes["axis"])
    if operation.name != "sub" or len(operation.inputs) != 2 or operation.attributes.get("alpha", 1) != 1:
        return None
    scores, total = operation.inputs
    found = _sum_of(graph, scores, total, "logsumexp")
    whole = found is not None and np.array_equal(found.rows, _rows(graph, scores, found.axis))
    return found.axis if found is not None and whole else None


def _quotient(graph: GraphView, operation: Operation) -> tuple[str, str] | None:
    """What `operation` divides, and by what."""
    if operation.kind != "map" or len(operation.inputs) != 2:
        return None
    first, second = operation.inputs
    if operation.name == "div":
        return first, second
    if operation.name == "mul":
        for value, other in ((first, second), (second, first)):
            if (divisor := _inverted(graph, other)) is not None:
                return value, divisor
    return None


def _inverted(graph: GraphView, value: str) -> str | None:
    """What `value` is one over: its reciprocal (times one, as torch writes 1 / x), 1 / x, x ** -1."""
    operation = graph.operation(value)
    if operation.name == "reciprocal":
        return operation.inputs[0]
    match operation.name, _number_beside(graph, operation):
        case ("div", (operand, 1.0, 0)) | ("pow", (operand, -1.0, 1)):
            return operand
        case "mul", (operand, 1.0, _):
            return _inverted(graph, operand)
    return None


def _number_beside(graph: GraphView, operation: Operation) -> tuple[str, float, int] | None:
    """The one operand of a map that is no constant, the number beside it, and on which side that stands: left (0)."""
    live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
    if operation.kind != "map" or len(live) != 1:
        return None
    if "scalar" in operation.attributes:
        number, side = operation.attributes["scalar"], operation.attributes["position"]
        return live[0], float(cast(float, number)), cast(int, side)
    for side, operand in enumerate(operation.inputs):
        if operand != live[0] and (element := _element(graph, operand)) is not None:
            return live[0], element, side
    return None


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


def _sum_of(graph: GraphView, terms: str, total: str, name: str = "sum") -> _Sum | None:
    """`total`, where it is the sum of `terms` (or another reduction, called `name`) along one axis."""
    moves = []
    summed = graph.operation(total)
    while summed.kind == "move" and len(summed.inputs) == 1:
        moves.append(summed.value)
        summed = graph.operation(summed.inputs[0])
    if (summed.kind, summed.name, summed.inputs) != ("reduce", name, (terms,)):
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
    quotient = _quotient(graph, division)
    if quotient is None or quotient[0] != product:
        return None
    total, spread = _sum_of(graph, terms, quotient[1]), graph.shape(division.value)
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
