"""Equal operations on equal operands computed once, for all that read them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.signature import other_signature, writes_in_place


@dataclass(frozen=True)
class MergeEqual(Pass[ExportedProgram]):
    """The first of several equal operations stands for the others, which go. What draws at random stays."""

    def requires(self, graph: ExportedProgram) -> Refusal | None:
        """That no value is written over."""
        return writes_in_place(graph)

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        edited, edits = copied(graph.graph), []
        first: dict[str, Node] = {}
        for node in list(edited.nodes):
            if not isinstance(node.target, torch._ops.OpOverload) or node.is_impure():
                continue
            key = repr((node.target, node.args, sorted(node.kwargs.items())))  # nodes are written by their names
            standing = first.setdefault(key, node)
            if standing is not node:
                edits.append(Edit(node.name, standing.name))
                node.replace_all_uses_with(standing)
                edited.erase_node(node)
        if not edits:
            return PassResult(graph)
        state: dict[str, Any] = {**graph.constants, **graph.state_dict}
        return PassResult(with_graph(graph, edited, input_specs(graph, edited), state), tuple(edits))

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)
