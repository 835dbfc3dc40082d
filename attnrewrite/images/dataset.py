"""Images in: a folder, an .npz or an iterable of tensors, given out as the model's inputs, batch by batch."""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attnrewrite.errors import InputError, short
from attnrewrite.files import as_path
from attnrewrite.images.decode import PICTURES, DamagedError, check_picture, named, read_picture
from attnrewrite.images.npz import read_npz
from attnrewrite.images.preprocessing import Preprocessing, Size, format_size, image_size, way_to_fit

DECODED_BYTES = 512 << 20  # the most that pictures kept decoded may take: 3,566 of 3x224x224


class Pixels(Protocol):
    """A sequence of images, in whatever form they are kept."""

    def __len__(self) -> int: ...

    @property
    def size(self) -> Size | None:
        """(channels, height, width) of every image, or None where they are resized as they are read."""

    def __getitem__(self, indices: np.ndarray) -> "Pixels":
        """The images at `indices`, in that order."""

    def digest(self) -> str:
        """A hash of every image's own bytes, in their order."""

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        """Raise InputError where these images cannot be read as inputs of `size`."""

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Pixels, np.ndarray]":
        """The images that are whole, in memory where `Images.decoded` says so, and their numbers among these."""

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        """All of them as the model takes them: float32 [N, *size], unless `preprocessing` says otherwise."""


@dataclass(frozen=True)
class Images:
    """Images and, where known, their labels [N]. `classes` are the names of the labels, if the data names them;
    `skipped` the files that were left out as damaged, which are known when the pictures are decoded.
    """

    x: Pixels
    y: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    skipped: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def class_count(self) -> int | None:
        """How many classes the labels name, or reach to; None where there are no labels."""
        return None if self.y is None else len(self.classes) or int(self.y.max()) + 1

    def sample(self, n: int, seed: int) -> "Images":
        """`n` images drawn without repetition (all of them, shuffled, where there are fewer); the same for a seed."""
        if n < 1:
            raise InputError(f"{n} samples: at least one image is needed")
        return self.take(np.random.default_rng(seed).permutation(len(self))[:n])

    def take(self, indices: np.ndarray) -> "Images":
        """The images at `indices` [n], in that order, with their labels. Pixels in memory are shared, not copied."""
        return replace(self, x=self.x[indices], y=None if self.y is None else self.y[indices])

    def digest(self) -> str:
        """A hash of the images and labels themselves, in their order."""
        labels = b"" if self.y is None else self.y.tobytes()
        return _hash((self.x.digest().encode(), labels))

    def decoded(self, preprocessing: Preprocessing | None, input_size: Size) -> "Images":
        """The same images, each picture file read to its end, once; without the damaged ones, where `load_images` was
        told to leave those out, which is logged.

        Where all of them take at most DECODED_BYTES as uint8 [N, H, W, C] at `input_size`, that is what is kept, and no
        file is opened again; where they take more, files stay files, which are decoded again when they are read.

        Raises:
            InputError: `check` raises it, or files are damaged: the message names the first of them.
        """
        self.check(preprocessing, input_size)
        pixels, whole = self.x.decoded(preprocessing, input_size)
        if not isinstance(self.x, Files) or len(whole) == len(self):
            return replace(self, x=pixels)
        skipped = tuple(np.delete(np.array(self.x.paths, object), whole))
        told = f"{len(skipped)} of {len(self)} images are damaged and left out: {named(skipped)}"
        logging.getLogger("attnrewrite").warning("%s: %s", self.x.name, told)
        return replace(self, x=pixels, y=None if self.y is None else self.y[whole], skipped=skipped)

    def whole(self, preprocessing: Preprocessing | None, input_size: Size) -> "Images":
        """The images without the damaged ones, where those are to be left out; `decoded` finds which they are."""
        return self.decoded(preprocessing, input_size) if isinstance(self.x, Files) and self.x.skip_bad else self

    def check(self, preprocessing: Preprocessing | None, input_size: Size) -> None:
        """Raise InputError where the images do not fit `input_size` (C, H, W), or `preprocessing` is missing."""
        self.x.check(preprocessing, input_size)


