"""ONNX files as sources: explained as they are, and read as a torch module."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.onnx_import.importer import import_model
from attnrewrite.patterns.onnx.files import read_model
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.sizes import real_inputs
from attnrewrite.site import Scan


def examine_file(path: Path, size: tuple[int, ...] | None = None) -> tuple[OnnxGraph, Scan]:
    """An ONNX file's graph and every attention in it, read natively. `size` (C, H, W) gives what its input leaves open.

    Raises:
        InputError: the file is damaged, or an open axis is not given.
    """
    model = read_model(path)
    graph = OnnxGraph(model, open_sizes(model, size))
    return graph, scan_onnx(graph, path.stem)


def load_file(path: Path, size: tuple[int, ...] | None = None) -> tuple[GraphModule, tuple[Tensor, ...], Scan]:
    """An ONNX file as a torch module, inputs to run it on (one image where its batch is open), and its own sites.

    Raises:
        InputError: the file is damaged, an open axis is not given, or an operator is not translated.
        CheckFailedError: the module differs from onnxruntime.
    """
    model = read_model(path)
    module, inputs = import_model(model, open_sizes(model, size))
    batches = [next(iter(value.shape), 0) for value in real_inputs(model.graph) if value.shape is not None]
    is_open = len(batches) == len(inputs) and not any(isinstance(batch, int) for batch in batches)
    found = scan_onnx(OnnxGraph(model, open_sizes(model, size)), path.stem)
    return module, tuple(tensor[:1] for tensor in inputs) if is_open else inputs, found


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
