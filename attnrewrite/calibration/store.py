"""Where the activations of many images wait between the pieces of a network: in memory, or in temporary files."""

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.resources import format_bytes, free_disk

log = logging.getLogger("attnrewrite")

PREFIX = "attnrewrite-"  # of a temporary folder's name
IN_USE = "in-use"  # the file in it that its process has locked

_spilled: ContextVar["Spilled | None"] = ContextVar("spilled", default=None)


class Spilled:
    """The bytes that were written to temporary files."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def counted() -> Iterator[Spilled]:
    """Counts what is written to temporary files while the block runs."""
    token = _spilled.set(Spilled())
    try:
        found = _spilled.get()
        assert found is not None
        yield found
    finally:
        _spilled.reset(token)


class Store(Protocol):
    """Tensors by name for each batch; what a batch had is gone once it is given others."""

    def put(self, index: int, tensors: Mapping[str, Tensor]) -> None: ...

    def get(self, index: int, device: str) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


class InMemory:
    """Each tensor in pages of its own, which go back to the system with it; on a GPU as its allocator has it.

    The C library's heap keeps nothing of it, not even a tensor without its elements: between small things that stay,
    what a network computes for batch after batch would lie in ever new places.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[str, Pages | Tensor]] = {}

    def put(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        self._held[index] = {
            name: Pages.of(tensor) if tensor.device.type == "cpu" else _own(tensor) for name, tensor in tensors.items()
        }

    def get(self, index: int, device: str) -> dict[str, Tensor]:
        held = self._held[index].items()
        return {name: (own if isinstance(own, Tensor) else own.tensor()).to(device) for name, own in held}

    def close(self) -> None:
        self._held.clear()


@dataclass(frozen=True)
class Pages:
    """A copy of a tensor's elements, in pages of the system's."""

    memory: mmap
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Pages":
        pages = cls(mmap(-1, max(1, tensor.nbytes), MAP_PRIVATE | MAP_ANONYMOUS), tuple(tensor.shape), tensor.dtype)
        pages.tensor().copy_(tensor.detach())
        return pages

    def tensor(self) -> Tensor:
        """The elements themselves, as long as the tensor is used."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.memory, dtype=self.dtype, count=prod(self.shape)).reshape(self.shape)


class OnDisk:
    """A temporary folder, a file for each batch; locked, so that what a process left that was killed is known."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        unlocked = Path(self._folder.name) / "unlocked"
        self._in_use = unlocked.open("w")
        with suppress(OSError):  # some file systems have no locks: what is left there is nobody's to remove
            fcntl.flock(self._in_use, fcntl.LOCK_EX)
        unlocked.rename(unlocked.with_name(IN_USE))  # locked before others know it

    def put(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        held: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = _own(tensor)
            shared = any(own.data_ptr() == other.data_ptr() for other in held.values())
            held[name] = own.clone() if shared else own  # safetensors takes no tensor twice
        save_file(held, self._file(index))
        if (spilled := _spilled.get()) is not None:
            spilled.bytes += sum(tensor.nbytes for tensor in held.values())

    def get(self, index: int, device: str) -> dict[str, Tensor]:
        return load_file(self._file(index), device=device)

    def close(self) -> None:
        self._folder.cleanup()
        self._in_use.close()

    def _file(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.safetensors"


def require_disk(what: str, needed: int) -> None:
    """Say that `needed` bytes go to temporary files, of which those are removed that killed processes left. Raises
    InputError where there is no room for them.
    """
    folder = Path(tempfile.gettempdir())
    for left in folder.glob(f"{PREFIX}*"):
        _remove_unused(left)
    free = free_disk(folder)
    if needed > free:
        raise InputError(
            f"{what}: the images' activations take {format_bytes(needed)} in temporary files, and {folder} has "
            f"{format_bytes(free)} left: give fewer images (--samples), more --memory, or set TMPDIR to another disk"
        )
    log.warning(
        "%s: the images' activations are kept in temporary files, up to %s in %s", what, format_bytes(needed), folder
    )


def _remove_unused(folder: Path) -> None:
    """Remove a folder whose process has died. One in use, of another user or of another kind is left alone."""
    try:
        with (folder / IN_USE).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:
        return
    log.warning("%s, which a run that was killed had left, is removed", folder)


def _own(tensor: Tensor) -> Tensor:
    """A tensor that holds its own elements and no others, in order."""
    tensor = tensor.detach()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
