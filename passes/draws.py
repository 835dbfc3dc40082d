"""Inputs that a check draws for itself: an example may hide what a model does, as an all-ones mask or a blank picture.

Beside the example one more input is drawn, a batch of two images where the batch is open. A third of each image has
values of each kind of KINDS, so that tokens that are weak, strong and as in the example attend to each other. Every
element is drawn by itself: no two images, queries or keys are alike. Reproducible for a seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.patterns.fx.operators import is_open


@dataclass(frozen=True)
class Draw:
    """Inputs of a model, and the `name` by which messages refer to them.

    `fallbacks` makes the draws that are to be tried one by one where the model does not take this one: those that it
    holds in one, or the same of as many images as the example has.
    `is_example`: nothing in it was drawn. `last_image`: the inputs of its last image alone; None where some input is
    not given for each image by itself.
    """

    name: str
    inputs: tuple[Tensor, ...]
    fallbacks: Callable[[], Sequence["Draw"]] = tuple
    is_example: bool = False
    last_image: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class _Kind:
    """How a draw differs from the others: its images, the share of a mask's elements that are flipped, its numbers."""

    name: str
    images: int
    flipped: float
    numbers: str  # the example's own, in another order; "sparse" and weak; "one sign" and strong


KINDS = (
    _Kind("the example's values in another order", 2, 0.25, "own"),
    _Kind("sparse values of both signs", 1, 0.5, "sparse"),
    _Kind("large values of one sign", 1, 0.25, "one sign"),
)


MIXED = "values in another order, sparse, and large"


def drawn(graph: GraphModule, example: tuple[Tensor, ...], seed: int = 0) -> tuple[Draw, ...]:
    """The example, then a draw that holds a third of each kind, and falls back on a draw of each: the same types, and
    the lengths that `graph`'s inputs leave open varied; each of those falls back on one of the example's own lengths,
    for models that count images by the clip.

    Floating-point inputs have the example's mean and spread (0 and 1 where it is constant), integers lie in the range
    that the example shows; of three axes ([images, tokens, numbers]) whole rows of the example are drawn. Masks (two
    values, or one above 0) differ from the example's here and there, except for the first key of each row: a query that
    sees no key at all has no answer.

    Raises:
        InputError: `example` is not what `graph` takes.
    """
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(places) != len(example):
        raise InputError(f"the model takes {len(places)} inputs, and the example has {len(example)}")
    known = [place.meta.get("val") for place in places]
    batch = _batch_symbols(known, example)

    def draw(name: str, images: int, kinds: Sequence[_Kind], generator: torch.Generator) -> Draw:
        sizes = [_sizes(value, tensor, batch, images) for value, tensor in zip(known, example, strict=True)]
        inputs = tuple(_in_parts(t, size, kinds, generator) for t, size in zip(example, sizes, strict=True))
        return Draw(name if not batch else f"{name}, {images} image{'s' if images > 1 else ''}", inputs)

    def as_many(kind: _Kind) -> tuple[Draw, ...]:
        generator = torch.Generator().manual_seed(seed)
        inputs = tuple(_in_parts(tensor, list(tensor.shape), (kind,), generator) for tensor in example)
        return (Draw(f"{kind.name}, as many images as in the example", inputs),)

    def of_each_kind() -> tuple[Draw, ...]:
        generator = torch.Generator().manual_seed(seed)
        made = [(kind, draw(kind.name, kind.images, (kind,), generator)) for kind in KINDS]
        sizes = [tensor.shape for tensor in example]
        return tuple(
            each if [t.shape for t in each.inputs] == sizes else replace(each, fallbacks=partial(as_many, kind))
            for kind, each in made
        )

    mixed = draw(MIXED, 2, KINDS, torch.Generator().manual_seed(seed))
    return Draw("the example", example, is_example=True), replace(mixed, fallbacks=of_each_kind)


