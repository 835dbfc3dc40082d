"""Attention that is quantised: what stands from the borders before an anchor to its product with the values.

An operation that rounds to integers, or computes on them, says so: its attribute `quantized` is the way out.
"""

from typing import cast

from attnrewrite.patterns.graph import ComputedConstants, GraphView
from attnrewrite.site import NearMiss

UNQUANTISED = "give the model before quantization"
NEAR = 256  # values: an attention has fewer, and a graph may be long
_BORDERS = frozenset({"linear", "conv", "norm", "softmax", "sdpa", "input", "constant"})


def quantised_around(graph: GraphView, value: str) -> NearMiss | None:
    """The near miss that an anchor is where something between its projections and its products still is quantised."""
    graph = cast(GraphView, ComputedConstants(graph))
    for near in inside(graph, value):
        operation = graph.operation(near)
        way_out = operation.attributes.get("quantized")
        if way_out and not graph.is_constant(near):
            why = f"{operation.name} ({near}) quantizes what it reads or makes, and cannot be left out; {way_out}"
            return NearMiss("quantized", why, graph.operation(value).kind, value, (value,))
    return None


def inside(graph: GraphView, value: str) -> list[str]:
    """The values from the borders before an anchor to its product with the values, both products included."""
    anchor = graph.operation(value)
    if anchor.kind not in ("softmax", "sdpa") or graph.is_constant(value):
        return []
    ahead, products = [value], [value] if anchor.kind == "sdpa" else []
    for current in ahead:
        for user in graph.users(current) if not products and len(ahead) <= NEAR else ():
            operation = graph.operation(user)
            if operation.kind == "matmul" and not all(graph.is_constant(o) for o in operation.inputs if o != current):
                products.append(user)
            elif operation.kind not in _BORDERS and user not in ahead and operation.name != "output":
                ahead.append(user)
    found = [*ahead, *(product for product in products if product not in ahead)]
    for current in found:
        for operand in graph.operation(current).inputs:
            border = graph.operation(operand).kind in _BORDERS or graph.is_constant(operand)
            if not border and operand not in found and len(found) <= NEAR:
                found.append(operand)
    return found
