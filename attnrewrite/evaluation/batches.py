"""Several models over the same images, batch by batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnrewrite.errors import InputError, first_line
from attnrewrite.images.dataset import Images
from attnrewrite.images.pool import Pool
from attnrewrite.images.preprocessing import Preprocessing, Size, format_size
from attnrewrite.request import Progress


@dataclass(frozen=True)
class Batch:
    """What each model gives for the `inputs` of `size` images, by its name. The first `own` of them count, with their
    `labels` [own] where there are any; the others filled the batch up.
    """

    inputs: tuple[Tensor, ...]
    outputs: Mapping[str, Any]
    size: int
    own: int
    labels: Tensor | None


@torch.no_grad()
def batches(
    modules: Mapping[str, Callable[..., Any]],
    images: Images,
    preprocessing: Preprocessing | None,
    *,
    input_size: Size | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Batch]:
    """Run `modules` (in evaluation mode) over all images.

    Image files are read at `input_size`; arrays and tensors have their own size and need none. Every pass is of exactly
    `batch_size` images (None: 128, or all where there are fewer), the last one filled up, so that a model with a fixed
    batch size can be evaluated with that one.

    Raises:
        InputError: the images do not fit, or a model does not take them.
    """
    input_size = input_size or images.x.size
    if input_size is None:
        raise InputError("image files are read at the model's input size: give --input-size, such as 3x224x224")
    images.check(preprocessing, input_size)
    images = images.whole(preprocessing, input_size)
    pool = Pool(images, preprocessing, input_size, batch_size or min(128, len(images)), filled=True)
    for index, (start, stop) in enumerate(pool.bounds):
        inputs = pool.batch(index)
        outputs = {name: _output(name, module, inputs) for name, module in modules.items()}
        labels = None if images.y is None else torch.from_numpy(images.y[start:stop])
        yield Batch(inputs, outputs, pool.batch_size, stop - start, labels)
        if progress is not None:
            progress("evaluate", stop, len(images))


def _output(name: str, module: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    try:
        return module(*inputs)
    except Exception as error:  # a model refuses an input in its own words
        raise InputError(
            f"{name} does not take a batch of {len(inputs[0])} images of {format_size(inputs[0].shape[1:])} "
            f"({first_line(error)}): give the batch that it takes (--batch-size), or other images"
        ) from error
