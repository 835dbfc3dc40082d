"""What a model is run on: example inputs as they are given or made, and whether the model takes them."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attnrewrite.errors import InputError, first_line
from attnrewrite.images.preprocessing import Size, format_size
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.in_batches import with_images
from attnrewrite.passes.original import GRAPH_TOLERANCE
from attnrewrite.passes.verify import HALF_STEPS, known_error, outputs

BATCHES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 50, 64, 100, 128, 256)  # that a model's code may settle for
TEXT = "it reads token numbers, as text models do, not pictures; in Python, give them as example_inputs"


def given_examples(given: object) -> tuple[Tensor, ...]:
    """Example inputs as Python gives them, one tensor or several in the order of forward's arguments.

    Raises:
        InputError: something else is among them, or a tensor that holds no numbers.
    """
    if isinstance(given, Tensor):
        given = (given,)
    if isinstance(given, Mapping | np.ndarray | str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"example_inputs are a {type(given).__name__}: give tensors, in the order of forward's inputs")
    inputs = tuple(given)
    for index, value in enumerate(inputs):
        if fault := _fault(value):
            raise InputError(f"example input {index} {fault}")
    return tuple(value.detach() if value.requires_grad else value for value in inputs)


def _fault(value: object) -> str | None:
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}: give tensors, in the order of forward's inputs"
    if value.is_meta:
        return "is on the meta device, where nothing has numbers: give one that has"
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        return "is sparse, nested or quantized: give a dense tensor"
    if not value.numel():
        return f"is {list(value.shape)} and holds no numbers: give one with at least one image, of at least one token"
    return None


def made_example(size: Size) -> tuple[Tensor, ...]:
    """One image [1, C, H, W] of random numbers, always the same."""
    return (torch.randn(1, *size, generator=torch.Generator().manual_seed(0)),)


@torch.no_grad()
def one_image(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`inputs` with their first image alone, where `run` answers it as it does among the others.

    Elsewhere the first axis is no batch, or the only one that the model takes: the inputs stay as they are.
    """
    batch = next((len(tensor) for tensor in inputs if tensor.dim()), 1)
    if batch == 1:
        return inputs
    first = with_images(inputs, 1)
    try:
        alone, among = outputs(run(*first)), outputs(run(*inputs))
    except Exception:  # it takes no other batch, and says so in its own words
        return inputs
    if not alone or any(tensor.dim() == 0 or len(tensor) != batch for tensor in among):
        return inputs
    return first if all(_alike(*pair) for pair in zip(alone, among, strict=True)) else inputs


def _alike(alone: Tensor, among: Tensor) -> bool:
    return known_error(alone, among[:1]) <= max(GRAPH_TOLERANCE, 2 * HALF_STEPS * torch.finfo(alone.dtype).eps)


def require_runs(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise InputError where the model does not take its example inputs, saying what else to give."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = next((path for path, tensor in tensors if is_lazy(tensor) or tensor.is_meta), None)
    if empty is not None:
        raise InputError(f"{name}: weight {empty} has no numbers (it is on the meta device, or lazy): load them first")
    try:
        with torch.no_grad(), without_torch_logs():
            model(*inputs)
    except (Exception, SystemExit) as error:  # a model refuses an input in its own words
        reason = first_line(error)
        raise InputError(
            f"{name} does not take an input of {format_size(inputs[0].shape[1:]) or 'one number'} ({reason}): "
            f"{_way_out(model, inputs, reason)}"
        ) from error


def many_as_taken(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`inputs`, one image, or as many of them as the code of the model settles for. Raises as `require_runs` does."""
    try:
        require_runs(name, model, inputs)
    except InputError:
        if (batch := _own_batch(model, inputs)) is None:
            raise
        return with_images(inputs, batch)
    return inputs


def reads_tokens(model: nn.Module) -> bool:
    return next(iter(inspect.signature(model.forward).parameters), "") in ("input_ids", "token_ids")


def _way_out(model: nn.Module, inputs: Sequence[Tensor], reason: str) -> str:
    """What else to give a model that refuses `inputs`: more of them, another type, tokens, or another size."""
    named = inspect.signature(model.forward).parameters.values()
    plain = [each for each in named if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each.name for each in plain if each.default is each.empty]
    if len(needed) > len(inputs):
        listed = ", ".join(needed)
        return f"its forward takes {len(needed)} inputs ({listed}); in Python, give all of them as example_inputs"
    if unplaced := [each.name for each in named if each.kind is each.KEYWORD_ONLY and each.default is each.empty]:
        return f"its forward takes {', '.join(unplaced)} by name alone; wrap it in a module that takes it by place"
    if inputs[0].is_floating_point() and ("indices" in reason or reads_tokens(model)):
        return TEXT
    used = next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs[0].dtype)
    if used != inputs[0].dtype and (inputs[0].is_floating_point() or "dtype" in reason):
        own, given = (str(each).removeprefix("torch.") for each in (used, inputs[0].dtype))
        return (
            f"it computes in {own} and was given {given}; convert model.float(), or give {own} example_inputs in Python"
        )
    if (batch := _own_batch(model, inputs)) is not None:
        return f"its code settles for a batch of {batch}; in Python, give example_inputs of so many images"
    return "give another --input-size, or other example_inputs in Python"


@torch.no_grad()
def _own_batch(model: nn.Module, inputs: Sequence[Tensor]) -> int | None:
    """A batch that a model takes which refuses a single image; None where there is none among the usual ones."""
    if any(not tensor.dim() or len(tensor) != 1 for tensor in inputs):
        return None
    for batch in BATCHES:
        try:
            model(*with_images(inputs, batch))
        except (Exception, SystemExit):  # nor this one
            continue
        return batch
    return None
