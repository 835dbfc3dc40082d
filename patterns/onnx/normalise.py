"""What an ONNX node means in the matcher's vocabulary: one function for each operator whose meaning has conditions."""

import math
from collections.abc import Sequence
from typing import Protocol

import onnx_ir as ir

from attnrewrite.patterns.graph import GraphView, Kind, Operation
from attnrewrite.patterns.onnx.operators import BINARY, MOVED, QUANTISED, SHAPE_ONLY, SIMPLE, UNQUANTISED_FILE
from attnrewrite.patterns.onnx.prepare import Prepared
from attnrewrite.patterns.onnx.recognise import normalised_by_hand
from attnrewrite.patterns.onnx.sizes import PRIVATE
from attnrewrite.patterns.onnx.writer import integer, number
from attnrewrite.patterns.softmaxes import LOG_SOFTMAX


class OnnxView(GraphView, Protocol):
    """What the meaning of a node depends on, beyond GraphView."""

    prepared: Prepared

    def dtype(self, value: str) -> int:
        """The element type, as ONNX numbers them."""

    def is_sized(self, value: str) -> bool:
        """Whether the size and type of a value are known: they do not depend on the data."""

    def is_stored(self, value: str) -> bool:
        """Whether a constant is an initialiser, as it stands or with its axes moved: a weight."""


def moved(node: ir.Node) -> list[int]:
    """The places of the operands whose elements a movement carries."""
    return list(range(len(node.inputs))) if node.op_type == "Concat" else list(MOVED.get(node.op_type, (0,)))


def normalise(graph: OnnxView, value: str, node: ir.Node) -> Operation:
    """The operation that makes `value`, an output of `node`."""
    inputs = tuple(str(operand.name) for operand in node.inputs if operand is not None)
    if node.domain == PRIVATE:
        return _attention(graph, value, node, inputs)
    special = _SPECIAL.get(node.op_type)
    if special is not None:
        return special(graph, value, node, inputs)
    if node.op_type in SHAPE_ONLY and graph.is_constant(value):
        return Operation(value, "other", node.op_type, ())  # what is made of a known size is made of no elements
    kind, name = SIMPLE.get(node.op_type, ("other", node.op_type))
    if kind == "move":
        return _movement(graph, value, node, name)
    if kind == "map" and name == "identity":
        return _identity(graph, value, node, inputs)
    if kind == "map" and node.op_type in QUANTISED:
        units = all(graph.is_constant(unit) for unit in inputs[1:])
        return Operation(value, kind, name, inputs[:1] if units else inputs, {"quantized": UNQUANTISED_FILE})
    if node.op_type == "Clip" and all(graph.is_constant(bound) for bound in inputs[1:]):
        return Operation(value, kind, name, inputs[:1])
    if kind == "map":
        by_hand = normalised_by_hand(node) if node.op_type == "Div" else None
        if by_hand is not None:
            return Operation(value, "norm", "layer_norm", (by_hand,), {"style": "layer_norm"})
        return _map(graph, value, node, name, inputs)
    if kind == "norm":
        return Operation(value, kind, name, inputs, _norm_attributes(graph, node, name, inputs))
    if kind == "reduce":
        return Operation(value, kind, name, inputs[:1], {"axes": _reduced_axes(graph, node, inputs)})
    if kind == "pool":
        return Operation(value, kind, name, inputs[:1])
    return Operation(value, kind, name, inputs, {"quantized": UNQUANTISED_FILE} if node.op_type in QUANTISED else {})


