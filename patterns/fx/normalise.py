"""What each aten operation is in the matcher's vocabulary, whether it is fused or decomposed."""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.patterns.fx.operators import (
    DROPOUTS,
    FUSED_ATTENTION,
    IDENTITIES,
    INDEXED,
    KINDS,
    UNQUANTISED_PROGRAM,
    WHOLE_ATTENTION,
    computes_on_integers,
    operator_name,
)
from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.softmaxes import LOG_SOFTMAX


class FxNodes(GraphView, Protocol):
    """A view whose values are FX nodes."""

    def node(self, value: str) -> Node: ...


def normalise(graph: FxNodes, value: str) -> Operation:
    """The operation that makes a value, in the matcher's vocabulary."""
    node = graph.node(value)
    if node.op == "placeholder":
        return Operation(node.name, "input", "input", ())
    if node.op in ("get_attr", "output"):
        kept = node.op == "get_attr" and graph.is_constant(node.name)  # else it is a buffer that the graph writes to
        return Operation(node.name, "constant" if kept else "other", node.op, ())
    producer = node
    while producer.target is operator.getitem and isinstance(producer.args[0], Node):
        producer = producer.args[0]
    name = operator_name(producer)
    inputs = tuple(n.name for n in _tensor_arguments(producer))
    if name in DROPOUTS and _drops(producer):
        return Operation(node.name, "map", name, inputs[:1], {"random": True})
    if name in IDENTITIES:
        return _as_type(node, name, graph.node(inputs[0]))
    if name in INDEXED:
        return _indexed(graph, node, producer, inputs)
    if name == "copy" or (name == "slice_scatter" and graph.shape(inputs[0]) == graph.shape(inputs[1])):
        return _as_type(node, name, graph.node(inputs[1]))  # what is written over a whole tensor
    if name == "pad":
        mode = producer.args[2] if len(producer.args) > 2 else producer.kwargs.get("mode", "constant")
        return Operation(node.name, "move" if mode == "constant" else "other", name, inputs)
    if name in _SPECIAL:
        return _SPECIAL[name](graph, node, producer, inputs)
    if computes_on_integers(producer) or name.startswith("fake_quantize"):
        return Operation(node.name, "other", name, inputs, {"quantized": UNQUANTISED_PROGRAM})
    if isinstance(producer.target, torch._ops.HigherOrderOperator) and _holds_attention(producer):
        return _opaque(graph, node, producer, inputs)
    kind = KINDS.get(name, "other")
    if name == "div" and arguments_of(producer).get("rounding_mode") is not None:
        return Operation(node.name, "map", "rounded division", inputs, _scalar_attributes(producer))
    if name == "rsub":  # rsub(x, y, alpha) = y - alpha x
        return Operation(node.name, "map", "sub", inputs[::-1], {**_map_attributes("sub", producer), "position": 0})
    if kind == "map":
        return Operation(node.name, kind, name, inputs, _map_attributes(name, producer))
    if kind == "norm":
        return Operation(node.name, kind, name, inputs, _norm_attributes(graph, name, producer))
    if kind == "reduce":
        rank = len(graph.shape(inputs[0])) if inputs else 0
        return Operation(node.name, kind, name, inputs[:1], {"axes": _reduced_axes(name, producer, rank)})
    return Operation(node.name, kind, name, inputs)


def _drops(node: Node) -> bool:
    given = arguments_of(node)
    return bool(given.get("train")) and given.get("p") != 0


def _as_type(node: Node, name: str, source: Node) -> Operation:
    """The same elements; whole numbers or truth values made of fractions are not the same."""
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    fractions = before.is_floating_point and not after.is_floating_point
    rounds = fractions or (after == torch.bool and before != torch.bool)
    return Operation(node.name, "map", f"{name} to {str(after)[6:]}" if rounds else "identity", (source.name,))


