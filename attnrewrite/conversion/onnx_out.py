"""A converted model as ONNX: the file that it was read from, with its sites and fitted maps changed, and checked."""

import re
from itertools import chain
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError, InputError, first_line
from attnrewrite.frontends.onnx.compared import TOLERANCE, beyond_rounding, half_of, run_file
from attnrewrite.frontends.onnx.file import open_sizes
from attnrewrite.passes.in_batches import with_images
from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.passes.verify import HALF_STEPS
from attnrewrite.patterns.onnx.files import quiet_ir, read_model
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.operators import QUANTISED
from attnrewrite.patterns.onnx.sizes import real_inputs
from attnrewrite.plan import Plan

_GENERATED = re.compile(r"_token_\d+(_|$)")  # in names that onnxruntime's optimizer makes up
_MOST_BYTES = 1 << 30  # a protobuf ends at two gigabytes: larger weights go beside it


def write_file(
    source: Path, plan: Plan, module: nn.Module, inputs: tuple[Tensor, ...], size: tuple[int, ...] | None, out: Path
) -> None:
    """Write the file at `source`, rewritten by `plan`, to `out`: checked by onnx, and against `module` in onnxruntime.

    Raises:
        CheckFailedError: the rewritten file is not sound, or differs from `module` by more than rounding explains.
    """
    model = read_model(source)
    result, _ = OnnxRewrite(plan, open_sizes(model, size)).apply(model)
    _free_generated_names(result)
    large = (
        sum(value.const_value.nbytes for value in result.graph.initializers.values() if value.const_value) > _MOST_BYTES
    )
    if not large:
        ir.external_data.load_to_model(result)  # weights that lay beside the source are no part of the folder
    beside = f"{out.name}.data" if large else None
    _write(result, out, beside)
    refused = _refused(out)
    if refused and _refused(source):  # for what the source says of its values' sizes, which no one needs to be told
        _forget_sizes(result)
        _write(result, out, beside)
        refused = _refused(out)
    if refused:
        raise CheckFailedError(f"{source}: onnx refuses the rewritten model: {refused}")
    given = _of_its_batch(model, inputs)
    half = half_of(result)  # the least that a form divides by follows the type, and is written down as a number
    allowed = TOLERANCE if half is None else HALF_STEPS * torch.finfo(half).eps
    with torch.no_grad():
        off = beyond_rounding(OnnxGraph(result, open_sizes(model, size)).source, module, given, allowed)
    if off:
        raise CheckFailedError(
            f"{source}: the rewritten model differs from the torch module by {off:.2e} (allowed {allowed:.0e}); "
            "nothing was written"
        )
    if half is not None or any(node.op_type in QUANTISED for node in result.graph):
        told = _fault(out, given)  # what was compared is not what users will run
        if told is not None and _fault(source, given) is None:
            raise CheckFailedError(f"{source}: rewritten, {told}, which it did not before; nothing was written")


def _write(model: ir.Model, out: Path, beside: str | None) -> None:
    with quiet_ir():
        ir.save(model, out, external_data=beside)


def _refused(path: Path) -> str | None:
    """Why onnx does not take a file, its sizes followed; None where it does."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # onnx raises several kinds
        return first_line(error)
    return None


def _forget_sizes(model: ir.Model) -> None:
    """Leave out what a file says of the sizes of values that are not its inputs and outputs."""
    for graph in model.graphs():
        for value in chain(graph.initializers.values(), *(node.outputs for node in graph)):
            if not (value.is_graph_input() or value.is_graph_output()):
                value.shape = None


def _fault(path: Path, inputs: tuple[Tensor, ...]) -> str | None:
    """What keeps onnxruntime, with its own optimisations, from answering in numbers; None where nothing does."""
    try:
        results = run_file(path, [inputs])[0]
    except InputError as refusal:
        return str(refusal)
    sound = all(bool(torch.isfinite(each).all()) for each in results)
    return None if sound else "its answer has NaN or infinity in onnxruntime"


def _free_generated_names(model: ir.Model) -> None:
    """Rename what onnxruntime named, in a file that it optimised and saved: sizes, and what has a name of its kind.
    Optimising it again it makes up the same names, and refuses the file ("Attempt to replace the existing tensor").
    """
    stored = dict(model.graph.initializers)
    if not any(map(_GENERATED.search, stored)):
        return
    for name, value in stored.items():
        if _GENERATED.search(name) or value.dtype == ir.DataType.INT64:
            value.name = f"kept/{name}"


def _of_its_batch(model: ir.Model, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`inputs` with as many images as the file takes, where it takes one batch size."""
    shape = real_inputs(model.graph)[0].shape
    return with_images(inputs, shape[0]) if shape is not None and len(shape) and isinstance(shape[0], int) else inputs
