"""What a graph answers: the logits of a classifier, or features whose largest element means nothing."""

from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.relations import ancestors
from attnrewrite.patterns.softmaxes import LOG_SOFTMAX

_PROBABILITIES = frozenset(("softmax", LOG_SOFTMAX, "sigmoid", "log_sigmoid"))
_JOINED = frozenset(("cat", "concat", "stack"))
_OVER_PLACES = frozenset(("mean", "sum", "max", "amax"))
_SHIFTS, _SCALES = frozenset(("add", "sub")), frozenset(("mul", "div"))


def are_logits(graph: GraphView, value: str) -> bool:
    """Whether `value` holds probabilities, or what linear maps with a bias (or a constant factor) give: one map, or the
    mean or sum of several heads'.

    What a norm, a residual stream, a pooling of tokens or a projection without a bias gives is taken for an embedding.
    """
    adjusted = False  # by a constant, added or multiplied with: a bias, a temperature
    while True:
        operation = graph.operation(value)
        if operation.name in _PROBABILITIES:
            return True
        if operation.kind in ("linear", "conv"):
            return adjusted or len(operation.inputs) > 2
        live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
        if operation.kind == "matmul" and len(live) > 1:  # of pictures by texts
            return True
        if len(live) > 1:
            return _are_of_heads(graph, operation, live)
        if not live or not _keeps_classes(operation):
            return False
        adjusted = adjusted or (operation.kind == "map" and operation.name != "identity")
        value = live[0]


def _keeps_classes(operation: Operation) -> bool:
    """Whether an operation on one tensor moves, scales, shifts, or takes an average or the largest over places."""
    if operation.kind == "map":
        return operation.name in {"identity", *_SHIFTS, *_SCALES}
    over_places = operation.kind == "pool" or (operation.kind == "reduce" and operation.name in _OVER_PLACES)
    return operation.kind == "move" or over_places


def _are_of_heads(graph: GraphView, operation: Operation, operands: list[str]) -> bool:
    """Whether all operands are logits and none is made of another, as what a residual connection adds is."""
    if operation.name not in _SHIFTS | _JOINED:
        return False
    apart = all(one not in ancestors(graph, other) for one in operands for other in operands if one != other)
    return apart and all(are_logits(graph, operand) for operand in operands)
