"""Torch modules put into an ONNX graph: their nodes behind the node that made a value, which they make now."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from attnrewrite.passes.onnx.cleanup import drop_unread, values_by_name
from attnrewrite.passes.onnx.fragment import Exportable, Fragment, export_sites
from attnrewrite.patterns.onnx.branches import take_branch
from attnrewrite.patterns.onnx.fused import write_out, written_out_before
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.quantised import write_as_pairs


def put_in(model: ir.Model, graph: OnnxGraph, modules: Sequence[tuple[Exportable, str]]) -> tuple[Fragment, ...]:
    """Let each module make the value that stands beside it, in place; what only its old node needed is gone."""
    fragments = export_sites(graph, [module for module, _ in modules])
    for (module, written), fragment in zip(modules, fragments, strict=True):
        values = _spelled_out(model, graph, (*module.values, written))
        _splice(model.graph, [values[name] for name in module.values], values[written], fragment)
    return fragments


def _spelled_out(model: ir.Model, graph: OnnxGraph, names: Sequence[str]) -> dict[str, ir.Value]:
    """The named values of the model; those inside a fused operator after it is written out."""
    while True:
        values = values_by_name(model.graph)
        missing = [name for name in names if name not in values]
        if not missing:
            return values
        node = _holding(missing[0], values)
        for each in (*written_out_before(model.graph, node), node):
            if not take_branch(model.graph, each, graph.prepared.sizes):
                write_out(model.graph, each, graph.prepared.sizes, graph.prepared.opsets)
        if node.graph is not None:
            write_as_pairs(model.graph, node)
        assert node.graph is None, f"{node.name} stands where the view shows what it stands for"


def _holding(name: str, values: Mapping[str, ir.Value]) -> ir.Node:
    """The node that holds a value of the view: what is written out is named after its node's output, and a slash."""
    while "/" in name:
        name = name.rpartition("/")[0]
        node = values[name].producer() if name in values else None
        if node is not None:
            return node
    raise AssertionError(f"no node holds {name}")


def _splice(graph: ir.Graph, operands: Sequence[ir.Value], old: ir.Value, fragment: Fragment) -> None:
    """Put the fragment's nodes, reading `operands`, after the node that made `old`; their value takes its name."""
    producer = old.producer()
    assert producer is not None
    source = fragment.output.graph
    for initialiser in fragment.initialisers:
        assert source is not None
        del source.initializers[_stored_under(source, initialiser)]
        graph.register_initializer(initialiser)
    for inner, operand in zip(fragment.inputs, operands, strict=True):
        ir.convenience.replace_all_uses_with(inner, operand)
    if source is not None:
        source.outputs.remove(fragment.output)
        source.remove(fragment.nodes)
    output = fragment.output
    output.type, output.shape = old.type, old.shape
    output.metadata_props.clear()
    output.metadata_props.update(old.metadata_props)
    name, old.name = old.name, f"{old.name}/replaced"
    output.name = name
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.insert_after(producer, fragment.nodes)
    drop_unread(graph, producer)


def _stored_under(graph: ir.Graph, value: ir.Value) -> str:
    return next(key for key, stored in graph.initializers.items() if stored is value)
