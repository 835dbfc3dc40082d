"""Small models with random weights, for the detection benchmark: `build(name)` gives the module and two images.

The tables (one file a library) are data: what to build and how to make it small. Attention is
spelled out wherever a library offers both spellings.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from attnrewrite.errors import unknown_name

IMAGES = 2
LIBRARIES = ("timm", "transformers", "torchvision", "vit_pytorch")


@dataclass(frozen=True)
class Recipe:
    """What a library builds: `target` as its builder names it, `shape` of one input, the builder's arguments."""

    target: str
    shape: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)


def names() -> tuple[str, ...]:
    """Every model as library/name."""
    return tuple(f"{library}/{name}" for library in LIBRARIES for name in _table(library))


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model in evaluation mode, and its example inputs; the same each time.

    Raises:
        InputError: no model of that name.
    """
    library, _, short = name.partition("/")
    if name not in names():
        raise unknown_name("model", name, names())
    torch.manual_seed(0)
    recipe = _table(library)[short]
    model = import_module(f"zoo.{library}").make(recipe)
    return model.eval(), (torch.randn(IMAGES, *recipe.shape),)


def _table(library: str) -> dict[str, Recipe]:
    table: dict[str, Recipe] = import_module(f"zoo.{library}").TABLE
    return table
