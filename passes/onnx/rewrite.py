"""The ONNX pass: each placement of a plan becomes the nodes of its torch module, where the site's nodes were."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch

from attnrewrite.errors import InputError
from attnrewrite.passes.base import Edit, Precision, place, tell_of_gelus
from attnrewrite.passes.onnx.fragment import Fragment, export_sites
from attnrewrite.passes.onnx.relu_for_gelu import relu_for_gelu
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.patterns.onnx.branches import take_branch
from attnrewrite.patterns.onnx.fused import write_out
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.prepare import inlined
from attnrewrite.patterns.onnx.recognise import attribute_name
from attnrewrite.patterns.onnx.sizes import Size
from attnrewrite.patterns.weights import pick
from attnrewrite.plan import Plan, check_fits
from attnrewrite.site import AttentionSite, Scan

_FLOAT_TYPES = {
    int(ir.DataType.FLOAT16): torch.float16,
    int(ir.DataType.FLOAT): torch.float32,
    int(ir.DataType.DOUBLE): torch.float64,
}


class OnnxRewrite(ir.passes.FunctionalPass):
    """Apply `plan` to an ONNX model; runs inside an onnx_ir PassManager. The input is not changed.

    `input_sizes` gives what the model's inputs leave open beyond the batch. A model with functions comes back inlined.
    """

    def __init__(self, plan: Plan, input_sizes: Mapping[str, Size] | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.input_sizes = input_sizes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """The pass's verb, as onnx_ir calls it."""
        result, edits = self.apply(model)
        return ir.passes.PassResult(result, bool(edits))

    def apply(self, model: ir.Model) -> tuple[ir.Model, tuple[Edit, ...]]:
        """The rewritten model and what was edited.

        Raises:
            InputError: the plan was made for another model, a variant refuses its site, or the model's opset lacks
                what the variant needs.
        """
        graph = OnnxGraph(model, self.input_sizes)
        found = scan_onnx(graph, self.plan.model)
        plan = matched(self.plan, found)
        check_fits(plan, found)
        sites = {site.id: site for site in found.sites}
        chosen = [sites[placement.site] for placement in plan.placements]
        modules = [place(graph, sites[placement.site], placement, _precision(graph)) for placement in plan.placements]
        for module in modules:
            module.deploy()
        result = inlined(model) if model.functions else model.clone()
        _set_parameters(result, plan)
        edits = rewrite(result, graph, list(zip(chosen, modules, strict=True))) if modules else ()
        _put_relu(result, plan, edits, graph.prepared.opsets)
        return result, edits


def matched(plan: Plan, found: Scan) -> Plan:
    """The plan with its placements at the sites of the same weights: frontends may number the sites differently."""
    free = list(found.sites)
    placements = []
    for placement in plan.placements:
        chosen = pick(placement.site, placement.fingerprint, free)
        if chosen is not None:
            free.remove(chosen)
            placement = replace(placement, site=chosen.id)
        placements.append(placement)
    return replace(plan, placements=tuple(placements))


def rewrite(
    model: ir.Model, graph: OnnxGraph, replacements: Sequence[tuple[AttentionSite, SiteModule]]
) -> tuple[Edit, ...]:
    """Put each module where its site's value is made, in place; what only the site needed is gone."""
    fragments = export_sites(graph, [module for _, module in replacements])
    edits = []
    for (site, module), fragment in zip(replacements, fragments, strict=True):
        written = written_value(site)
        values = _spelled_out(model, graph, (*module.values, written))
        _splice(model.graph, [values[name] for name in module.values], values[written], fragment)
        edits.append(Edit(site.id, written, f"attention_{site.id}"))
    return tuple(edits)


def _put_relu(model: ir.Model, plan: Plan, edits: Sequence[Edit], opsets: Mapping[str, int]) -> None:
    """SimA's ReLU for GELU behind the sites whose variant asks for it."""
    for placement, edit in zip(plan.placements, edits, strict=True):
        if getattr(placement.variant, "relu", False):
            dead = relu_for_gelu(model.graph, _values(model.graph)[edit.replaced], opsets)
            tell_of_gelus(placement.site, len(dead))
            for node in dead:
                _drop(model.graph, node)


def _spelled_out(model: ir.Model, graph: OnnxGraph, names: Sequence[str]) -> dict[str, ir.Value]:
    """The named values of the model; those inside a fused operator after it is written out."""
    while True:
        values = _values(model.graph)
        missing = [name for name in names if name not in values]
        if not missing:
            return values
        node = _holding(missing[0], values)
        if not take_branch(model.graph, node, graph.prepared.sizes):
            write_out(model.graph, node, graph.prepared.sizes, graph.prepared.opsets.get("", 1))


def _holding(name: str, values: Mapping[str, ir.Value]) -> ir.Node:
    """The node that holds a value of the view: what is written out is named after its node's output, and a slash."""
    while "/" in name:
        name = name.rpartition("/")[0]
        node = values[name].producer() if name in values else None
        if node is not None:
            return node
    raise AssertionError(f"no node holds {name}")


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    made = (value for node in graph for value in node.outputs)
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *made)}


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
    _drop(graph, producer)


def _stored_under(graph: ir.Graph, value: ir.Value) -> str:
    return next(key for key, stored in graph.initializers.items() if stored is value)


def _drop(graph: ir.Graph, last: ir.Node) -> None:
    """Remove a node that nobody reads, then what only it read, and so on, with their initialisers."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node.graph is not graph or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        operands = {operand for operand in node.inputs if operand is not None}
        graph.remove(node, safe=True)
        for operand in operands:
            producer = operand.producer()
            if producer is not None:
                pending.append(producer)
            elif operand.is_initializer() and not operand.uses() and not operand.is_graph_input():
                del graph.initializers[str(operand.name)]


def _precision(graph: OnnxGraph) -> Precision:
    """A site is computed in the precision of what it reads."""

    def of(module: SiteModule, _: AttentionSite) -> torch.dtype:
        kinds = map(graph.dtype, module.values)
        return next((_FLOAT_TYPES[kind] for kind in kinds if kind in _FLOAT_TYPES), torch.float32)

    return of


def _set_parameters(model: ir.Model, plan: Plan) -> None:
    """Store what the plan refitted outside the sites."""
    imported = {attribute_name(name): name for name in model.graph.initializers}
    for name, tensor in plan.parameters.items():
        value = model.graph.initializers.get(name if name in model.graph.initializers else imported.get(name, name))
        if value is None or value.const_value is None:
            raise InputError(
                f"the plan refits {name}, which the model does not store; apply it to the model it was made from"
            )
        shape, wanted = tuple(value.const_value.shape), tuple(tensor.shape)
        if shape != wanted:
            raise InputError(f"the plan refits {name} of shape {wanted}, the model has {shape}")
        value.const_value = ir.tensor(tensor.detach().cpu().numpy(), name=value.name)
