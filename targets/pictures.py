"""A model as a function of a picture's bytes: its preprocessing in front of it, in numbers that float16 holds."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.images.preprocessing import Preprocessing, image_size
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import HALVES, exact, reference, specialise

COLORS = {1: "GRAYSCALE", 3: "RGB"}  # by channels
WIDEST = torch.int32  # of the whole numbers that compilers take


class OfPictures(nn.Module):
    """`module`, which takes inputs like `example`, on pictures: numbers in 0..255, [1, C, H, W].

    (x / 255 - mean) / std is computed as (x - c + r) / (255 std), with c the whole number nearest to 255 mean and r
    what is left: float16 holds x - c exactly, where x / 255 has lost digits before the mean is taken away.
    """

    centre: Tensor
    rest: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, preprocessing: Preprocessing, example: Tensor) -> None:
        super().__init__()
        self.training, self.module = False, module  # an exported program's module has no eval()
        self.channels_last = preprocessing.channels_last
        self.dtype = example.dtype if example.is_floating_point() else WIDEST
        mean = torch.tensor(preprocessing.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(preprocessing.std, dtype=torch.float64).view(1, -1, 1, 1)
        self.register_buffer("centre", (255 * mean).round().float())
        self.register_buffer("rest", ((255 * mean).round() - 255 * mean).float())
        self.register_buffer("scale", (1 / (255 * std)).float())

    def forward(self, image: Tensor) -> object:
        """The module's outputs for one picture."""
        taken = (image - self.centre + self.rest) * self.scale if self.dtype.is_floating_point else image
        taken = taken if taken.dtype == self.dtype else taken.to(self.dtype)
        return self.module(taken.permute(0, 2, 3, 1) if self.channels_last else taken)


def of_pictures(
    name: str, module: nn.Module, inputs: tuple[Tensor, ...], known: Preprocessing | None
) -> tuple[OfPictures, tuple[Tensor, ...], Preprocessing]:
    """`module` on pictures, a picture of random bytes, and what is left to do to pictures: size and crop alone.

    Raises:
        InputError: as `require_picture` does.
        CheckFailedError: the module gives something else where the preprocessing was done before.
    """
    known = require_picture(name, inputs, known)
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (1, *image_size(inputs[0].shape)), generator=generator).float()
    before = (known(picture).to(inputs[0].dtype),)
    wrapped = OfPictures(module, known, inputs[0])
    relative = HALVES.get(inputs[0].dtype, check.FLOAT32)
    found, expected = reference(wrapped, (picture,)), reference(module, before)
    check.agree(f"{name} on pictures", found, expected, relative, lambda: exact(specialise(module, before), before))
    return wrapped, (picture,), replace(known, mean=(0.0,), std=(1.0,), dtype=torch.uint8, channels_last=False)


def require_picture(name: str, inputs: tuple[Tensor, ...], known: Preprocessing | None) -> Preprocessing:
    """What a model of `inputs` does to a picture: `known`.

    Raises:
        InputError: it takes no picture of one or three channels, or more than one, or its preprocessing is not known.
    """
    if len(inputs) != 1:
        raise InputError(f"--image-input: {name} takes {len(inputs)} inputs, and a picture would be one: leave it out")
    channels, _, _ = image_size(inputs[0].shape)
    if channels not in COLORS:
        raise InputError(
            f"--image-input: {name} takes {channels} channels, pictures have 3 (RGB) or 1 (gray): leave it out"
        )
    if len(inputs[0]) != 1:
        raise InputError(
            f"--image-input: {name} takes {len(inputs[0])} pictures at a time, an image input is one: "
            "export the model for one"
        )
    if known is None:
        raise InputError(f"--image-input: how {name} takes pictures is not known: give --mean and --std")
    known(torch.zeros(1, channels, 1, 1))  # which refuses a mean or std for other channels
    return known
