"""Rewritten sites as ONNX: the torch modules themselves, exported, for the graph that they will stand in."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.joined_heads import JoinedHeads
from attnrewrite.passes.onnx.downgrade import EXPORTED, Downgrade
from attnrewrite.passes.onnx.fold_constants import FoldConstants
from attnrewrite.passes.onnx.structure import structure, weights
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.tracing import export_program
from attnrewrite.patterns.onnx.graph import OnnxGraph


@dataclass(frozen=True)
class Fragment:
    """The nodes of one site: `inputs` in the order of the module's values, and what it makes."""

    inputs: tuple[ir.Value, ...]
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    initialisers: tuple[ir.Value, ...]


Exportable = SiteModule | JoinedHeads


def export_sites(graph: OnnxGraph, sites: Sequence[Exportable]) -> tuple[Fragment, ...]:
    """One fragment for each module; values and nodes are named after the site.

    torch's exporter takes seconds a site, and sites of a model mostly differ in weights alone: each structure is
    exported once, and its nodes are copied for every site that has it.

    Raises:
        InputError: torch cannot export a module, or the model's opset lacks an operator that it needs.
    """
    version = graph.prepared.opsets.get("", 1)
    templates: dict[Hashable, ir.Model] = {}
    fragments = []
    for site in sites:
        key = structure(graph, site) if isinstance(site, SiteModule) else site.site_id
        if key not in templates:
            templates[key] = _template(graph, site, version)
        fragments.append(_fragment(templates[key].clone(), site))
    return tuple(fragments)


def _template(graph: OnnxGraph, site: Exportable, version: int) -> ir.Model:
    """The site exported, with its weights left open: they are inputs of their own names, behind its operands."""
    tensors, dims = _example(graph, site)
    program = _export(site, tensors, dims, max(version, EXPORTED))
    inner = program.model.graph
    for name in [name for name in weights(site) if name in inner.initializers]:
        value = inner.initializers.pop(name)
        value.const_value = None
        inner.inputs.append(value)
    program.optimize()
    return Downgrade(version)(ir.serde.deserialize_model(program.model_proto))


def _example(graph: OnnxGraph, site: Exportable) -> tuple[tuple[Tensor, ...], tuple[dict, ...]]:
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
            program = export_program(module, tensors, dynamic_shapes={"tensors": dims})
            exported = torch.onnx.export(program, dynamo=True, opset_version=version, verbose=False, optimize=False)
        assert exported is not None
        return exported
    except Exception as error:  # torch raises many kinds
        line = first_line(error)
        raise InputError(f"torch.onnx cannot export the rewritten attention: {line}; choose another variant") from error


def _fragment(model: ir.Model, site: Exportable) -> Fragment:
    """The template with the site's own weights, and what follows from them alone computed."""
    graph = model.graph
    operands, opened = graph.inputs[: len(site.values)], graph.inputs[len(site.values) :]
    own = weights(site)
    for value in opened:
        graph.inputs.remove(value)
        value.const_value = ir.tensor(own[str(value.name)].detach().cpu().numpy(), name=value.name)
        graph.register_initializer(value)
    FoldConstants()(model)
    stem = f"attention_{site.site_id}"
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.name = f"{stem}/{value.name}" if value.name else value.name
    for node in graph:
        node.name = f"{stem}/{node.name}"
    return Fragment(tuple(operands), graph.outputs[0], tuple(graph), tuple(graph.initializers.values()))
