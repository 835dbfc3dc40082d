"""Rewritten sites as ONNX: the torch modules themselves, exported, for the graph that they will stand in."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnrewrite.errors import InputError
from attnrewrite.passes.rewritten import RewrittenSite
from attnrewrite.patterns.onnx import OnnxGraph

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


def export_sites(graph: OnnxGraph, sites: Sequence[RewrittenSite]) -> tuple[Fragment, ...]:
    """One fragment for each module, all of one export; values and nodes are named after the site.

    Raises:
        InputError: torch cannot export the modules, or the model's opset lacks an operator that they need.
    """
    version = graph.prepared.opsets.get("", 1)
    if version < _LOWEST:
        raise InputError(
            f"the model has opset {version}, rewriting needs {_LOWEST} or later: convert it with onnx.version_converter"
        )
    tensors, dims = _example(graph, sites)
    program = _export(_Together(sites), tensors, dims, max(version, _EXPORTED))
    model = ir.serde.deserialize_model(program)
    for node in model.graph:
        lower(model.graph, node, version)
    return tuple(_fragments(model.graph, sites))


class _Together(nn.Module):
    """All sites side by side: one export costs little more than one site's."""

    def __init__(self, sites: Sequence[RewrittenSite]) -> None:
        super().__init__()
        self.sites = nn.ModuleList(sites)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, place = [], 0
        for site in self.sites:
            assert isinstance(site, RewrittenSite)
            results.append(site(*tensors[place : place + len(site.values)]))
            place += len(site.values)
        return tuple(results)


def _example(graph: OnnxGraph, sites: Sequence[RewrittenSite]) -> tuple[tuple[Tensor, ...], tuple[dict, ...]]:
    """A tensor for each value that the sites read, and which of its axes follow the batch."""
    tensors, dims = [], []
    batches = {site: Dim(f"batch_{site.site_id}", min=1) for site in sites}  # one for all would tie site to site
    for value, batch in ((value, batches[site]) for site in sites for value in site.values):
        size, dtype = graph.shape(value), ir.DataType(graph.dtype(value)).numpy()
        tensors.append(torch.from_numpy(np.zeros(size, dtype)))
        own = {}
        for axis in graph.batch_axes(value):
            each = size[axis] // graph.batch
            own[axis] = batch if each == 1 else each * batch
        dims.append(own)
    return tuple(tensors), tuple(dims)


def _export(module: nn.Module, tensors: tuple[Tensor, ...], dims: tuple[dict, ...], version: int) -> onnx.ModelProto:
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.export.export(module, tensors, dynamic_shapes={"tensors": dims})
            exported = torch.onnx.export(program, dynamo=True, opset_version=version, verbose=False)
        assert exported is not None
        return exported.model_proto
    except Exception as error:  # torch raises many kinds
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"torch.onnx cannot export the rewritten attention: {line}; choose another variant") from error


def _fragments(graph: ir.Graph, sites: Sequence[RewrittenSite]) -> Iterator[Fragment]:
    """Cut the export into its sites; what several share goes to the first."""
    taken: set[ir.Node] = set()
    held: set[ir.Value] = set()
    place = 0
    for site, output in zip(sites, list(graph.outputs), strict=True):
        inputs = tuple(graph.inputs[place : place + len(site.values)])
        place += len(site.values)
        nodes = [node for node in _made_from(graph, output) if node not in taken]
        taken.update(nodes)
        stored = {v for node in nodes for v in node.inputs if v is not None and v.is_initializer()}
        initialisers = tuple(value for value in graph.initializers.values() if value in stored - held)
        held.update(initialisers)
        stem = f"attention_{site.site_id}"
        for value in (*initialisers, *(value for node in nodes for value in node.outputs)):
            if value.name and not value.name.startswith("attention_"):
                value.name = f"{stem}/{value.name}"
        for node in nodes:
            node.name = f"{stem}/{node.name}"
        yield Fragment(inputs, output, tuple(nodes), initialisers)


def _made_from(graph: ir.Graph, output: ir.Value) -> list[ir.Node]:
    """The nodes that an output needs, in graph order."""
    needed: set[ir.Node] = set()
    pending = [output.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in needed:
            needed.add(node)
            pending += [operand.producer() for operand in node.inputs if operand is not None]
    return [node for node in graph if node in needed]


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