@dataclass(frozen=True)
class Array:
    """uint8 [N, H, W] or [N, H, W, C] in memory; `chosen` are the numbers of those that count, all where it is None."""

    values: np.ndarray
    name: str
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values if self.chosen is None else self.chosen)

    @property
    def size(self) -> Size:
        height, width, channels = (*self.values.shape[1:], 1)[:3]
        return channels, height, width

    def __getitem__(self, indices: np.ndarray) -> "Array":
        return replace(self, chosen=indices if self.chosen is None else self.chosen[indices])

    def digest(self) -> str:
        values = self.values if self.chosen is None else self.values[self.chosen]
        return _hash((repr(values.shape).encode(), np.ascontiguousarray(values).data))

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        if self.size != size:
            raise InputError(
                f"{self.name} holds images of {format_size(self.size)} and the model takes "
                f"{format_size(size)}: {way_to_fit(self.size, size)}"
            )
        _need(preprocessing, self.name)

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Array, np.ndarray]":
        return self, np.arange(len(self))

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        values = self.values if self.chosen is None else self.values[self.chosen]
        pixels = torch.from_numpy(values if values.ndim == 4 else values[..., None])
        return _need(preprocessing, self.name)(pixels.permute(0, 3, 1, 2))


@dataclass(frozen=True)
class Files:
    """Image files, read when they are asked for. `skip_bad`: those that turn out to be damaged are to be left out."""

    paths: tuple[Path, ...]
    name: str
    skip_bad: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def size(self) -> None:
        return None

    def __getitem__(self, indices: np.ndarray) -> "Files":
        return replace(self, paths=tuple(self.paths[i] for i in indices))

    def digest(self) -> str:
        return _hash(path.read_bytes() for path in self.paths)

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        if size[0] not in (1, 3):
            raise InputError(
                f"{self.name}: image files have 1 or 3 channels and the model takes {size[0]}: give an .npz"
            )
        _need(preprocessing, self.name)

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Files | Array, np.ndarray]":
        transform = _need(preprocessing, self.name)
        channels, height, width = size
        keeps = len(self) * math.prod(size) <= DECODED_BYTES
        kept = np.empty((len(self) if keeps else 0, height, width, channels), np.uint8)
        whole: list[int] = []
        damaged = []
        for index, path in enumerate(self.paths):
            try:
                pixels = read_picture(path, transform, size)
            except DamagedError:
                damaged.append(path)
                continue
            if keeps:
                kept[len(whole)] = pixels
            whole.append(index)
        if not whole:
            raise InputError(f"{self.name}: all {len(self)} images are damaged")
        if damaged and not self.skip_bad:
            raise InputError(
                f"{self.name}: {len(damaged)} of {len(self)} images are damaged ({named(damaged)}): "
                "mend them, remove them, or leave them out with --skip-bad"
            )
        indices = np.array(whole)
        return Array(kept[: len(whole)], self.name) if keeps else replace(self[indices], skip_bad=False), indices

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        transform = _need(preprocessing, self.name)
        pixels = np.stack([read_picture(path, transform, size) for path in self.paths])
        return transform(torch.from_numpy(pixels).permute(0, 3, 1, 2))


@dataclass(frozen=True)
class Inputs:
    """Float [N, C, H, W] or [N, H, W, C], already what the model takes."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size(self) -> Size:
        return image_size(self.values.shape)

    def __getitem__(self, indices: np.ndarray) -> "Inputs":
        return Inputs(self.values[torch.from_numpy(indices)])

    def digest(self) -> str:
        values = self.values.float().contiguous().numpy()
        return _hash((repr(values.shape).encode(), values.data))

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        if self.size != size:
            raise InputError(f"the tensors are of {format_size(self.size)} and the model takes {format_size(size)}")

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[Inputs, np.ndarray]":
        return self, np.arange(len(self))

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        return self.values.float()


def _hash(parts: Iterable[bytes | memoryview]) -> str:
    """A hash of the parts, each at its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()


