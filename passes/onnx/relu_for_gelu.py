"""ReLU for GELU in the MLP behind a rewritten site of an ONNX graph: SimA's last exponential (section 4)."""

from collections.abc import Mapping

import onnx_ir as ir

from attnrewrite.patterns.onnx.gelu import MOST_NODES, gelu_argument

_MOVES = frozenset(["Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"])
_NORMS = frozenset(["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "BatchNormalization"])
_BETWEEN = frozenset(["Mul", "MatMul", "Gemm", "Conv"]) | _MOVES | _NORMS


def relu_for_gelu(graph: ir.Graph, start: ir.Value, opsets: Mapping[str, int]) -> tuple[ir.Node, ...]:
    """Replace the GELUs of the MLP that reads what `start` adds to the residual stream; gives the nodes now unread.

    The walk goes through norms, linear maps with their biases, data movement and one sum; a second sum is the next
    block's.
    """
    pending, seen, dead = [(start, 0)], {start}, []
    while pending:
        value, sums = pending.pop()
        last = _gelu_of(value, opsets)
        if last is not None:
            _put_relu(graph, value, last)
            dead.append(last)
            continue
        for node in value.consumers():
            made, is_sum = node.outputs[0], node.op_type == "Add" and _adds_two(node)
            if made not in seen and (node.op_type in _BETWEEN or (node.op_type == "Add" and not (is_sum and sums))):
                seen.add(made)
                pending.append((made, sums + is_sum))
    return tuple(dead)


def _adds_two(node: ir.Node) -> bool:
    """Whether a sum is of two streams, not of one and a bias."""
    operands = [operand for operand in node.inputs if operand is not None]
    return not any(ir.convenience.get_const_tensor(operand) is not None for operand in operands)


def _gelu_of(value: ir.Value, opsets: Mapping[str, int]) -> ir.Node | None:
    """The last node of the GELU of `value`, where there is one."""
    after: list[ir.Node] = list(value.consumers())
    for node in after:
        found = gelu_argument(node, opsets)
        if found is not None and found[0] is value:
            return node
        readers = [reader for output in node.outputs for reader in output.consumers() if reader not in after]
        after += readers[: MOST_NODES - len(after)] if len(after) < MOST_NODES else []
    return None


def _put_relu(graph: ir.Graph, value: ir.Value, last: ir.Node) -> None:
    old = last.outputs[0]
    relu = ir.node("Relu", [value], name=f"{last.name}/relu")
    made = relu.outputs[0]
    made.type, made.shape = old.type, old.shape
    graph.insert_before(last, relu)
    name, old.name = old.name, f"{old.name}/gelu"
    made.name = name
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
