"""ONNX sources: read as a torch module, explained as they are, and written back with only their sites changed."""

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.onnx_import import TOLERANCE, difference, import_model
from attnrewrite.passes.onnx import OnnxRewrite
from attnrewrite.patterns.onnx import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx_files import read_model
from attnrewrite.patterns.onnx_sizes import real_inputs
from attnrewrite.plan import Plan
from attnrewrite.site import Scan

_MOST_BYTES = 1 << 30  # a protobuf ends at two gigabytes: larger weights go beside it


def examine_file(path: Path, size: tuple[int, ...] | None = None) -> tuple[OnnxGraph, Scan]:
    """An ONNX file's graph and every attention in it, read natively. `size` (C, H, W) gives what its input leaves open.

    Raises:
        InputError: the file is damaged, or an open axis is not given.
    """
    model = read_model(path)
    graph = OnnxGraph(model, _sizes(model, size))
    return graph, scan_onnx(graph, path.stem)


def load_file(path: Path, size: tuple[int, ...] | None = None) -> tuple[GraphModule, tuple[Tensor, ...], Scan]:
    """An ONNX file as a torch module, inputs to run it on (one image where its batch is open), and its own sites.

    Raises:
        InputError: the file is damaged, an open axis is not given, or an operator is not translated.
        CheckFailedError: the module differs from onnxruntime.
    """
    model = read_model(path)
    module, inputs = import_model(model, _sizes(model, size))
    is_open = all(value.shape is not None and not isinstance(value.shape[0], int) for value in real_inputs(model.graph))
    found = scan_onnx(OnnxGraph(model, _sizes(model, size)), path.stem)
    return module, tuple(tensor[:1] for tensor in inputs) if is_open else inputs, found


def write_file(
    source: Path, plan: Plan, module: nn.Module, inputs: tuple[Tensor, ...], size: tuple[int, ...] | None, out: Path
) -> None:
    """Write the file at `source`, rewritten by `plan`, to `out`: checked by onnx, and against `module` in onnxruntime.

    Raises:
        CheckFailedError: the rewritten file is not sound, or differs from `module`.
    """
    model = read_model(source)
    result, _ = OnnxRewrite(plan, _sizes(model, size)).apply(model)
    large = (
        sum(value.const_value.nbytes for value in result.graph.initializers.values() if value.const_value) > _MOST_BYTES
    )
    ir.save(result, out, external_data=f"{out.name}.data" if large else None)
    try:
        onnx.checker.check_model(out, full_check=True)
    except Exception as error:  # onnx raises several kinds
        raise CheckFailedError(f"{source}: onnx refuses the rewritten model: {str(error).splitlines()[0]}") from error
    with torch.no_grad():
        off = difference(result, module, inputs)
    if not off <= TOLERANCE:
        raise CheckFailedError(
            f"{source}: the rewritten model differs from the torch module by {off:.2e} (allowed {TOLERANCE:.0e}); "
            "nothing was written"
        )


def _sizes(model: ir.Model, size: tuple[int, ...] | None) -> Mapping[str, tuple[int, ...]] | None:
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