def drawn_alike(example: tuple[Tensor, ...], seed: int = 0) -> tuple[Draw, Draw]:
    """The example, then a draw of as many images of the same shapes, with a third of each kind as in `drawn`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(_in_parts(tensor, list(tensor.shape), KINDS, generator) for tensor in example)
    return Draw("the example", example, is_example=True), Draw(f"{MIXED}, as many images as in the example", inputs)


def in_one_batch(draws: Sequence[Draw]) -> tuple[Draw, ...]:
    """The two `draws` of `drawn` as one, which takes one run: the example as the first image of the batch of two. As
    they are, where the example is not one image, or an input is not given for each image by itself.
    """
    example, two = draws
    pairs = list(zip(example.inputs, two.inputs, strict=True))
    if not all(one.shape[:1] == (1,) and both.shape == (2, *one.shape[1:]) for one, both in pairs):
        return tuple(draws)
    inputs = tuple(torch.cat([one, both[1:]]) for one, both in pairs)
    last = tuple(both[1:] for both in inputs)
    return (Draw(f"{example.name} and {two.name}", inputs, lambda: draws, last_image=last),)


def arithmetic_inputs(draws: Sequence[Draw]) -> tuple[Tensor, ...]:
    """The inputs to check arithmetic on: what was drawn, as the example may be a blank picture; one image where it can
    be taken apart from the example.
    """
    first = draws[0]
    return draws[1].inputs if first.last_image is None else first.last_image


def _batch_symbols(known: Sequence[object], example: Sequence[Tensor]) -> set[Any]:
    """The symbols of the batch: of each input's first axis that is left open, where the example is as long there as
    along the first such axis of all. Inputs that meet nowhere, or by an index alone, have a symbol each.
    """
    found = [axis for pair in zip(known, example, strict=True) if (axis := _first_open(*pair)) is not None]
    return {_first_symbol(size) for size, length in found if length == found[0][1]}


def _first_open(value: object, tensor: Tensor) -> tuple[torch.SymInt, int] | None:
    """The first of an input's lengths that is left open, and the example's; None where all are settled."""
    pairs = zip(value.shape, tensor.shape, strict=True) if isinstance(value, Tensor) else ()
    return next(((size, length) for size, length in pairs if is_open(size)), None)


def _first_symbol(size: torch.SymInt) -> Any:
    return sorted(size.node.expr.free_symbols, key=str)[0]


def _sizes(value: object, tensor: Tensor, batch: set[Any], images: int) -> list[int]:
    """The example's lengths, with those that follow the batch for so many images."""
    sizes = list(tensor.shape)
    for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        if is_open(size) and batch & size.node.expr.free_symbols:
            length = size.node.expr.subs(dict.fromkeys(batch, images))
            sizes[axis] = int(length) if length.is_number else sizes[axis]
    return sizes


def _in_parts(example: Tensor, size: list[int], kinds: Sequence[_Kind], generator: torch.Generator) -> Tensor:
    """A tensor of `size` with a part of each kind along its longest axis, if that is of an image and has room."""
    tiled, own = _tiled(example, size), size[1:]
    if len(kinds) == 1 or not own or max(own) < 2 * len(kinds):
        return _values(example, tiled, kinds[0], generator)
    axis = 1 + own.index(max(own))
    parts = zip(tiled.tensor_split(len(kinds), axis), kinds, strict=True)
    return torch.cat([_values(example, part, kind, generator) for part, kind in parts], axis)


def _values(example: Tensor, tiled: Tensor, kind: _Kind, generator: torch.Generator) -> Tensor:
    """Numbers of a kind in place of `tiled`, a part of the example repeated."""
    size = tiled.shape
    if not example.numel() or example.is_complex():
        return tiled
    low, high = _levels(example)
    picture = example.dtype == torch.uint8 and example.dim() == 4
    mask = not picture and bool(((example == low) | (example == high)).all()) and bool(low != high)
    # floating-point numbers that could be a mask are drawn as one, and as any numbers
    if mask and (not example.is_floating_point() or kind.numbers == "own"):
        return _flipped(tiled, low, high, kind.flipped, generator)
    if not example.is_floating_point():
        rows = example.flatten(0, 1) if example.dim() == 3 else example[:0]
        if len(rows.unique(dim=0)) > 1:  # what belongs together, as the numbers of a box, keeps to its order
            return rows[torch.randint(len(rows), size[:-1], generator=generator)]
        least, most = (0, 255) if picture else (int(low), int(high))
        return torch.randint(least, most + 1, size, generator=generator).to(example.dtype)
    return _numbers(example, size, kind, generator).to(example.dtype)


def _levels(example: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value; 0 and 1 where there could be no others, or where a mask keeps all."""
    if example.dtype == torch.bool:
        return torch.tensor(False), torch.tensor(True)
    low, high = example.min(), example.max()
    return (torch.zeros_like(low) if bool(low == high) and bool(low > 0) else low), high


def _numbers(example: Tensor, size: Sequence[int], kind: _Kind, generator: torch.Generator) -> Tensor:
    finite = example[example.isfinite()].float()
    varied = finite.numel() > 1 and bool(finite.std() > 0)
    centre, spread = (finite.mean(), finite.std()) if varied else (torch.tensor(0.0), torch.tensor(1.0))
    normal = torch.randn(size, generator=generator)
    if kind.numbers == "sparse":
        return normal * (torch.rand(size, generator=generator) < 0.4) * spread / 3
    if kind.numbers == "one sign":
        return (centre.abs() + 2 * spread * normal.abs()) * math.copysign(1, centre)
    if not varied:
        return normal
    return finite.reshape(-1)[torch.randint(finite.numel(), size, generator=generator)]


def _flipped(mask: Tensor, low: Tensor, high: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """`mask` with that share of its elements at the other of its levels; the first of each row stays."""
    flipped = torch.rand(mask.shape, generator=generator) < share
    if mask.dim() and mask.shape[-1] > 1:
        flipped[..., 0] = False
    return torch.where(flipped, torch.where(mask == low, high, low), mask)


def _tiled(tensor: Tensor, size: list[int]) -> Tensor:
    """`tensor` repeated, and cut, to `size`."""
    repeats = [-(-length // had) for length, had in zip(size, tensor.shape, strict=True)]
    return tensor.repeat(repeats)[tuple(slice(length) for length in size)] if size else tensor.clone()
