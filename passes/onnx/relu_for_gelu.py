"""ReLU for GELU in the MLP behind a rewritten site of an ONNX graph: SimA's last exponential (section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.onnx.cleanup import drop_unread, values_by_name
from attnrewrite.patterns.onnx.gelu import MOST_NODES, gelu_argument
from attnrewrite.patterns.onnx.prepare import opset_versions

_MOVES = frozenset(["Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"])
_NORMS = frozenset(["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "BatchNormalization"])
_BETWEEN = frozenset(["Mul", "MatMul", "Gemm", "Conv"]) | _MOVES | _NORMS


@dataclass(frozen=True)
class ReluForGelu(Pass[ir.Model]):
    """Replace the GELUs of the MLP that reads what the value called `behind` adds to the residual stream.

    The walk goes through norms, linear maps with their biases, data movement and one sum; a second sum is the next
    block's.
    """

    behind: str
    in_place: ClassVar[bool] = True

    def requires(self, graph: ir.Model) -> Refusal | None:
        """That there is such a value."""
        known = self.behind in values_by_name(graph.graph)
        return None if known else Refusal("no-such-value", f"has no value {self.behind!r}")

    def rewrite(self, graph: ir.Model) -> PassResult[ir.Model]:
        start, opsets = values_by_name(graph.graph)[self.behind], opset_versions(graph)
        pending, seen, edits = [(start, 0)], {start}, []
        while pending:
            value, sums = pending.pop()
            last = _gelu_of(value, opsets)
            if last is not None:
                edits.append(_put_relu(graph.graph, value, last))
                continue
            for node in value.consumers():
                made, is_sum = node.outputs[0], node.op_type == "Add" and _adds_two(node)
                if made not in seen and (node.op_type in _BETWEEN or (node.op_type == "Add" and not (is_sum and sums))):
                    seen.add(made)
                    pending.append((made, sums + is_sum))
        return PassResult(graph, tuple(edits))


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


def _put_relu(graph: ir.Graph, value: ir.Value, last: ir.Node) -> Edit:
    """A Relu of `value` under the name of what `last`, the GELU's last node, made; what only the GELU read is gone."""
    old = last.outputs[0]
    relu = ir.node("Relu", [value], name=f"{last.name}/relu")
    made = relu.outputs[0]
    made.type, made.shape = old.type, old.shape
    graph.insert_before(last, relu)
    name, old.name = old.name, f"{old.name}/gelu"
    made.name = name
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
    drop_unread(graph, last)
    return Edit(str(last.name), relu.name)