def _indexed(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    """Reading at positions: movement of the first operand alone, which the data may direct."""
    free = [operand for operand in inputs[1:] if not graph.is_constant(operand)]
    return Operation(
        node.name, "move", operator_name(producer), inputs[:1], {"directed_by": tuple(free)} if free else {}
    )


def _linear(graph: FxNodes, node: Node, _: Node, inputs: tuple[str, ...]) -> Operation:
    return Operation(node.name, "linear", "linear", inputs, {"transposed": False})


def _addmm(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    bias, left, right = inputs
    plain = not producer.kwargs and len(producer.args) == 3
    if plain and _is_weight(graph, right, left):
        return Operation(node.name, "linear", "addmm", (left, right, bias), {"transposed": True})
    return Operation(node.name, "other", "addmm", inputs)


def _matmul(graph: FxNodes, node: Node, _: Node, inputs: tuple[str, ...]) -> Operation:
    left, right = inputs
    if min(len(graph.shape(operand)) for operand in inputs) < 2:  # a vector weighs or sums what it is multiplied with
        return Operation(node.name, "other", "matmul", inputs)
    weight = _one_matrix(graph, right) if _is_weight(graph, right, left) else None
    if weight is not None:
        return Operation(node.name, "linear", "matmul", (left, weight), {"transposed": True})
    return Operation(node.name, "matmul", "matmul", inputs)


def _is_weight(graph: FxNodes, value: str, beside: str) -> bool:
    """Whether a constant operand is what the other is projected with; both are constant for learned queries."""
    node = graph.node(value)
    while node.op != "get_attr" and KINDS.get(operator_name(node)) == "move" and isinstance(node.args[0], Node):
        node = node.args[0]
    return graph.is_constant(value) and (node.op == "get_attr" or not graph.is_constant(beside))


def _one_matrix(graph: FxNodes, value: str) -> str | None:
    """The matrix that a constant operand of a product is, or repeats for each entry of the batch."""
    matrix = value
    while len(graph.shape(matrix)) > 2:
        operation = graph.operation(matrix)
        if operation.kind not in ("move", "map") or len(operation.inputs) != 1:
            return None
        matrix = operation.inputs[0]
    if matrix == value:
        return value
    same = graph.shape(matrix) == graph.shape(value)[-2:] and np.all(graph.constant(value) == graph.constant(matrix))
    return matrix if same else None


def _opaque(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    name = operator_name(producer)
    if node.target is operator.getitem and node.args[1] != 0:  # what comes beside the result
        return Operation(node.name, "other", name, inputs)
    way_out = WHOLE_ATTENTION.get(name, OF_CONTROL_FLOW)
    return Operation(node.name, "sdpa", name, inputs, {"opaque": way_out, "anchor": "attention-op"})


def _holds_attention(node: Node) -> bool:
    """Whether it is control flow (torch.cond, a loop) whose parts, graphs of their own, hold attention."""
    read = [str(given.target) for given in node.all_input_nodes if given.op == "get_attr"]
    parts = [operator.attrgetter(path)(node.graph.owning_module) for path in read]
    inside = [each for part in parts if isinstance(part, GraphModule) for each in part.graph.nodes]
    return any(operator_name(each) in ATTENTION or _holds_attention(each) for each in inside)


OF_CONTROL_FLOW = "what runs in a branch or a loop that the data choose is kept as it is"


def _convolution(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    value = graph.node(inputs[0]).meta["val"]
    weight = graph.node(inputs[1]).meta["val"]
    kernel = tuple(int(size) for size in weight.shape[2:])
    given = arguments_of(producer)
    if given.get("transposed"):
        return Operation(node.name, "other", "transposed convolution", inputs)
    steps = (*_numbers(given.get("stride", 1), 1), *(size + 1 for size in _numbers(given.get("padding", 0), 0)))
    pointwise = all(size == 1 for size in (*kernel, *steps))  # by steps of one, and padding by none
    ungrouped = weight.shape[1] == value.shape[1]
    depthwise = weight.shape[1] == 1 and weight.shape[0] == value.shape[1]
    attributes = {"pointwise": pointwise and ungrouped, "depthwise": depthwise}
    return Operation(node.name, "conv", operator_name(producer), inputs, attributes)


def _numbers(given: Any, named: int) -> tuple[int, ...]:
    """A size for each axis; `named` for a padding given by name (same, valid), which a kernel of one needs none of."""
    return (named,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else (int(given),)


def _softmax(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    axis: Any = arguments_of(producer)["dim"]
    return Operation(node.name, "softmax", "softmax", inputs, {"axis": int(axis) % max(len(graph.shape(node.name)), 1)})


def _log_softmax(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    found = _softmax(graph, node, producer, inputs)
    return Operation(found.value, "other", LOG_SOFTMAX, inputs, found.attributes)


def _norm_attributes(graph: FxNodes, name: str, producer: Node) -> dict[str, object]:
    """How it normalises. A BatchNorm by stored statistics is a fixed affine map; by the batch's own it is none."""
    if "batch_norm" not in name:
        return {"style": name}
    given = arguments_of(producer)
    nodes = {role: given.get(argument) for role, argument in _STATISTICS.items()}
    stored = {role: node.name if isinstance(node, Node) else None for role, node in nodes.items()}
    fixed = all(value is None or graph.is_constant(value) for value in stored.values())
    trains = given.get("training", given.get("train", "no_training" not in name))
    if trains or not fixed or stored["mean"] is None or stored["variance"] is None:
        return {"style": "batch_statistics"}
    return {"style": "batch", "epsilon": float(given["eps" if "eps" in given else "epsilon"]), **stored}


_STATISTICS = {"weight": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}


def _sdpa(graph: FxNodes, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
    if node.target is operator.getitem and node.args[1] != 0:  # what a backward pass would need
        return Operation(node.name, "other", operator_name(producer), inputs)
    named = arguments_of(producer)
    mask = named.get("attn_mask", named.get("attn_bias"))
    scale = named.get("scale")
    head_dim = graph.shape(inputs[0])[-1]
    attributes = {
        "mask": mask.name if isinstance(mask, Node) else None,
        "causal": bool(named.get("is_causal", False)),
        "scale": float(scale) if scale is not None else head_dim**-0.5,
        "dropout": float(named.get("dropout_p", 0.0)),
    }
    return Operation(node.name, "sdpa", "sdpa", inputs[:3], attributes)


SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
ATTENTION = frozenset((*SOFTMAXES, *FUSED_ATTENTION, *WHOLE_ATTENTION))
_SPECIAL: dict[str, Callable[[FxNodes, Node, Node, tuple[str, ...]], Operation]] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _log_softmax),
    **dict.fromkeys(FUSED_ATTENTION, _sdpa),
    **dict.fromkeys(WHOLE_ATTENTION, _opaque),
}


def arguments_of(node: Node) -> dict[str, Any]:
    """What an operator is given, by the names of its schema, with its defaults for what is not."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    known = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    given = {argument.name: value for argument, value in zip(known, node.args, strict=False)}
    return {**defaults, **given, **node.kwargs}


def _map_attributes(name: str, node: Node) -> dict[str, object]:
    """The number among the operands of a map, and `alpha`: add(x, y, alpha) is x + alpha y."""
    attributes = _scalar_attributes(node)
    if name in ("add", "sub"):
        attributes["alpha"] = arguments_of(node).get("alpha", 1)
    return attributes


def _tensor_arguments(node: Node) -> list[Node]:
    """The tensor operands in order, repeated where they repeat; shape arithmetic is no operand."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if isinstance(n.meta.get("val"), Tensor | list | tuple)]


def _reduced_axes(name: str, node: Node, rank: int) -> tuple[int, ...]:
    """The axes that a plain reduction removes; none where its arguments say more than axes."""
    if name not in ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "logsumexp"):
        return ()
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = [given] if isinstance(given, int) else given if isinstance(given, list | tuple) else range(rank)
    return tuple(axis % rank for axis in listed if isinstance(axis, int)) if rank else ()


def _scalar_attributes(node: Node) -> dict[str, object]:
    """The Python number among the operands of a map, and its place: on the left (0), the right (1), or last (2)."""
    for position, argument in enumerate(node.args[:3]):
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            return {"scalar": argument, "position": position}
    return {}
