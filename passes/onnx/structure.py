"""What a rewritten site is apart from its weights: sites of one structure differ, once exported, in numbers alone."""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnrewrite.passes.site_module import SiteModule
from attnrewrite.patterns.onnx.graph import OnnxGraph

_OWN = frozenset(vars(nn.Module()))  # what every module has: hooks and the like


def structure(graph: OnnxGraph, site: SiteModule) -> Hashable:
    """What an export of the site depends on: classes, options, layouts, the sizes and types of what it reads and holds.

    Equal for two sites only if their exports are the same but for the elements of parameters and buffers. What cannot
    be compared by value counts as its own.
    """
    places = {name: place for place, name in enumerate(site.values)}
    operands = tuple((graph.shape(name), graph.dtype(name), graph.batch_axes(name)) for name in site.values)
    parts = tuple((name, _module(part)) for name, part in site.named_children())
    joined = _plain((site.core.temperature, site.core.terms), places)
    return operands, parts, joined, _plain(site.roles, places), site.heads, _ties(site)


def weights(site: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that are not saved included."""
    return {
        **dict(site.named_parameters(remove_duplicate=False)),
        **dict(site.named_buffers(remove_duplicate=False)),
    }


def _ties(site: nn.Module) -> tuple[int, ...]:
    """For each weight, the first that it is one tensor with."""
    held = [id(tensor) for tensor in weights(site).values()]
    return tuple(held.index(each) for each in held)


def _module(module: nn.Module) -> Hashable:
    own = {name: value for name, value in vars(module).items() if name not in _OWN}
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        type(module),
        module.training,
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        _plain(own, {}),
        tuple((name, _module(child)) for name, child in module.named_children()),
    )


def _plain(value: Any, places: Mapping[str, int]) -> Hashable:
    """`value` as something that compares by what it holds; a graph value's name as its place among the operands."""
    if isinstance(value, str) and value in places:
        return ("operand", places[value])
    if value is None or isinstance(value, bool | int | float | str | type | torch.dtype):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(_plain(each, places) for each in value)
    if isinstance(value, dict):
        return dict, tuple((_plain(key, places), _plain(each, places)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_plain(each, places) for each in value)
    if is_dataclass(value):
        return type(value), tuple(_plain(getattr(value, field.name), places) for field in fields(value))
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor):
        return type(value), _plain(vars(value), places)
    return "itself", id(value)
