"""What an ONNX model computes from its weights alone, computed once."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import InputError
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.patterns.onnx.prepare import opset_versions
from attnrewrite.patterns.onnx.sizes import evaluate


@dataclass(frozen=True)
class FoldConstants(Pass[ir.Model]):
    """Replace nodes that read nothing but initialisers by what they make, then drop what nobody reads."""

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: ir.Model) -> PassResult[ir.Model]:
        opsets = opset_versions(graph)
        made = [_folded(graph.graph, node, opsets) for node in list(graph.graph)]
        unread = _drop_unread(graph.graph)
        return PassResult(graph, tuple(edit for edit in (*made, *unread) if edit is not None))


def _folded(graph: ir.Graph, node: ir.Node, opsets: dict[str, int]) -> Edit | None:
    """The node's value stored in its place; None where it stays."""
    operands = [operand for operand in node.inputs if operand is not None]
    if not operands or not all(operand.is_initializer() for operand in operands) or len(node.outputs) != 1:
        return None
    arrays = [None if operand is None else operand.const_value.numpy() for operand in node.inputs]  # type: ignore[union-attr]
    try:
        (array,) = evaluate(node, arrays, opsets)
    except InputError:
        return None  # it is left to the runtime
    made = node.outputs[0]
    known = ir.val(f"{made.name}_folded", const_value=ir.tensor(np.asarray(array, order="C")))
    graph.register_initializer(known)
    ir.convenience.replace_all_uses_with(made, known, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return Edit(str(made.name), known.name)


def _drop_unread(graph: ir.Graph) -> list[Edit]:
    unread = [name for name, value in graph.initializers.items() if not value.uses() and not value.is_graph_output()]
    for name in unread:
        del graph.initializers[name]
    return [Edit(name) for name in unread]
