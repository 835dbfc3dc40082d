"""From an exported program to the graph that the matcher reads: functional, and without what computes nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult, Pipeline
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.complex_pairs import ComplexAsPairs
from attnrewrite.passes.fx.composites import WriteOutComposites
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.flex import WriteOutFlex
from attnrewrite.passes.fx.signature import lost_writes, other_interface, writes, writes_in_place
from attnrewrite.passes.fx.written_parts import JoinWrittenParts
from attnrewrite.patterns.fx.operators import asserts

aten = torch.ops.aten


@dataclass(frozen=True)
class Functionalise(Pass[ExportedProgram]):
    """Nothing written in place, no graph within the graph. What has neither stays as it was exported."""

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if all(_is_plain(node) for node in graph.graph.nodes):
            return PassResult(graph)
        with torch.no_grad(), quiet_copying():
            if all(_is_plain(node) or _without_writing(node) for node in graph.graph.nodes):
                return _each_without_writing(graph)
            return Decompose().rewrite(graph)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs, what was written still is, and no operator writes in place."""
        after = result.graph
        return other_interface(before, after) or lost_writes(before, after) or writes_in_place(after)


def _is_plain(node: Node) -> bool:
    """Whether an operation is read as it is: it writes nothing, has no subgraph, and opens or ends no torch.vmap."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, torch._ops.OperatorBase):
        return getattr(node.target, "__module__", "") != torch._functorch.predispatch.__name__
    return isinstance(node.target, torch._ops.OpOverload) and not writes(node)


def _without_writing(node: Node) -> torch._ops.OpOverload | None:
    """The operator that gives what `node` does and writes nothing, where nothing else could see that it was written:
    what is written over was just made, for this alone.
    """
    written = node.args[0] if node.args else None
    if not writes(node) or not isinstance(written, Node) or not _makes_its_own(written) or len(written.users) > 1:
        return None
    packet = getattr(aten, node.target._opname.removesuffix("_"), None)  # type: ignore[union-attr]
    found = getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]
    if found is None or found._schema.is_mutable:
        return None
    arguments, keywords = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    made, stood = found(*arguments, **keywords), node.meta["val"]
    return (
        found if (made.shape, made.dtype) == (stood.shape, stood.dtype) else None
    )  # what is compared in place keeps its type


def _makes_its_own(node: Node) -> bool:
    """Whether what an operation gives is no other tensor's memory. Composites may give an operand back unsaid."""
    called = node.target
    if not isinstance(called, torch._ops.OpOverload):
        return False
    if writes(node):
        return _without_writing(node) is not None
    shares = any(returned.alias_info is not None for returned in called._schema.returns)
    return called in MAKERS or not (shares or called._can_decompose())


# composites that never give an operand back
MAKERS = frozenset({
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.linear.default, aten.matmul.default,
    aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.softmax.int,
})  # fmt: skip


def _each_without_writing(program: ExportedProgram) -> PassResult[ExportedProgram]:
    graph, edits = copied(program.graph), []
    for node in graph.nodes:
        instead = None if _is_plain(node) else _without_writing(node)
        if instead is not None:
            edits.append(Edit(str(node.target), str(instead)))
            node.target = instead
    state = {**program.constants, **program.state_dict}
    return PassResult(with_graph(program, graph, input_specs(program, graph), state), tuple(edits))


@dataclass(frozen=True)
class RemoveDropout(Pass[GraphModule]):
    """Dropout does nothing in evaluation mode, nor where it drops none; what follows is then seen to follow."""

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        edits = []
        for node in list(graph.graph.nodes):
            if node.target is aten.dropout.default and not (node.args[2] and node.args[1]):
                edits.append(Edit(node.name, node.args[0].name))
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        if edits:
            graph.recompile()
        return PassResult(graph, tuple(edits))


@dataclass(frozen=True)
class RemoveAssertions(Pass[GraphModule]):
    """Without the metadata assertions that export leaves between the operations, which compute nothing, and without
    what nothing reads: an attention, too, which torch counts as impure for its dropout.
    """

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        before = [node.name for node in graph.graph.nodes]
        for node in list(graph.graph.nodes):
            if asserts(node):
                graph.graph.erase_node(node)
        attention = aten.scaled_dot_product_attention.default
        graph.graph.eliminate_dead_code(lambda node: node.is_impure() and node.target is not attention)
        left = {node.name for node in graph.graph.nodes}
        gone = tuple(Edit(name) for name in before if name not in left)
        if gone:
            graph.recompile()
        return PassResult(graph, gone)


FUNCTIONAL: Pipeline[ExportedProgram] = Pipeline((WriteOutFlex(), Functionalise(), ComplexAsPairs()), name="functional")
READABLE: Pipeline[GraphModule] = Pipeline(
    (WriteOutComposites(), JoinWrittenParts(), RemoveDropout(), RemoveAssertions()), name="readable"
)


def functional_graph(program: ExportedProgram) -> GraphModule:
    """The program as a graph of functional operations in evaluation mode, its parameters as attributes."""
    with torch.no_grad(), quiet_copying():
        module = FUNCTIONAL(program).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return READABLE(module)
