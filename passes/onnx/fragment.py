"""Rewritten sites as ONNX: the torch modules themselves, exported, for the graph that they will stand in."""

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.onnx.structure import structure, weights
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.sizes import evaluate

_LOWEST = 11
_AXES_AS_INPUT = {"ReduceSum": 13, "Squeeze": 13, "Unsqueeze": 13}  # from which version on; other reductions from 18
_ZERO_ALLOWED = 14  # from here on, Reshape says what a zero means
_SHAPE_IN_PART = 15  # from here on, Shape may give part of the shape
_EXPORTED = 18  # the version that torch's exporter writes natively


@dataclass(frozen=True)
class Fragment:
    """The nodes of one site: `inputs` in the order of the module's values, and what it makes."""

    inputs: tuple[ir.Value, ...]
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    initialisers: tuple[ir.Value, ...]


def export_sites(graph: OnnxGraph, sites: Sequence[SiteModule]) -> tuple[Fragment, ...]:
    """One fragment for each module; values and nodes are named after the site.

    torch's exporter takes seconds a site, and sites of a model mostly differ in weights alone: each structure is
    exported once, and its nodes are copied for every site that has it.

    Raises:
        InputError: torch cannot export a module, or the model's opset lacks an operator that it needs.
    """
    version = graph.prepared.opsets.get("", 1)
    if version < _LOWEST:
        raise InputError(
            f"the model has opset {version}, rewriting needs {_LOWEST} or later: convert it with onnx.version_converter"
        )
    templates: dict[Hashable, ir.Model] = {}
    fragments = []
    for site in sites:
        key = structure(graph, site)
        if key not in templates:
            templates[key] = _template(graph, site, version)
        fragments.append(_fragment(templates[key].clone().graph, site, version))
    return tuple(fragments)


def _template(graph: OnnxGraph, site: SiteModule, version: int) -> ir.Model:
    """The site exported, with its weights left open: they are inputs of their own names, behind its operands."""
    tensors, dims = _example(graph, site)
    program = _export(site, tensors, dims, max(version, _EXPORTED))
    inner = program.model.graph
    for name in [name for name in weights(site) if name in inner.initializers]:
        value = inner.initializers.pop(name)
        value.const_value = None
        inner.inputs.append(value)
    program.optimize()
    model = ir.serde.deserialize_model(program.model_proto)
    for node in model.graph:
        lower(model.graph, node, version)
    return model


def _example(graph: OnnxGraph, site: SiteModule) -> tuple[tuple[Tensor, ...], tuple[dict, ...]]:
    """A tensor for each value that the site reads, and which of its axes follow the batch."""
    tensors, dims = [], []
    batch = Dim("batch", min=1)
    for value in site.values:
        size, dtype = graph.shape(value), ir.DataType(graph.dtype(value)).numpy()
        tensors.append(torch.from_numpy(np.zeros(size, dtype)))
        own = {}
        for axis in graph.batch_axes(value):
            each = size[axis] // graph.batch
            own[axis] = batch if each == 1 else each * batch
        dims.append(own)
    return tuple(tensors), tuple(dims)


def _export(
    module: nn.Module, tensors: tuple[Tensor, ...], dims: tuple[dict, ...], version: int
) -> torch.onnx.ONNXProgram:
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.export.export(module, tensors, dynamic_shapes={"tensors": dims})
            exported = torch.onnx.export(program, dynamo=True, opset_version=version, verbose=False, optimize=False)
        assert exported is not None
        return exported
    except Exception as error:  # torch raises many kinds
        line = first_line(error)
        raise InputError(f"torch.onnx cannot export the rewritten attention: {line}; choose another variant") from error


def _fragment(graph: ir.Graph, site: SiteModule, version: int) -> Fragment:
    """A copy of the template with the site's own weights, and what follows from them alone computed."""
    operands, opened = graph.inputs[: len(site.values)], graph.inputs[len(site.values) :]
    own = weights(site)
    for value in opened:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(own[str(value.name)].detach().cpu().numpy(), name=value.name)
        graph.register_initializer(value)
    fold_constants(graph, {"": version})
    stem = f"attention_{site.site_id}"
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.name = f"{stem}/{value.name}" if value.name else value.name
    for node in graph:
        node.name = f"{stem}/{node.name}"
    return Fragment(tuple(operands), graph.outputs[0], tuple(graph), tuple(graph.initializers.values()))


