"""Picture files as arrays of a model's input size, the way timm reads them for evaluation."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from attnrewrite.errors import InputError
from attnrewrite.images.preprocessing import Preprocessing, Size

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_NAMED = 5
logging.getLogger("PIL").addHandler(logging.NullHandler())  # what is wrong with a picture is said here, and once


class DamagedError(InputError):
    """A file that begins as a picture and cannot be read to its end."""


def check_picture(path: Path) -> None:
    """Raise InputError unless the file begins as a picture of 8 bits a channel does."""
    try:
        _opened(path).close()
    except InputError:
        raise
    except Exception as error:  # Pillow raises many kinds for what is damaged
        raise InputError(f"{path} is not an image that can be read: mend it, remove it, or --skip-bad") from error


def named(paths: Sequence[Path]) -> str:
    """The first few files' names, and how many more there are."""
    more = len(paths) - _NAMED
    return ", ".join(path.name for path in paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def is_whole(path: Path) -> bool:
    """Whether the file is a picture that can be read to its end. Raises InputError where its pixels are no bytes."""
    try:
        with _opened(path) as picture:
            picture.load()
    except InputError:
        raise
    except Exception:  # Pillow raises many kinds for what is damaged
        return False
    return True


def _opened(path: Path) -> Image.Image:
    """The picture, before its pixels are read. Raises InputError where they are no bytes: Pillow would clip them."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is a pipe or a device")
    picture = Image.open(path)
    if picture.mode.startswith(("I", "F")):
        picture.close()
        raise InputError(f"{path} has pixels of 16 or 32 bits (mode {picture.mode}): save it with 8 bits a channel")
    return picture


def read_picture(path: Path, transform: Preprocessing, size: Size) -> np.ndarray:
    """The picture as uint8 [H, W, C] for `size` (C, H, W): resized, keeping its shape, and cropped at the centre.

    Raises DamagedError where the file ends too early or holds something else, InputError where its pixels are no bytes.
    """
    channels, height, width = size
    try:
        with _opened(path) as opened:
            picture = opened.convert("L" if channels == 1 else "RGB")
    except InputError:
        raise
    except Exception as error:  # Pillow raises many kinds for what is damaged
        raise DamagedError(f"{path} is damaged ({error}): mend it, remove it, or --skip-bad") from error
    least_width, least_height = (max(1, math.floor(side / transform.crop)) for side in (width, height))
    scaled = _cover(picture.size, (least_width, least_height))
    if scaled != picture.size:
        picture = picture.resize(scaled, Image.Resampling[transform.interpolation.upper()])
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    cropped = picture.crop((left, top, left + width, top + height))
    return np.asarray(cropped).reshape(height, width, channels)


def _cover(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """`size` scaled, keeping its shape, to the least that covers `target` (both width, height)."""
    (width, height), (least_width, least_height) = size, target
    if least_width * height > least_height * width:
        return least_width, max(least_height, least_width * height // width)
    return max(least_width, least_height * width // height), least_height
