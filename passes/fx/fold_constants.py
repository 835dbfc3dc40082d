"""Whatever a program computes from its weights alone, computed once, before any compiler sees it.

Position biases looked up in a table, masks built by filling zeros, class tokens expanded: every inference would repeat
them, and it is among them that compilers find operators they lack.
"""

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.signature import other_signature, writes_in_place

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class FoldConstants(Pass[ExportedProgram]):
    """Every value that depends on no input stored as a constant; unused weights go."""

    def requires(self, graph: ExportedProgram) -> Refusal | None:
        """That no constant is written over."""
        return writes_in_place(graph)

    @torch.no_grad()
    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        edited = copied(graph.graph)
        specs, state = input_specs(graph, edited), {**graph.constants, **graph.state_dict}
        values = _constant_values(edited, _stored(specs, graph, state))
        taken = {spec.target for spec in specs.values()}  # a program that was folded before has such names
        names = (name for name in map("folded_{}".format, itertools.count()) if name not in taken)
        folded = dict(zip(names, _boundary(values), strict=False))
        for name, node in folded.items():
            state[name] = values[node].contiguous()
            specs[_put_in_place(node, name, state[name])] = InputSpec(
                InputKind.BUFFER, TensorArgument(name), name, persistent=True
            )
        gone = [*_drop_computed(edited, values), *_drop_unused(edited, specs)]
        if not folded and not gone:
            return PassResult(graph)
        edits = [Edit(node.name, name) for name, node in folded.items()] + [Edit(name) for name in gone]
        return PassResult(with_graph(graph, edited, specs, state), tuple(edits))

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)


def _stored(
    specs: Mapping[fx.Node, InputSpec], program: ExportedProgram, state: Mapping[str, Tensor]
) -> dict[fx.Node, Tensor]:
    """The weights and constants by the nodes that read them, but for those that a call of the program changes."""
    changed = set(program.graph_signature.buffers_to_mutate.values())
    return {
        node: state[spec.target]
        for node, spec in specs.items()
        if spec.kind in _STORED and spec.target is not None and spec.target not in changed
    }


def _constant_values(graph: fx.Graph, stored: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """The value of every node that is computed from no input, the weights themselves among them."""
    values = dict(stored)
    for node in graph.nodes:
        if _repeatable(node) and all(given in values for given in node.all_input_nodes):
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
    return values


def _repeatable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    operation = node.target
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in operation.tags


def _boundary(values: Mapping[fx.Node, Tensor]) -> list[fx.Node]:
    """The computed constants that something not constant reads."""
    return [
        node
        for node, value in values.items()
        if node.op != "placeholder" and isinstance(value, Tensor) and any(user not in values for user in node.users)
    ]


def _put_in_place(node: fx.Node, name: str, value: Tensor) -> fx.Node:
    """A placeholder called `name` before all inputs, for whatever reads `node`."""
    mode = detect_fake_mode([other.meta.get("val") for other in node.graph.nodes]) or FakeTensorMode()
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        placeholder = node.graph.placeholder(name)
    placeholder.meta["val"] = mode.from_tensor(value, static_shapes=True)
    placeholder.name = name
    node.replace_all_uses_with(placeholder)
    return placeholder


def _drop_computed(graph: fx.Graph, values: Mapping[fx.Node, Tensor]) -> list[str]:
    """Erase what is computed already and read by nothing, assertions on constants among it; the names of what went."""
    gone = []
    for node in reversed(graph.nodes):
        if node in values and node.op != "placeholder" and not node.users:
            gone.append(node.name)
            graph.erase_node(node)
    return gone


def _drop_unused(graph: fx.Graph, specs: dict[fx.Node, InputSpec]) -> list[str]:
    """Erase what nothing reads, and the weights that nothing reads then; the names of all that went."""
    before = [node.name for node in graph.nodes]
    graph.eliminate_dead_code()
    left = {node.name for node in graph.nodes}
    gone = [name for name in before if name not in left]
    for node, spec in list(specs.items()):
        if spec.kind in _STORED and not node.users:
            graph.erase_node(node)
            del specs[node]
            gone.append(str(spec.target))
    return gone