def fold_constants(graph: ir.Graph, opsets: Mapping[str, int]) -> None:
    """Replace nodes that read nothing but initialisers by what they make, then drop what nobody reads."""
    for node in list(graph):
        operands = [operand for operand in node.inputs if operand is not None]
        if not operands or not all(operand.is_initializer() for operand in operands) or len(node.outputs) != 1:
            continue
        arrays = [None if operand is None else operand.const_value.numpy() for operand in node.inputs]  # type: ignore[union-attr]
        try:
            (array,) = evaluate(node, arrays, opsets)
        except InputError:
            continue  # it is left to the runtime
        made = node.outputs[0]
        known = ir.val(f"{made.name}_folded", const_value=ir.tensor(np.asarray(array, order="C")))
        graph.register_initializer(known)
        ir.convenience.replace_all_uses_with(made, known, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def lower(graph: ir.Graph, node: ir.Node, version: int) -> None:
    """Respell a node of the exported version in an earlier one, in place.

    Raises:
        InputError: the earlier version has no such operator, attribute or operand.
    """
    if version >= _EXPORTED or node.domain not in ("", "ai.onnx"):
        return
    takes_axes = node.op_type in _AXES_AS_INPUT or node.op_type.startswith("Reduce")
    if takes_axes and version < _AXES_AS_INPUT.get(node.op_type, _EXPORTED) and len(node.inputs) > 1:
        _axes_as_attribute(node)
    if node.op_type == "Shape" and version < _SHAPE_IN_PART:
        _whole_shape(graph, node)
    if node.op_type == "Reshape" and version < _ZERO_ALLOWED:
        node.attributes.pop("allowzero", None)  # no site has an axis of length zero
    if node.op_type == "Split" and "num_outputs" in node.attributes and len(node.inputs) < 2:
        raise InputError(
            f"Split into equal parts needs opset {_EXPORTED}: convert the model with onnx.version_converter"
        )
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
        unknown = [name for name in node.attributes if name not in schema.attributes]
        fits = not unknown and len(node.inputs) <= schema.max_input
    except onnx.defs.SchemaError:
        fits = False
    if not fits:
        raise InputError(
            f"the rewritten attention needs {node.op_type} of opset {_EXPORTED}, the model uses {version}: "
            "convert it with onnx.version_converter, or choose another variant"
        )


def _whole_shape(graph: ir.Graph, node: ir.Node) -> None:
    """Shape of some axes as Shape and Slice."""
    bounds = [node.attributes.pop(name, None) for name in ("start", "end")]
    if bounds == [None, None]:
        return
    first, last = (default if a is None else a.as_int() for a, default in zip(bounds, (0, 1 << 31), strict=True))
    operands = []
    for name, number in (("start", first), ("end", last)):
        constant = ir.node("Constant", [], {"value": ir.tensor([number])}, name=f"{node.name}_{name}")
        constant.outputs[0].name = f"{node.outputs[0].name}_{name}"
        graph.insert_before(node, constant)
        operands.append(constant.outputs[0])
    part = ir.node("Slice", [], name=f"{node.name}_part")
    part.outputs[0].name = f"{node.outputs[0].name}_part"
    ir.convenience.replace_all_uses_with(node.outputs[0], part.outputs[0])
    part.resize_inputs(3)
    for place, value in enumerate([node.outputs[0], *operands]):
        part.replace_input_with(place, value)
    part.outputs[0].dtype = ir.DataType.INT64
    node.outputs[0].shape = None
    graph.insert_after(node, part)


def _axes_as_attribute(node: ir.Node) -> None:
    axes = node.inputs[1]
    node.attributes.pop("noop_with_empty_axes", None)
    if axes is not None:
        tensor = axes.const_value or ir.convenience.get_const_tensor(axes)
        assert tensor is not None
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in tensor.numpy().reshape(-1)])
    node.resize_inputs(1)
