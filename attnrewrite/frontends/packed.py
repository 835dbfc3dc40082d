"""Modules whose weights are tensors of a class of their own, as libraries that quantize modules make them (torchao's
Int8Tensor): integers and their scales, which the layers multiply with in ways of theirs.

A copy is read in which each is the numbers that it stands for, where that answers the same.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.in_batches import APART_TOLERANCE, allowed_apart
from attnrewrite.passes.verify import HALF_STEPS, known_error, outputs
from attnrewrite.patterns.quantised import UNQUANTISED


def with_plain_weights(name: str, model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """`model`, or a copy of it whose packed weights are the numbers that they stand for.

    Raises:
        InputError: there are none, or a layer does more than to multiply with them, as those do that round what they
            read: with the numbers it answers what it reads, or the model answers `inputs`, with something else.
    """
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    packed = {path: tensor for path, tensor in tensors.items() if is_traceable_wrapper_subclass(tensor)}
    if not packed:
        return model
    plain = {id(tensor): _plain(f"{name}'s {path}", tensor) for path, tensor in packed.items()}
    try:
        result = copy.deepcopy(model, dict(plain))
        with torch.no_grad():
            errors = _layer_errors(model, result, {path.rpartition(".")[0] for path in packed}, inputs)
            wanted, found = outputs(model(*inputs)), outputs(result(*inputs))
    except Exception as failure:  # layers made for packed weights may take no others
        why = f"{type(failure).__name__}: {first_line(failure)}"
        raise InputError(f"{name} does not run with its packed weights written out ({why}); {UNQUANTISED}") from failure
    differ = "answers differently with its weights as the numbers that they stand for"
    for path, (error, allowed) in errors.items():
        if not error <= allowed:
            kind = type(model.get_submodule(path)).__name__
            raise InputError(f"{name}'s {path} ({kind}) {differ}, by {error:.1e}: it quantizes more; {UNQUANTISED}")
    error = max(map(known_error, found, wanted), default=0.0)
    if not error <= max(map(allowed_apart, wanted), default=0.0):
        raise InputError(f"{name} {differ}, by {error:.1e}: its layers quantize more; {UNQUANTISED}")
    return result


def _layer_errors(
    model: nn.Module, plain: nn.Module, paths: Collection[str], inputs: Sequence[Tensor]
) -> dict[str, tuple[float, float]]:
    """For each layer that runs, how far its plain copy is from it on what it reads of `inputs`, and what is allowed."""
    errors: dict[str, tuple[float, float]] = {}

    def compared(path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, answer: Any) -> None:
            found, wanted = outputs(plain.get_submodule(path)(*args, **kwargs)), outputs(answer)
            steps = [HALF_STEPS * torch.finfo(each.dtype).eps for each in wanted if each.is_floating_point()]
            error = max(map(known_error, found, wanted), default=0.0)
            errors[path] = max(errors.get(path, (0.0, 0.0)), (error, max([APART_TOLERANCE, *steps])))

        return hook

    with ExitStack() as stack:
        for path in sorted(paths):
            handle = model.get_submodule(path).register_forward_hook(compared(path), with_kwargs=True)
            stack.callback(handle.remove)
        model(*inputs)
    return errors


def _plain(where: str, tensor: Tensor) -> Tensor:
    try:
        numbers = tensor.detach().dequantize()
    except Exception as error:  # each class has its own way to refuse
        numbers, why = tensor, f" ({first_line(error)})"
    else:
        why = ""
    if is_traceable_wrapper_subclass(numbers) or not numbers.is_floating_point():
        raise InputError(
            f"{where} is a {type(tensor).__name__}, of which the numbers cannot be had{why}: give the model "
            "with plain tensors"
        )
    return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers


def quantised_layer(model: nn.Module) -> str | None:
    """The first layer whose weight is no tensor of fractions, as those that compute on integers have none."""
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        integers = callable(weight) or (isinstance(weight, Tensor) and not weight.is_floating_point())
        if integers:
            return f"{path} ({type(layer).__name__})"
    return None