def _identity(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    """The same elements; not whole numbers or truth values made of fractions, nor what a training dropout leaves."""
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        trains = str(node.inputs[2].name)
        if not graph.is_constant(trains) or graph.constant(trains).any():
            return Operation(value, "map", "dropout", inputs[:1], {"random": True})
    if not graph.is_sized(inputs[0]):  # nor is its type
        return Operation(value, "map", "identity", inputs[:1])
    before, after = (ir.DataType(graph.dtype(name)) for name in (inputs[0], value))
    fractions = before.is_floating_point() and not after.is_floating_point()
    rounds = fractions or (after == ir.DataType.BOOL and before != ir.DataType.BOOL)
    return Operation(value, "map", f"cast to {after.name.lower()}" if rounds else "identity", inputs[:1])


def _norm_attributes(graph: OnnxView, node: ir.Node, name: str, inputs: tuple[str, ...]) -> dict[str, object]:
    """How it normalises. A BatchNorm by stored statistics is a fixed affine map; by the batch's own it is none."""
    if name != "batch":
        return {"style": name}
    if integer(node, "training_mode") or not all(graph.is_constant(stored) for stored in inputs[1:]):
        return {"style": "batch_statistics"}
    _, weight, bias, mean, variance = inputs
    epsilon = number(node, "epsilon")
    stored = {"weight": weight, "bias": bias, "mean": mean, "variance": variance}
    return {"style": "batch", "epsilon": 1e-5 if epsilon is None else epsilon, **stored}


def _reduced_axes(graph: OnnxView, node: ir.Node, inputs: tuple[str, ...]) -> tuple[int, ...]:
    rank = len(graph.shape(inputs[0]))
    given: Sequence[int] = range(rank)
    if "axes" in node.attributes:
        given = node.attributes["axes"].as_ints()
    elif len(inputs) > 1:
        given = graph.constant(inputs[1]).reshape(-1).tolist() if graph.is_constant(inputs[1]) else ()
    return tuple(axis % rank for axis in given)


def _movement(graph: OnnxView, value: str, node: ir.Node, name: str) -> Operation:
    carried = moved(node)
    others = [operand for place, operand in enumerate(node.inputs) if place not in carried and operand is not None]
    reflects = node.op_type == "Pad" and "mode" in node.attributes and node.attributes["mode"].value != "constant"
    inputs = tuple(str(node.inputs[place].name) for place in carried)  # type: ignore[union-attr]
    adds = "reduction" in node.attributes and node.attributes["reduction"].value != "none"
    settled = not (reflects or adds) and all(graph.is_constant(str(operand.name)) for operand in others)
    return Operation(value, "move" if settled else "other", name if settled else node.op_type, inputs)


def _map(graph: OnnxView, value: str, node: ir.Node, name: str, inputs: tuple[str, ...]) -> Operation:
    """A map; the one-element constant of a binary one becomes a number."""
    if node.op_type in BINARY and len(inputs) == 2:
        for position, operand in enumerate(inputs):
            other = inputs[1 - position]
            single = math.prod(graph.shape(operand)) == 1 and graph.shape(other) == graph.shape(value)
            if single and graph.is_constant(operand) and not graph.is_constant(other):
                number = float(graph.constant(operand).reshape(()))
                return Operation(value, "map", name, (other,), {"scalar": number, "position": position})
    return Operation(value, "map", name, inputs)


def _attention(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    scale = node.attributes["scale"].as_float() if "scale" in node.attributes else graph.shape(inputs[0])[-1] ** -0.5
    attributes = {
        "mask": inputs[3] if len(inputs) > 3 else None,
        "causal": bool(node.attributes["causal"].as_int()),
        "scale": scale,
        "anchor": "attention-op",
    }
    return Operation(value, "sdpa", "attention", inputs[:3], attributes)


def _softmax(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    default = -1 if graph.prepared.opsets.get("", 1) >= 13 else 1
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else default
    return Operation(value, "softmax", "softmax", inputs, {"axis": axis % max(len(graph.shape(value)), 1)})


def _log_softmax(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    found = _softmax(graph, value, node, inputs)
    alone = graph.prepared.opsets.get("", 1) >= 13 or found.attributes["axis"] == len(graph.shape(value)) - 1
    return Operation(value, "other", LOG_SOFTMAX if alone else "joint log softmax", inputs, found.attributes)


def _is_weight(graph: OnnxView, value: str, beside: str) -> bool:
    return graph.is_constant(value) and (graph.is_stored(value) or not graph.is_constant(beside))


def _matmul(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    left, right = inputs
    if len(graph.shape(right)) == 2 and _is_weight(graph, right, left):
        return Operation(value, "linear", "matmul", inputs, {"transposed": True})
    ranks = len(graph.shape(left)), len(graph.shape(right))
    return Operation(value, "matmul" if min(ranks) > 1 else "other", "matmul", inputs)


def _gemm(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    bias = inputs[2:]
    scaled = given.get("alpha", 1.0) != 1.0 or (bias and given.get("beta", 1.0) != 1.0)
    if scaled or given.get("transA", 0):
        return Operation(value, "other", "gemm", inputs)
    row = all(graph.is_constant(b) and math.prod(graph.shape(b)) in (1, graph.shape(value)[-1]) for b in bias)
    if row and _is_weight(graph, inputs[1], inputs[0]):
        return Operation(value, "linear", "gemm", inputs, {"transposed": not given.get("transB", 0)})
    return Operation(value, "other" if bias or given.get("transB", 0) else "matmul", "gemm", inputs)


def _conv(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    tokens, weight = graph.shape(inputs[0]), graph.shape(inputs[1])
    steps = node.attributes["strides"].as_ints() if "strides" in node.attributes else ()
    padding = node.attributes["pads"].as_ints() if "pads" in node.attributes else ()
    keeps_positions = all(size == 1 for size in (*weight[2:], *steps)) and not any(padding)
    pointwise = keeps_positions and weight[1] == tokens[1]
    depthwise = weight[1] == 1 and weight[0] == tokens[1]
    return Operation(value, "conv", "conv", inputs, {"pointwise": pointwise, "depthwise": depthwise})


def _stored_tensor(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    return Operation(value, "constant", "constant", ())


def _rounded_by_its_range(graph: OnnxView, value: str, node: ir.Node, inputs: tuple[str, ...]) -> Operation:
    """Integers, each of one element; their scale and their zero point are of all."""
    kind: Kind = "map" if value == node.outputs[0].name else "other"
    return Operation(value, kind, node.op_type, inputs, {"quantized": UNQUANTISED_FILE})


_SPECIAL = {
    "Constant": _stored_tensor,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "DynamicQuantizeLinear": _rounded_by_its_range,
}
