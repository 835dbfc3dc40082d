"""Masks on scores: those written over them (masked_fill, where), and whether one depends on the keys alone.

The latter is proven from where the elements come from: each element gets a number, and two have the same number only
where they are proven to be equal.
"""

import math
from dataclasses import dataclass

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.site import Layout, Term

LOW = -1e4  # exp of a difference this large is 0 in every precision: replacing a score and adding to it are the same
DEPTH = 32  # operations between a mask as it is given and the scores that it joins


@dataclass(frozen=True)
class Mask:
    """`scores`, but `filling` wherever the boolean tensor `condition` is `dropped`."""

    scores: str
    condition: str
    dropped: bool
    filling: float


def masking(graph: GraphView, operation: Operation) -> Mask | None:
    """What `operation` writes over its scores; None where it does anything else."""
    given: list[str | float] = [*operation.inputs]
    if "scalar" in operation.attributes:
        given.insert(int(operation.attributes["position"]), float(operation.attributes["scalar"]))  # type: ignore[call-overload,arg-type]
    if operation.name not in ("masked_fill", "where") or len(given) != 3:
        return None
    if operation.name == "masked_fill":
        kept, condition, written = given
        choices = [(kept, written, True)]
    else:
        condition, true, false = given
        choices = [(true, false, False), (false, true, True)]
    for scores, other, dropped in choices:
        filling = _number(graph, other)
        if filling is not None and filling <= LOW and isinstance(scores, str) and isinstance(condition, str):
            return Mask(scores, condition, dropped, filling)
    return None


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
    value = term.operand.value
    known = graph.constant(value) if graph.is_constant(value) else _equals(graph, value, DEPTH)
    elements = np.broadcast_to(known, _example_shape(graph, term))
    # an axis that follows the batch is -1 in both shapes, and numpy finds its length
    read = elements.reshape(layout.split).transpose(layout.order)
    first = len(layout.batch)
    own = tuple(range(first, first + len(layout.heads) + len(layout.tokens)))
    index = tuple(slice(0, 1) if axis in own else slice(None) for axis in range(read.ndim))
    return bool((read == read[index]).all())


def _example_shape(graph: GraphView, term: Term) -> tuple[int, ...]:
    """The shape of the scores at the term, with the example's batch in it, or one image where the term has none."""
    layout: Layout = term.operand.layout
    own = graph.shape(term.operand.value)
    own = (1,) * (len(layout.shape) - len(own)) + own
    settled, split = (math.prod(size for size in sizes if size != -1) for sizes in (layout.shape, layout.split))
    open_sizes = (mine if mine > 1 else split // settled for mine in own)
    return tuple(mine if size == -1 else size for size, mine in zip(layout.shape, open_sizes, strict=True))


def _equals(graph: GraphView, value: str, depth: int) -> np.ndarray:
    """A number for each element of a value: elements of the same number are equal. Numbers start at 1."""
    shape = graph.shape(value)
    if graph.is_constant(value):
        return _renumbered(graph.constant(value))
    operation = graph.operation(value)
    directed = operation.attributes.get("directed_by")
    if depth and operation.inputs and operation.kind == "map":
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
