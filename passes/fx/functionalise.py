"""From an exported program to the graph that the matcher reads: functional, and without what computes nothing."""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult, Pipeline
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.einsum import einsum_as_product
from attnrewrite.passes.fx.signature import lost_writes, other_interface, writes, writes_in_place
from attnrewrite.patterns.fx.normalise import KNOWN
from attnrewrite.patterns.fx.operators import operator_name

aten = torch.ops.aten


@cache
def product_decompositions() -> dict[Any, Any]:
    """einsum and baddbmm are spelled as the matrix products they are; everything else stays as written."""
    return {aten.einsum.default: einsum_as_product, **torch._decomp.get_decompositions([aten.baddbmm.default])}


@dataclass(frozen=True)
class Functionalise(Pass[ExportedProgram]):
    """Nothing written in place, einsum and baddbmm as matrix products. What needs neither stays as it was exported."""

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if all(_is_plain(node) for node in graph.graph.nodes):
            return PassResult(graph)
        with torch.no_grad(), quiet_copying():
            return Decompose(product_decompositions()).rewrite(graph)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs, what was written still is, and no operator writes in place."""
        after = result.graph
        return other_interface(before, after) or lost_writes(before, after) or writes_in_place(after)


def _is_plain(node: Node) -> bool:
    """Whether an operator is read as it is: one that the matcher knows, or a primitive; no mutation, no subgraph."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or writes(node):
        return False
    makes = not any(isinstance(operand.meta.get("val"), Tensor) for operand in node.all_input_nodes)
    known = operator_name(node) in KNOWN or operator_name(node).startswith("_assert")
    return makes or known or not _is_composite(node.target)


def _is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether torch defines the operator by others only, so that writing it out may show what the matcher knows."""
    return operator in product_decompositions() or operator._can_decompose()


@dataclass(frozen=True)
class RemoveDropout(Pass[GraphModule]):
    """Dropout does nothing in evaluation mode; what follows is then seen to follow."""

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        edits = []
        for node in list(graph.graph.nodes):
            if node.target is aten.dropout.default and not node.args[2]:
                edits.append(Edit(node.name, node.args[0].name))
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        graph.recompile()
        return PassResult(graph, tuple(edits))


@dataclass(frozen=True)
class RemoveAssertions(Pass[GraphModule]):
    """Without the metadata assertions that export leaves between the operations: they compute nothing."""

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        before = [node.name for node in graph.graph.nodes]
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and operator_name(node).startswith("_assert") and not node.users:
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        left = {node.name for node in graph.graph.nodes}
        return PassResult(graph, tuple(Edit(name) for name in before if name not in left))


FUNCTIONAL: Pipeline[ExportedProgram] = Pipeline((Functionalise(),), name="functional")
READABLE: Pipeline[GraphModule] = Pipeline((RemoveDropout(), RemoveAssertions()), name="readable")


def functional_graph(program: ExportedProgram) -> GraphModule:
    """The program as a graph of functional operations in evaluation mode, its parameters as attributes."""
    with torch.no_grad(), quiet_copying():
        module = FUNCTIONAL(program).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return READABLE(module)
