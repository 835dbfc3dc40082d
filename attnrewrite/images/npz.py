"""An .npz file of images and labels: what its headers say is looked at before any of it is read."""

import math
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnrewrite.errors import InputError
from attnrewrite.files import check_file
from attnrewrite.resources import physical_memory


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The arrays `x` and, where there is one, `y`.

    Raises:
        InputError: as `read_arrays` does, or the file has no `x`.
    """

    def choose(names: Sequence[str]) -> Sequence[str]:
        if "x" not in names:
            raise InputError(f"{path} has no array 'x' (it has {', '.join(names) or 'none'}): save the images as x=")
        return [name for name in ("x", "y") if name in names]

    content = read_arrays(path, choose, "x=..., y=...")
    return content["x"], content.get("y")


def read_arrays(path: Path, choose: Callable[[Sequence[str]], Sequence[str]], example: str) -> dict[str, np.ndarray]:
    """Those of the file's arrays that `choose` says of all their names; `example` is how numpy.savez would be given
    them.

    Raises:
        InputError: the file is damaged, holds anything but numbers, or more than memory does, or `choose` raises it.
    """
    check_file(path, ".npz")
    try:
        with zipfile.ZipFile(path) as archive:
            heads = {name.removesuffix(".npy"): _head(archive, name) for name in archive.namelist()}
        wanted = choose(list(heads))
        _require_held(path, [heads[name] for name in wanted])
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in wanted}
    except InputError:
        raise
    except Exception as error:  # zip, deflate and numpy, which parses a head as Python, raise many kinds
        reason = "it holds pickled objects" if "pickle" in str(error).lower() else "it is truncated or not an .npz"
        raise InputError(f"{path} could not be read: {reason}; save it with numpy.savez(file, {example})") from error


@dataclass(frozen=True)
class _Head:
    """What an array says of itself."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _head(archive: zipfile.ZipFile, name: str) -> _Head:
    """Raises ValueError where it is no array of numbers."""
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("pickled objects")
    return _Head(shape, dtype)


def _require_held(path: Path, heads: Iterable[_Head]) -> None:
    """Raise InputError for arrays that memory does not hold."""
    wanted, memory = sum(head.nbytes for head in heads), physical_memory()
    if memory is not None and wanted > memory:
        sizes = f"{wanted / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f} GiB of memory"
        raise InputError(f"{path} holds {sizes}: give fewer images, or a folder of them, which is read in parts")
