"""Whatever a program computes from its weights alone, computed once, before any compiler sees it.

Position biases looked up in a table, masks built by filling zeros, class tokens expanded: every inference would repeat
them, and it is among them that compilers find operators they lack.
"""

import itertools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.cleanup import CleanUp
from attnrewrite.passes.fx.history import forget_history
from attnrewrite.passes.fx.signature import other_signature, writes_in_place


@dataclass(frozen=True)
class FoldConstants(Pass[ExportedProgram]):
    """Every value that depends on no input stored as a constant; unused weights go. Shapes become the example's."""

    def requires(self, graph: ExportedProgram) -> Refusal | None:
        """That no constant is written over, and that there is an example to export the result with."""
        if graph.example_inputs is None:
            return Refusal("no-example", "has no example inputs: export it again with torch.export.export")
        return writes_in_place(graph)

    @torch.no_grad()
    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        module = graph.module()
        assert isinstance(module, fx.GraphModule)
        values = _constant_values(module)
        folded = []
        # A program that was folded before has constants of such names.
        names = (name for name in map("folded_{}".format, itertools.count()) if not hasattr(module, name))
        for node, name in zip(_boundary(values), names, strict=False):
            module.register_buffer(name, values[node].contiguous())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
            folded.append(Edit(node.name, name))
        cleaned = CleanUp().apply(module)
        if not folded and not cleaned.edits:
            return PassResult(graph)
        assert graph.example_inputs is not None
        program = forget_history(torch.export.export(module, *graph.example_inputs))
        return PassResult(program, (*folded, *cleaned.edits))

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)


def _constant_values(module: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The value of every node that is computed from no input, the weights themselves among them."""
    values: dict[fx.Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif _repeatable(node) and all(given in values for given in node.all_input_nodes):
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
    return values


def _repeatable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    operation = node.target
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in operation.tags


def _boundary(values: dict[fx.Node, Tensor]) -> list[fx.Node]:
    """The computed constants that something not constant reads."""
    return [
        node
        for node, value in values.items()
        if node.op != "get_attr" and isinstance(value, Tensor) and any(user not in values for user in node.users)
    ]
