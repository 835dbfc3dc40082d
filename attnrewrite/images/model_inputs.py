"""Data of a model that takes no pictures, or more than them: a tensor for each input, as it takes it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.errors import InputError, first_line
from attnrewrite.files import as_path
from attnrewrite.images.dataset import Images
from attnrewrite.images.npz import read_arrays
from attnrewrite.images.preprocessing import Preprocessing, Size


@dataclass(frozen=True)
class ModelInputs:
    """A tensor [N, ...] for each of the model's inputs, in their order."""

    values: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.values[0])

    @property
    def size(self) -> None:
        return None

    def __getitem__(self, indices: np.ndarray) -> "ModelInputs":
        places = torch.from_numpy(indices)
        return ModelInputs(tuple(tensor[places] for tensor in self.values))

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.values:
            digest.update(repr((tensor.shape, tensor.dtype)).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def check(self, preprocessing: Preprocessing | None, size: Size) -> None:
        """They were checked against the model's own inputs as they were loaded."""

    def decoded(self, preprocessing: Preprocessing | None, size: Size) -> "tuple[ModelInputs, np.ndarray]":
        return self, np.arange(len(self))

    def read(self, preprocessing: Preprocessing | None, size: Size) -> Tensor:
        """The first input alone: `values` are all of them."""
        return self.values[0]


def load_model_inputs(data: Any, example: Sequence[Tensor], names: Sequence[str]) -> Images:
    """The inputs of a model that takes `example`, called `names`.

    An `.npz` holds an array [N, ...] for each input, under its name, or without names in the model's order. An iterable
    gives tuples (or mappings by name) of tensors with a batch [b, ...], as the model takes them. One input may be a
    tensor [N, ...] by itself.

    Raises:
        InputError: one is missing, or of another shape or type than the model takes; the message names it.
    """
    told = f"the model takes {listed(names, example)}"
    if isinstance(data, str | Path):
        path = as_path(data)
        if path.suffix != ".npz" or not path.is_file():
            raise InputError(
                f"{told}, and {path} is no .npz with an array for each: "
                f"save them with numpy.savez(file, {_as_given(names)})"
            )
        arrays = _read(path, names)
    elif isinstance(data, Tensor | np.ndarray) and len(names) == 1:
        arrays = [torch.as_tensor(data).detach().cpu()]
    elif isinstance(data, Iterable) and not isinstance(data, Tensor | np.ndarray | Images):
        arrays = _joined(data, names)
    else:
        kind = "a set of pictures" if isinstance(data, Images) else f"one {type(data).__name__}"
        raise InputError(
            f"{told}, and what is given is {kind}: give an iterable of tuples, or an .npz with an array for each"
        )
    values = tuple(_taken(name, array, like) for name, array, like in zip(names, arrays, example, strict=True))
    counts = {name: len(tensor) for name, tensor in zip(names, values, strict=True)}
    if len(set(counts.values())) > 1 or not len(values[0]):
        found = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise InputError(f"there must be as many of every input, and there are {found}")
    return Images(ModelInputs(values))


def listed(names: Sequence[str], example: Sequence[Tensor]) -> str:
    """The inputs of a model that takes `example`, in words."""
    if len(names) == 1:
        return f"one input, {names[0]} {list(example[0].shape)}"
    return f"{len(names)} inputs ({', '.join(names)})"


def _read(path: Path, names: Sequence[str]) -> list[Tensor]:
    def choose(known: Sequence[str]) -> Sequence[str]:
        unnamed = [f"arr_{place}" for place in range(len(names))]
        wanted = unnamed if set(unnamed) <= set(known) else names
        missing = [name for name in wanted if name not in known]
        if missing:
            raise InputError(
                f"{path} has no array {missing[0]!r} (it has {', '.join(known) or 'none'}): the model's inputs are "
                f"{', '.join(names)}"
            )
        return wanted

    arrays = read_arrays(path, choose, _as_given(names))
    try:
        return [torch.from_numpy(array) for array in arrays.values()]
    except (TypeError, ValueError) as error:  # as for texts and dates, and another machine's order of bytes
        raise InputError(f"{path} could not be read: {first_line(error)}; save numbers") from error


def _as_given(names: Sequence[str]) -> str:
    """How numpy.savez is given an array for each of `names`."""
    return ", ".join(f"{name}=..." for name in names)


def _joined(data: Iterable[Any], names: Sequence[str]) -> list[Tensor]:
    parts: list[list[Tensor]] = []
    for item in data:
        if isinstance(item, Mapping):
            unknown = [name for name in names if name not in item]
            if unknown:
                raise InputError(f"an item of the data has no {unknown[0]!r}: the model takes {names}")
            item = [item[name] for name in names]
        given = list(item) if isinstance(item, tuple | list) else [item]
        if len(given) != len(names) or not all(isinstance(each, Tensor) and each.dim() for each in given):
            raise InputError(
                f"an item of the data is no tuple of {len(names)} tensors with a batch, for the model's "
                f"inputs {', '.join(names)}"
            )
        parts.append(given)
    if not parts:
        raise InputError("the data is empty")
    try:
        return [torch.cat(tensors).detach().cpu() for tensors in zip(*parts, strict=True)]
    except RuntimeError as error:
        raise InputError("the data gives tensors of several shapes: make them one") from error


def _taken(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` in the type of the model's input. Raises InputError where it is of another shape or kind."""
    if not like.dim():
        raise InputError(
            f"input {name} is one number for all images, and the data give each image its own: wrap the model in a "
            "module that holds the number"
        )
    if tensor.dim() != like.dim() or tensor.shape[1:] != like.shape[1:]:
        raise InputError(
            f"input {name} is {list(tensor.shape)} in the data, and the model takes "
            f"[N, {', '.join(map(str, like.shape[1:]))}]"
        )
    if tensor.is_floating_point() != like.is_floating_point():
        kinds = " and ".join(str(each.dtype).removeprefix("torch.") for each in (tensor, like))
        raise InputError(f"input {name} is of another kind in the data than the model takes: {kinds}")
    if tensor.is_floating_point() and bool(tensor.isnan().any()):  # minus infinity is what masks are made of
        raise InputError(f"input {name} holds NaN in the data: mend it, or leave those images out")
    return tensor.to(like.dtype)
