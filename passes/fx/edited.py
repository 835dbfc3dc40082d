"""An exported program with its graph edited, which torch would rather export again."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the same names: those of inputs and outputs are the program's signature."""
    result = fx.Graph()
    standing: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        standing[node] = result.node_copy(node, standing.__getitem__)
        standing[node].name = node.name
    result._codegen = copy.deepcopy(graph._codegen)
    return result


def input_specs(program: ExportedProgram, graph: fx.Graph) -> dict[fx.Node, InputSpec]:
    """What each placeholder of `graph`, a copy of the program's, stands for."""
    return dict(zip(graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))


def with_graph(
    program: ExportedProgram, graph: fx.Graph, specs: Mapping[fx.Node, InputSpec], state: Mapping[str, Any]
) -> ExportedProgram:
    """`program` with another graph, whose placeholders are as `specs` says, and what they read of `state`."""
    inputs = [specs[node] for node in graph.find_nodes(op="placeholder")]
    outputs = copy.deepcopy(program.graph_signature.output_specs)
    for spec, given in zip(outputs, cast(Sequence[object], graph.output_node().args[0]), strict=True):
        if isinstance(given, fx.Node):
            spec.arg.name = given.name  # type: ignore[union-attr]
    lasting = {spec.target for spec in inputs if spec.kind == InputKind.PARAMETER or spec.persistent}
    read = {spec.target: state[spec.target] for spec in inputs if spec.target is not None and spec.target in state}
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={name: each for name, each in read.items() if name in lasting},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants={name: each for name, each in read.items() if name not in lasting},
        verifiers=program.verifiers,
    )
