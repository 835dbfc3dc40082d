"""What a loaded model takes: its inputs by name, and images, or a tensor for each input, read as them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError, first_line
from attnrewrite.frontends.batches import runnable
from attnrewrite.frontends.sources import Source
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.images.model_inputs import ModelInputs, load_model_inputs
from attnrewrite.images.preprocessing import Size
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.in_batches import with_images


def input_names(source: Source) -> tuple[str, ...]:
    """What the model calls its inputs, as many as its example has; those of `*given` are given_0 and so on, as
    torch.export numbers them.
    """
    model = source.model
    if model is None or isinstance(model, GraphModule):
        graph = runnable(source)
        assert isinstance(graph, GraphModule)
        return tuple(str(node.target) for node in graph.graph.nodes if node.op == "placeholder")
    found: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        left = len(source.example_inputs) - len(found)
        many = parameter.kind is parameter.VAR_POSITIONAL
        found += [f"{name}_{place}" for place in range(left)] if many else [name]
    return tuple(found[: len(source.example_inputs)])


def takes_pictures(source: Source) -> bool:
    """Whether a batch of pictures is all that the model takes."""
    return [example.dim() for example in source.example_inputs] == [4]


def image_size_of(source: Source) -> Size:
    """(channels, height, width) of a model of pictures; of one that takes something else, nothing reads it."""
    return source.input_size if takes_pictures(source) else (0, 0, 0)


def load_data(source: Source, data: Any, skip_bad: bool = False) -> Images:
    """`data` as what the model takes: pictures, as `load_images` takes them, or a tensor for each of its inputs.

    Raises:
        InputError: they cannot be read, or do not fit the model.
    """
    if takes_pictures(source):
        images = load_images(data, skip_bad)
    elif isinstance(data, Images) and isinstance(data.x, ModelInputs):
        images = data
    else:
        images = load_model_inputs(data, source.example_inputs, input_names(source))
        assert isinstance(images.x, ModelInputs)
        require_taken(source, images.x.values)
    images.check(source.preprocessing, image_size_of(source))
    return images


@torch.no_grad()
def require_taken(source: Source, values: Sequence[Tensor]) -> None:
    """Raise InputError where the model does not take the items of `values` [N, ...] that hold the least and the largest
    whole numbers: a table has so many rows.
    """
    whole = [t.reshape(len(t), -1) for t in values if not t.is_floating_point() and t.dtype != torch.bool]
    places = {int(place) for t in whole for place in (t.amin(1).argmin(), t.amax(1).argmax())}
    for place in sorted(places):
        item = with_images(tuple(t[place : place + 1] for t in values), len(source.example_inputs[0]))
        try:
            with without_torch_logs():
                runnable(source)(*item)
        except Exception as error:  # a model refuses an input in its own words
            raise InputError(f"{source.name} does not take item {place} of the data ({first_line(error)})") from error
