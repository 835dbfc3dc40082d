"""Masks that write over scores instead of joining them: masked_fill and where, with what no softmax notices."""

from dataclasses import dataclass

from attnrewrite.patterns.graph import GraphView, Operation

LOW = -1e4  # exp of a difference this large is 0 in every precision: replacing a score and adding to it are the same


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
