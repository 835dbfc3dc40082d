"""Models that take one batch size: opened for any where that can be done, given whole batches where it cannot."""

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.errors import Refusal, first_line
from attnrewrite.frontends.capture import Captured, batch_of, capture, inputs_of
from attnrewrite.frontends.sources import Source
from attnrewrite.passes.base import PassResult
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.draws import drawn_alike
from attnrewrite.passes.fx.functionalise import functional_graph
from attnrewrite.passes.fx.open_batch import OpenBatch
from attnrewrite.passes.in_batches import InBatches, Known, images_mixed, with_images
from attnrewrite.passes.tracing import export_program
from attnrewrite.patterns.fx.operators import is_open

COMPARED = (2, 3)  # the batches of the two exports that tell which constants follow


def opened(captured: Captured, model: nn.Module | ExportedProgram) -> Captured:
    """`captured` with its batch open, where it was fixed and can be opened; else as it is, the reason for its note."""
    if captured.fixed_batch is None or not captured.exact:
        return captured
    why: Refusal | None = None
    if isinstance(model, nn.Module):
        exports = [_exported(model, with_images(captured.example_inputs, count)) for count in COMPARED]
        if exports[0] is not None and exports[1] is not None:
            example = with_images(captured.example_inputs, COMPARED[0])
            found = OpenBatch(example, wider=exports[1]).looked(exports[0])
            if not isinstance(found, Refusal):
                return _for_any(captured, found.graph)
            why = found
    found = OpenBatch(captured.example_inputs).looked(captured.module)
    if isinstance(found, Refusal):
        return replace(captured, note=f"the graph {why or found}")
    return _for_any(captured, found.graph)


def fed_apart(captured: Captured) -> Captured:
    """`captured`, with the example's batch for its only one where the graph takes any, but answers an image otherwise
    beside others: code that reads its first image alone, or statistics of the batch. Where the example is one image,
    the graph of that one is opened for any number of them instead, if it can be.
    """
    if captured.fixed_batch is not None:
        return captured
    example = captured.example_inputs
    mixed = _mixed(captured.module, example)
    if mixed is None:
        return captured
    fixed = replace(captured, fixed_batch=int(example[0].shape[0]), note=f"the graph {mixed}")
    alone = _exported(captured.module, example) if fixed.fixed_batch == 1 else None
    found = None if alone is None else OpenBatch(example).looked(alone)
    return _for_any(fixed, found.graph) if isinstance(found, PassResult) else fixed


@torch.no_grad()
def _mixed(model: nn.Module, example: tuple[Tensor, ...]) -> Refusal | None:
    """Whether a model answers an image otherwise beside others, or takes no other batch than the example's."""
    try:
        return images_mixed(Known(model, drawn_alike(example)), model)
    except NotImplementedError as error:  # torch draws no numbers of some types
        return Refusal("not-drawn", f"takes what nothing is drawn of: {first_line(error)}")


def _for_any(captured: Captured, graph: GraphModule) -> Captured:
    return replace(captured, module=graph, fixed_batch=None, note=None, models_batch=captured.fixed_batch)


def _exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule | None:
    """The functional graph of a model for the batch of `inputs`, where torch.export captures it."""
    try:
        with torch.no_grad(), without_torch_logs():
            return functional_graph(export_program(model, inputs))
    except Exception:  # torch.export raises many kinds; what it cannot do is told of the graph that it could
        return None


def runnable(source: Source) -> nn.Module:
    """The source as a module in evaluation mode."""
    if source.model is not None:
        is_graph = isinstance(source.model, GraphModule)  # graphs were captured in evaluation mode, and stay in it
        return source.model if is_graph else source.model.eval()
    assert source.program is not None
    return source.program.module()


def fixed_batch(source: Source) -> int | None:
    """The batch size that a model is to be given: the only one of a program's signature, or the example's where it
    takes no other or answers an image otherwise beside others; None where it takes any.
    """
    if source.program is not None:
        size = batch_of(inputs_of(source.program))
        if not is_open(size):
            return int(size)
    example = source.example_inputs
    if not example or not example[0].dim():
        return None
    return None if _mixed(runnable(source), example) is None else int(example[0].shape[0])


def any_batch(source: Source) -> nn.Module:
    """The source as a module for any number of images: opened where its batch is fixed, else called batch by batch."""
    module, size = runnable(source), fixed_batch(source)
    if size is None:
        return module
    captured = fed_apart(opened(capture(source.name, _model(source), source.example_inputs), _model(source)))
    if captured.fixed_batch is None:
        return captured.module
    tell_fixed(captured)
    return InBatches(module, size)


def tell_fixed(captured: Captured) -> None:
    """Say that a model takes one batch size, and why it cannot take others."""
    if captured.fixed_batch is not None:
        logging.getLogger("attnrewrite").warning(
            "%s takes batches of %d only: %s", captured.name, captured.fixed_batch, captured.note
        )


def _model(source: Source) -> nn.Module | ExportedProgram:
    model = source.model if source.program is None else source.program
    assert model is not None
    return model
