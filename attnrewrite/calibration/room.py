"""How many images go through a network at once: as many as memory has room for, measured on the first of them."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError
from attnrewrite.images.pool import Pool
from attnrewrite.request import Execution
from attnrewrite.resources import format_bytes, free_memory, give_back, held_memory

SPARE = 1.3  # what is taken beside the tensors that torch tells of: workspaces, and what allocators keep


def room(execution: Execution, device: str = "cpu") -> int:
    """The bytes that a stage may still take on `device`: what the budget leaves of it, or half of what is free."""
    if device != "cpu":
        there = torch.get_device_module(device)
        held = there.memory_allocated()
        free = there.mem_get_info()[0] + there.memory_reserved() - held  # torch keeps what it has let go
    else:
        give_back()  # what earlier stages let go is room for this one
        free, held = free_memory(), held_memory()
    return free // 2 if execution.memory is None else min(execution.memory - held, free)


def require_room(execution: Execution, device: str = "cpu") -> None:
    """Raise InputError where --memory is less than what is held before any picture is read."""
    if execution.memory is not None and room(execution, device) <= 0:
        lacking = format_bytes(-room(execution, device))
        raise InputError(
            f"--memory {format_bytes(execution.memory)} is {lacking} less than the model and the libraries take before "
            "any picture is read: give a larger one"
        )


def sized(
    pool: Pool, what: str, call: Callable[..., Any], execution: Execution, device: str = "cpu", reserved: int = 0
) -> Pool:
    """`pool` in batches that `call` has room for beside `reserved` bytes: a power of two. Its first image alone is put
    through `call`, and what that takes is measured.

    Raises:
        InputError: there is no room for a single image; the message says how much there must be.
    """
    if pool.filled:
        return pool
    for_one, left = _for_one_image(pool, call, execution, device, reserved)
    images = int(left / for_one)
    if images < 1:
        raise InputError(
            f"{what}: one image takes {format_bytes(for_one)} of memory and {format_bytes(reserved)} beside it, "
            f"{format_bytes(for_one - left)} more than there is within the budget: give a larger --memory, or a "
            "smaller --input-size"
        )
    return replace(pool, batch_size=min(pool.batch_size, power_of_two(images)))


def power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`, or 1: batches of such sizes make up larger ones."""
    return 1 << (max(1, most).bit_length() - 1)


def has_room_for(
    images: int, pool: Pool, call: Callable[..., Any], execution: Execution, device: str = "cpu", reserved: int = 0
) -> bool:
    """Whether `call` has room for so many images of `pool` at once (for a batch, where that has fewer): measured as in
    `sized`.
    """
    for_one, left = _for_one_image(pool, call, execution, device, reserved)
    return min(images, pool.batch_size) * for_one <= left


def _for_one_image(
    pool: Pool, call: Callable[..., Any], execution: Execution, device: str, reserved: int
) -> tuple[float, int]:
    """The bytes that `call` takes for the first image alone, and those that there are for it beside `reserved`."""
    first = [tensor.to(device) for tensor in pool.draw(torch.zeros(1, dtype=torch.int64))]
    taken = SPARE * max(1, peak_memory_of(lambda: call(*first)))
    return taken, room(execution, device) - reserved


def peak_memory_of(call: Callable[[], Any]) -> int:
    """The most bytes that tensors made by `call` hold at a time."""
    with _Meter() as meter:
        call()
    return meter.most


class _Meter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while it is on, and forgets those that are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.known.add(leaf.untyped_storage()._cdata)  # made before: a weight, an input
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