def load_images(data: "str | Path | Images | Iterable | Dataset[Any]", skip_bad: bool = False) -> Images:
    """Images from a folder (flat, or one subfolder per class in order of name), an .npz, or an iterable.

    An `.npz` holds `x` uint8 [N, H, W] or [N, H, W, C] and optionally integer labels `y` [N]. An iterable (a list, a
    tensor, a DataLoader) or a torch Dataset gives tensors, (tensor, label) pairs, or mappings that hold one such tensor
    and maybe a "label" or "labels": float ones [C, H, W] or [B, C, H, W] are the model's inputs as they stand, uint8
    ones are pictures to be normalised. Raises InputError for what cannot be read; with `skip_bad`, damaged files of a
    folder are left out instead, when they are decoded.
    """
    if isinstance(data, Images):
        return data
    if isinstance(data, str | Path):
        path = as_path(data)
        if path.is_dir():
            return _from_folder(path, skip_bad)
        if path.suffix == ".npz":
            return _from_npz(path)
        problem = "is neither" if path.exists() else "does not exist"
        raise InputError(f"{path} {problem}: images are a folder of them, or an .npz with x (uint8) and optionally y")
    if isinstance(data, np.ndarray):
        return Images(_array(data, "the array"))
    if isinstance(data, Iterable):
        return _from_iterable(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _from_iterable(data[place] for place in range(len(data)))
    raise InputError(f"a {type(data).__name__} is no images: give a folder, an .npz or an iterable of tensors")


def _from_folder(folder: Path, skip_bad: bool) -> Images:
    try:
        below = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        flat = [path for path in below if path.suffix.lower() in PICTURES]
        classes = [path for path in below if path.is_dir()]
        found = [_pictures_below(each) for each in classes]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from error
    paths = [path for each in found for path in each]
    if flat and paths:
        raise InputError(
            f"{folder} holds both images and folders of images: move the images into one of "
            "these, or out of the folder, so that it is clear which labels are meant"
        )
    if not flat and not paths:
        raise InputError(
            f"{folder} holds no images ({', '.join(PICTURES)}), in it or one folder below: give one that does"
        )
    for path in () if skip_bad else flat or paths:
        check_picture(path)
    if flat:
        return Images(Files(tuple(flat), str(folder), skip_bad))
    labels = np.repeat(np.arange(len(classes)), [len(each) for each in found])
    return Images(Files(tuple(paths), str(folder), skip_bad), labels, tuple(path.name for path in classes))


def _pictures_below(folder: Path) -> list[Path]:
    """Those that are hidden, or in a hidden folder, are not meant: macOS writes ._a.png beside a.png."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in PICTURES and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _from_npz(path: Path) -> Images:
    x, y = read_npz(path)
    return Images(_array(x, str(path)), _labels(y, len(x), str(path)))


def _array(values: np.ndarray, name: str) -> Array:
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        raise InputError(
            f"{name}: x is {values.dtype} {list(values.shape)} and must be uint8 (0..255) [N, H, W] or [N, H, W, C]"
        )
    if not values.size:
        raise InputError(f"{name} holds no images: x is {list(values.shape)}")
    return Array(values, name)


def _labels(y: np.ndarray | None, count: int, name: str) -> np.ndarray | None:
    if y is None:
        return None
    if y.shape != (count,) or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"{name}: y is {y.dtype} {list(y.shape)} and must be {count} integers, one for each image")
    if y.min() < 0:
        raise InputError(f"{name}: y holds {y.min()}, and classes are numbered from 0")
    if y.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: y holds {y.max()}, which is no number of a class")
    return y.astype(np.int64)


def _from_iterable(data: Iterable) -> Images:
    images, labels = [], []
    for item in data:
        image, label = _labelled(item)
        if not isinstance(image, Tensor) or image.dim() not in (3, 4) or image.is_meta or image.layout != torch.strided:
            raise InputError(f"an iterable of images gives tensors [C, H, W] or [B, C, H, W], not {_kind(image)}")
        images.append(image if image.dim() == 4 else image[None])
        labels += [] if label is None else _numbers(label)
    if not images:
        raise InputError("the iterable of images is empty")
    if len({(image.shape[1:], image.dtype) for image in images}) > 1:
        raise InputError("the iterable gives tensors of several shapes or types: make them one")
    values = torch.cat(images).detach().cpu()
    y = _labels(np.array(labels), len(values), "the iterable") if labels else None
    if values.dtype == torch.uint8:
        return Images(_array(values.permute(0, 2, 3, 1).numpy(), "the iterable"), y)
    if not values.is_floating_point():
        raise InputError(f"an iterable of images gives uint8 or float tensors, not {values.dtype}")
    if not bool(values.isfinite().all()):
        where = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise InputError(f"image {where} of the iterable holds NaN or infinity: leave it out")
    return Images(Inputs(values), y)


def _numbers(label: object) -> list[Any]:
    """The label of an image, or those of a batch."""
    try:
        return torch.as_tensor(label).reshape(-1).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a label of the iterable is {short(label)}: labels are numbers of classes") from error


def _labelled(item: object) -> tuple[object, object]:
    """An image, or a batch of them, and its labels, if any, as loaders give them."""
    if isinstance(item, Mapping):
        pictures = [each for each in item.values() if isinstance(each, Tensor) and each.dim() in (3, 4)]
        labels = (item[name] for name in ("label", "labels") if name in item)
        return (pictures[0] if len(pictures) == 1 else item), next(labels, None)
    if isinstance(item, tuple | list) and len(item) in (1, 2):
        return item[0], item[1] if len(item) == 2 else None
    return item, None


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and value.dim() in (3, 4):
        return "one that is sparse, or on the meta device"
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _need(preprocessing: Preprocessing | None, name: str) -> Preprocessing:
    if preprocessing is None:
        raise InputError(
            f"how the model wants the images of {name} normalised is not known: give --mean and --std "
            "(--mean 0 --std 1 for x/255)"
        )
    return preprocessing
