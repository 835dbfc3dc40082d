"""Products with weights told from products of what comes in: the former are linear layers, the latter are not."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.signature import other_signature

aten = torch.ops.aten
STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class WeightsAsLinear(Pass[ExportedProgram]):
    """A product with a stored matrix on its right becomes `linear`; a `linear` of computed weights becomes a product.

    What is computed from weights alone is to be folded before and after.
    """

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        edited = copied(graph.graph)
        specs = input_specs(graph, edited)
        stored = {node for node, spec in specs.items() if spec.kind in STORED}
        edits = [edit for node in list(edited.nodes) if (edit := _as_linear(node, stored) or _as_product(node, stored))]
        if not edits:
            return PassResult(graph)
        return PassResult(with_graph(graph, edited, specs, {**graph.constants, **graph.state_dict}), tuple(edits))

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)


def _as_linear(node: fx.Node, stored: set[fx.Node]) -> Edit | None:
    if node.target in (aten.matmul.default, aten.mm.default):
        left, right, *bias = node.args
    elif node.target is aten.addmm.default and not node.kwargs and _rank(node.args[0]) == 1:
        *bias, left, right = node.args
    else:
        return None
    if right not in stored or _rank(right) != 2 or _rank(left) < 2:
        return None
    return _instead(node, aten.linear.default, left, _transposed(node, right), *bias)


def _as_product(node: fx.Node, stored: set[fx.Node]) -> Edit | None:
    if node.target is not aten.linear.default or node.args[1] in stored:
        return None
    left, weight, *bias = node.args
    edit = _instead(node, aten.matmul.default, left, _transposed(node, weight))
    if bias and bias[0] is not None:
        with node.graph.inserting_after(node):
            added = node.graph.call_function(aten.add.Tensor, (node, bias[0]))
        added.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(added, lambda user: user is not added)
    return edit


def _instead(node: fx.Node, operator: Any, *operands: Any) -> Edit:
    edit = Edit(str(node.target), str(operator))
    node.target, node.args, node.kwargs = operator, operands, {}
    return edit


def _transposed(node: fx.Node, matrix: object) -> fx.Node:
    assert isinstance(matrix, fx.Node)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.permute.default, (matrix, [1, 0]))
    made.meta["val"] = matrix.meta["val"].permute(1, 0)
    return made


def _rank(value: object) -> int:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return held.dim() if isinstance(held, Tensor) else 0
