"""What joins scores: masks written over them (masked_fill, where), and along which axes a tensor is proven to be equal.

The latter is proven from where the elements come from: each element gets a number, and two have the same number only
where they are proven to be equal.
"""

import math
from dataclasses import dataclass

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.provenance import numbered
from attnrewrite.site import Layout, Term

LOW = -1e4  # what is written over scores is a mask, and not a score like others, from here on down
DEPTH = 32  # operations between a mask as it is given and the scores that it joins


@dataclass(frozen=True)
class Mask:
    """`scores`, but `filling` wherever the boolean tensor `condition` is `dropped`."""

    scores: str
    condition: str
    dropped: bool
    filling: float


def masking(graph: GraphView, operation: Operation) -> Mask | None:
    """The mask that `operation` writes over its scores; None where it does anything else."""
    return next((mask for mask in written_over(graph, operation) if mask.filling <= LOW), None)


def written_over(graph: GraphView, operation: Operation) -> list[Mask]:
    """What `operation` is as one number written over a tensor, either way round for two numbers."""
    given: list[str | float] = [*operation.inputs]
    if "scalar" in operation.attributes:
        given.insert(int(operation.attributes["position"]), float(operation.attributes["scalar"]))  # type: ignore[call-overload,arg-type]
    if operation.name not in ("masked_fill", "where") or len(given) != 3:
        return []
    if operation.name == "masked_fill":
        kept, condition, written = given
        choices = [(kept, written, True)]
    else:
        condition, true, false = given
        choices = [(true, false, False), (false, true, True)]
    numbers = [(kept, _number(graph, written), dropped) for kept, written, dropped in choices]
    return [
        Mask(kept, condition, dropped, number)
        for kept, number, dropped in numbers
        if number is not None and isinstance(kept, str) and isinstance(condition, str)
    ]


def _number(graph: GraphView, value: str | float) -> float | None:
    """The one number that all elements of a constant are."""
    if isinstance(value, float):
        return value
    if not graph.is_constant(value):
        return None
    elements = graph.constant(value)
    same = elements.size > 0 and bool((elements == elements.flat[0]).all())
    return float(elements.flat[0]) if same else None


def is_of_keys(graph: GraphView, term: Term) -> bool:
    """Whether `term`, read as [batch, heads, queries, keys], is the same for all heads and queries."""
    layout = term.operand.layout
    return _is_same_along(graph, term, (*layout.heads, *layout.tokens))


def is_of_heads(graph: GraphView, term: Term) -> bool:
    """Whether `term`, read as [batch, heads, queries, keys], is the same for all queries and keys."""
    layout = term.operand.layout
    return _is_same_along(graph, term, (*layout.tokens, *layout.channels))


def _is_same_along(graph: GraphView, term: Term, axes: tuple[int, ...]) -> bool:
    """Whether `term` is proven to have equal elements along these axes of its layout's `split`."""
    layout = term.operand.layout
    elements = np.broadcast_to(_numbers(graph, term.operand.value, DEPTH), _example_shape(graph, term))
    # an axis that follows the batch is -1 in both shapes, and numpy finds its length
    read = elements.reshape(layout.split)
    index = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(read.ndim))
    return bool((read == read[index]).all())


def _numbers(graph: GraphView, value: str, depth: int) -> np.ndarray:
    """Equal only where elements are equal: those of a constant itself, else numbers for them."""
    return graph.constant(value) if graph.is_constant(value) else _equals(graph, value, depth)


def is_of_queries(graph: GraphView, operand: str, index: np.ndarray, keys: int, stride: int) -> bool:
    """Whether adding `operand` to scores adds one number to all keys of each query, which no softmax over them sees.

    `index` are the scores' elements as they lie there, numbered as their product made them: the key of element i is
    i // `stride` modulo `keys`. Only what is broadcast over the keys is looked at.
    """
    shape = graph.shape(operand)
    if np.prod(shape, dtype=int) * keys > index.size or np.unique(index).size < index.size or index.min() < 0:
        return False
    own = np.broadcast_to(numbered(shape), index.shape)
    by_score = np.empty(index.size, np.int64)
    by_score[index.reshape(-1)] = own.reshape(-1)
    by_key = by_score.reshape(-1, keys, stride)
    return bool((by_key == by_key[:, :1]).all())


def _example_shape(graph: GraphView, term: Term) -> tuple[int, ...]:
    """The shape of the scores at the term, with the example's batch in it, or one image where the term has none."""
    layout: Layout = term.operand.layout
    own = graph.shape(term.operand.value)
    own = (1,) * (len(layout.shape) - len(own)) + own
    settled, split = (math.prod(size for size in sizes if size != -1) for sizes in (layout.shape, layout.split))
    open_sizes = (mine if mine > 1 else max(1, split // settled) for mine in own)
    return tuple(mine if size == -1 else size for size, mine in zip(layout.shape, open_sizes, strict=True))


def _equals(graph: GraphView, value: str, depth: int) -> np.ndarray:
    """A number for each element of a value: elements of the same number are equal. Numbers start at 1."""
    shape = graph.shape(value)
    if graph.is_constant(value):
        return _renumbered(graph.constant(value))
    operation = graph.operation(value)
    directed = operation.attributes.get("directed_by")
    if depth and operation.inputs and operation.kind == "map" and not operation.attributes.get("random"):
        parts = [np.broadcast_to(_equals(graph, operand, depth - 1), shape) for operand in operation.inputs]
        numbers = parts[0]
        for part in parts[1:]:
            numbers = _renumbered(numbers * (part.max(initial=0) + 1) + part)
        return numbers
    if depth and operation.kind == "move" and not directed:
        before = 0
        arrays = []
        for operand in operation.inputs:  # what is put in between (padding) becomes 0
            arrays.append(_equals(graph, operand, depth - 1) + before)
            before = int(arrays[-1].max(initial=before))
        return graph.move(value, arrays) + 1
    return np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape)


def _renumbered(elements: np.ndarray) -> np.ndarray:
    _, numbers = np.unique(elements, return_inverse=True)
    return numbers.reshape(elements.shape).astype(np.int64) + 1
