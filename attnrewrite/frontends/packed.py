"""Modules whose weights are tensors of a class of their own, as libraries that quantize modules make them (torchao's
Int8Tensor): integers and their scales, which the layers multiply with in ways of theirs.

A copy is read in which each is the numbers that it stands for, where that answers the same.
"""

import copy
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.in_batches import allowed_apart
from attnrewrite.passes.verify import known_error, outputs

UNQUANTISED = "give the model before quantization"


def with_plain_weights(name: str, model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """`model`, or a copy of it whose packed weights are the numbers that they stand for.

    Raises:
        InputError: there are none, or the layers do more than to multiply with them, as those that round what they
            read do: the copy answers `inputs` with something else.
    """
    packed = {
        path: tensor
        for path, tensor in chain(model.named_parameters(), model.named_buffers())
        if is_traceable_wrapper_subclass(tensor)
    }
    if not packed:
        return model
    plain = {id(tensor): _plain(f"{name}'s {path}", tensor) for path, tensor in packed.items()}
    first, kind = next((path, type(tensor).__name__) for path, tensor in packed.items())
    try:
        result = copy.deepcopy(model, dict(plain))
        with torch.no_grad():
            wanted, found = outputs(model(*inputs)), outputs(result(*inputs))
    except Exception as error:  # layers made for packed weights may take no others
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name} does not run with its packed weights written out ({why}); {UNQUANTISED}") from error
    apart = max(map(known_error, found, wanted), default=0.0)
    if not apart <= max(map(allowed_apart, wanted), default=0.0):
        raise InputError(
            f"{name} answers differently, by {apart:.1e}, where {first} ({kind}) and its like are the numbers that "
            f"they stand for: its layers quantize more than weights; {UNQUANTISED}"
        )
    return result


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
    """The first layer that computes on integers: its weight is no tensor of fractions, or its code says so."""
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        integers = callable(weight) or (isinstance(weight, Tensor) and not weight.is_floating_point())
        if integers or "quant" in type(layer).__module__:
            return f"{path} ({type(layer).__name__})"
    return None
