"""ONNX files as sources: explained as they are, and read as a torch module."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.onnx.importer import import_graph
from attnrewrite.frontends.onnx.left_out import LeftOut, left_out
from attnrewrite.patterns.onnx.files import read_model
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.sizes import real_inputs
from attnrewrite.site import Scan

log = logging.getLogger("attnrewrite")


def examine_file(path: Path, size: tuple[int, ...] | None = None) -> tuple[OnnxGraph, Scan]:
    """An ONNX file's graph and every attention in it, read natively. `size` (C, H, W) gives what its input leaves open.

    Raises:
        InputError: the file is damaged, or an open axis is not given.
    """
    model = read_model(path)
    graph = OnnxGraph(model, open_sizes(model, size))
    if graph.roundings:
        log.warning("%s: %d roundings inside its attention are left out", path.stem, len(graph.roundings))
    return graph, scan_onnx(graph, path.stem)


@dataclass(frozen=True)
class Loaded:
    """An ONNX file as a torch module, `inputs` to run it on (one image where its batch is open), its own sites, and
    what the module leaves out of a quantised file.
    """

    module: GraphModule
    inputs: tuple[Tensor, ...]
    scan: Scan
    left_out: LeftOut | None


def load_file(path: Path, size: tuple[int, ...] | None = None) -> Loaded:
    """An ONNX file as a torch module.

    Raises:
        InputError: the file is damaged, an open axis is not given, or an operator is not translated.
        CheckFailedError: the module differs from onnxruntime, or what it leaves out is more than rounding.
    """
    model = read_model(path)
    graph = OnnxGraph(model, open_sizes(model, size))
    module, inputs = import_graph(graph)
    lost = left_out(graph, inputs)
    if lost is not None:
        log.warning(
            "%s: %d roundings inside its attention are left out, which changes its answer by %.1f %% on random inputs "
            "(as much noise as their steps: %.1f %%)",
            *(path.stem, lost.roundings, 100 * lost.difference, 100 * lost.drawn),
        )
    batches = [next(iter(value.shape), 0) for value in real_inputs(model.graph) if value.shape is not None]
    is_open = len(batches) == len(inputs) and not any(isinstance(batch, int) for batch in batches)
    example = tuple(tensor[:1] for tensor in inputs) if is_open else inputs
    return Loaded(module, example, scan_onnx(graph, path.stem), lost)


def open_sizes(model: ir.Model, size: tuple[int, ...] | None) -> Mapping[str, tuple[int, ...]] | None:
    """`size` (C, H, W) as what the first input leaves open."""
    inputs = real_inputs(model.graph)
    if size is None or not inputs:
        return None
    value = inputs[0]
    own = list(value.shape or ())
    if len(own) == 4 and own[3] == size[0] and own[1] != size[0]:
        size = (*size[1:], size[0])  # it takes its channels last
    if len(own) == len(size) + 1 and any(isinstance(a, int) and a != b for a, b in zip(own[1:], size, strict=True)):
        fixed = "x".join(str(length) if isinstance(length, int) else "?" for length in own[1:])
        raise InputError(f"input {value.name!r} takes {fixed}, not {'x'.join(map(str, size))}: leave out --input-size")
    return {str(value.name): (1, *size)}
