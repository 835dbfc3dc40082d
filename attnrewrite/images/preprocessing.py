"""How a picture becomes a model's input, and how sizes and channel values are written."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from attnrewrite.errors import InputError

Size = tuple[int, int, int]  # channels, height, width
LARGEST_INPUT = 1 << 28  # numbers in one image, a gigabyte of float32: no attention takes more


@dataclass(frozen=True)
class Preprocessing:
    """(x / 255 - mean) / std per channel (a single number serves every channel), for x in 0..255.

    Pictures of another size are resized, keeping their shape, until the model's input is `crop` of them on the side
    that fits, and cropped at the centre: timm's evaluation transform. `interpolation` is a name of
    PIL.Image.Resampling, in lower case.
    A model of `channels_last` takes [B, H, W, C]; one of a whole-number `dtype` takes the pixels themselves.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    interpolation: str = "bicubic"
    channels_last: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] in 0..255, any type -> [B, C, H, W] (or [B, H, W, C]) of `dtype`."""
        taken = self._normalise(pixels) if self.dtype.is_floating_point else pixels.to(self.dtype)
        return taken.permute(0, 2, 3, 1) if self.channels_last else taken

    def _normalise(self, pixels: Tensor) -> Tensor:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, pixels.shape[1]):
                raise InputError(
                    f"--{name} has {len(values)} numbers and the images {pixels.shape[1]} channels: "
                    "give one number, or one for each channel"
                )
        mean = torch.tensor(self.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.std).view(1, -1, 1, 1)
        return (pixels.float() / 255 - mean) / std


def as_taken(known: Preprocessing | None, example: Tensor) -> Preprocessing | None:
    """`known` for a model that takes inputs like `example`; whole numbers are pixels, and need no mean."""
    if not example.is_floating_point():
        known = replace(known or Preprocessing((0.0,), (1.0,)), dtype=example.dtype)
    return None if known is None else replace(known, channels_last=is_channels_last(example.shape))


_CHANNELS = (1, 3, 4)


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether the shape of a batch of images reads as [B, H, W, C] alone."""
    return len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def image_size(shape: Sequence[int]) -> Size:
    """(channels, height, width) of a batch of images, [B, C, H, W] or [B, H, W, C].

    Raises:
        InputError: the shape is of something else.
    """
    if len(shape) != 4:
        raise InputError(f"an input of {list(shape)} is no batch of images [B, C, H, W]: the model takes no images")
    return parse_size((shape[3], shape[1], shape[2]) if is_channels_last(shape) else shape[1:])


def override(known: Preprocessing | None, mean: object, std: object) -> Preprocessing | None:
    """`known` with `mean` and `std` as the user gives them (None: not given); None when there is neither."""
    if mean is None and std is None:
        return known
    if known is None and (mean is None or std is None):
        given, absent = ("std", "mean") if mean is None else ("mean", "std")
        raise InputError(
            f"--{given} without --{absent}: the model has no configuration to take the other from, give both"
        )
    known = known or Preprocessing((0.0,), (1.0,))
    return replace(
        known,
        mean=known.mean if mean is None else channel_values("mean", mean),
        std=known.std if std is None else channel_values("std", std),
    )


def channel_values(name: str, value: object) -> tuple[float, ...]:
    """'0.5,0.5,0.5', a number or a sequence of numbers -> a tuple of finite floats; a std is above zero."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else (value,)
    try:
        values = tuple(float(part) for part in parts)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(
            f"--{name} {value!r} is not a number or numbers divided by commas, such as 0.5,0.5,0.5"
        ) from None
    if not values or not all(math.isfinite(number) for number in values):
        raise InputError(f"--{name} {value!r} must hold finite numbers")
    if name == "std" and min(values) <= 0:
        raise InputError(f"--std {value!r} divides the images: every number must be above zero")
    return values


def parse_size(size: str | Sequence[int]) -> Size:
    """'3x224x224', '224' (three channels, square) or (3, 224, 224) -> (channels, height, width)."""
    if isinstance(size, str):
        parts = re.split("[x×,]", size)
        numbers = [int(part) for part in parts] if all(re.fullmatch("[0-9]{1,9}", part) for part in parts) else []
    else:
        given = size if isinstance(size, Sequence) else (size,)
        numbers = [int(part) for part in given if isinstance(part, Integral) and not isinstance(part, bool)]
        numbers = numbers if len(numbers) == len(given) else []
    if len(numbers) == 1:
        numbers = [3, numbers[0], numbers[0]]
    if len(numbers) != 3 or min(numbers) < 1:
        raise InputError(f"input size {size!r} is not CHANNELSxHEIGHTxWIDTH, such as 3x224x224")
    if math.prod(numbers) > LARGEST_INPUT:
        raise InputError(f"input size {size!r} is of more than {LARGEST_INPUT:,} numbers: give a smaller one")
    return numbers[0], numbers[1], numbers[2]


def way_to_fit(given: Size, taken: Size) -> str:
    """What to do with an array of images that are `given` to a model that takes others."""
    height, width, channels = given[1], given[2], given[0]
    if (height, width, channels) == taken:
        return "its channels come first: save x as [N, H, W, C], as x.transpose(0, 2, 3, 1) is"
    if given[1:] == taken[1:]:
        return f"save them with {taken[0]} channels, or give a folder of images, which are converted"
    return "resize them, or give a folder of images, which are resized"


def format_size(size: Sequence[int]) -> str:
    """(3, 224, 224) -> '3x224x224'."""
    return "x".join(map(str, size))
