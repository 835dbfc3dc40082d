"""How values of a graph relate: which are computed from which, and what lies between a projection and its product."""

import itertools
from collections import deque
from collections.abc import Iterator

from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.provenance import Tracer


def batch_size(graph: GraphView) -> int:
    """How many images a graph is read with: those of its first input."""
    inputs = [graph.shape(value) for value in graph.values if graph.operation(value).kind == "input"]
    return inputs[0][0] if inputs and inputs[0] else 1


def ancestors(graph: GraphView, value: str, stop: frozenset[str] = frozenset()) -> dict[str, None]:
    """The values that `value` is computed from, nearest first, itself included; kinds in `stop` end the walk."""
    return dict.fromkeys(_walk_back(graph, value, stop))


def _walk_back(graph: GraphView, value: str, stop: frozenset[str] = frozenset()) -> Iterator[str]:
    """The `ancestors` of a value one by one, as far as they are asked for."""
    found = {value}
    ahead = deque([value])
    while ahead:
        current = ahead.popleft()
        yield current
        operation = graph.operation(current)
        if operation.kind in stop and current != value:
            continue
        for operand in operation.inputs:
            if operand not in found and not graph.is_constant(operand):
                found.add(operand)
                ahead.append(operand)


def earlier_of(graph: GraphView, one: str, other: str) -> str | None:
    """Which of two values the other is made from; None where neither is. Both are walked back from side by side, as
    one of them may have the whole graph behind it.
    """
    for behind_one, behind_other in itertools.zip_longest(_walk_back(graph, one), _walk_back(graph, other)):
        if behind_one == other:
            return other
        if behind_other == one:
            return one
    return None


_ATTENTION = frozenset({"matmul", "sdpa", "softmax"})


def is_cross(graph: GraphView, query: str, key: str) -> bool:
    """Whether queries and keys belong to different token streams.

    They belong to the same one when either is made from the other without passing through another attention
    (reduced keys, pooled queries, a class token that is a slice of the tokens), or both are the same value. Learned
    queries that attend to tokens are another stream.
    """
    if graph.is_constant(query) or graph.is_constant(key):
        return graph.is_constant(query) != graph.is_constant(key)
    query_stream = _stream(graph, query)
    key_stream = _stream(graph, key)
    if query_stream == key_stream:
        return False
    return key_stream not in ancestors(graph, query_stream, _ATTENTION) and query_stream not in ancestors(
        graph, key_stream, _ATTENTION
    )


def _stream(graph: GraphView, value: str) -> str:
    """The tokens behind a value: past movement, normalisation and what is added to it from constants."""
    while True:
        operation = graph.operation(value)
        live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
        if operation.kind not in ("move", "map", "norm") or len(set(live)) != 1:
            return value
        value = live[0]


def uses_norm(graph: GraphView, layout: Tracer, value: str) -> bool:
    """Whether an operand is normalised between its projection and the product."""
    for crossed in layout.trace(value).crossed:
        operation = graph.operation(crossed)
        if operation.kind == "norm" and operation.attributes["style"] != "batch":
            return True
        if operation.kind == "map" and operation.name in ("div", "mul"):
            others = [o for o in operation.inputs if not graph.is_constant(o)]
            if any(graph.operation(a).kind == "reduce" for o in others for a in _nearby(graph, o)):
                return True
    return False


def _nearby(graph: GraphView, value: str, steps: int = 6) -> list[str]:
    """A value and what it is made of through single-operand movement and maps."""
    chain = [value]
    while steps:
        operation = graph.operation(chain[-1])
        if operation.kind not in ("move", "map") or len(operation.inputs) != 1:
            break
        chain.append(operation.inputs[0])
        steps -= 1
    return chain


def uses_rotation(graph: GraphView, layout: Tracer, value: str) -> bool:
    """Whether an operand is the sum of two products of itself, as rotary embeddings are: x cos + rotate(x) sin
    (Su et al. 2021, RoFormer, equation 34)."""
    for crossed in layout.trace(value).crossed:
        operation = graph.operation(crossed)
        live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
        is_sum = operation.name in ("add", "sub") and len(live) == 2
        if is_sum and _origins(graph, layout, live[0]) & _origins(graph, layout, live[1]):
            return True
    return False


def _origins(graph: GraphView, layout: Tracer, value: str) -> set[str]:
    """The sources of a value, also those behind a joint of parts with unlike factors (half of them negated)."""
    found: set[str] = set()
    for source in layout.trace(value).sources:
        operation = graph.operation(source)
        if operation.kind == "move" and not operation.attributes.get("directed_by"):
            found.update(*(_origins(graph, layout, operand) for operand in operation.inputs))
        else:
            found.add(source)
    return found


def region(graph: GraphView, start: tuple[str, ...], end: str) -> tuple[str, ...]:
    """The values strictly after `start` and up to `end`, in graph order."""
    known = set(start)
    found: set[str] = set()
    pending = [end]
    while pending:
        value = pending.pop()
        if value in known or value in found or graph.is_constant(value):
            continue
        found.add(value)
        pending.extend(graph.operation(value).inputs)
    return tuple(value for value in graph.values if value in found)


def common_scope(graph: GraphView, values: tuple[str, ...]) -> str:
    """The innermost module that computes all the values."""
    paths = [graph.scope(value).split(".") for value in values]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)
