"""The processes that calibrate together: one, or those that torchrun started."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from attnrewrite.errors import InputError


@dataclass(frozen=True)
class Processes:
    """This process is `rank` of `size`, and computes on `device`."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def add_up(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def from_owner(self, value: Any, owner: int) -> Any:
        """The `value` that process `owner` gives: tensors of any kind, on its device, numbers, None."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=owner, device=torch.device(self.device))
        return box[0]

    def part(self, batch: Tensor) -> Tensor:
        """This process' share of a batch."""
        return batch if self.size == 1 else batch.tensor_split(self.size)[self.rank]

    def autocast(self) -> torch.autocast:
        """bfloat16 products on a GPU; float32 as ever on a CPU."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.device != "cpu")


@contextmanager
def fast_products() -> Iterator[None]:
    """While the block runs, a GPU multiplies float32 matrices in TF32: numbers rounded to eleven bits, sums in float32.

    A fit can bear it: a Gram matrix is that of the rounded numbers, which is as if they had a noise of 2^-12 of
    themselves, where a ridge is a part in a thousand of their energy. What is solved is float64 throughout.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def first_process() -> bool:
    """Whether this process is the one that writes and prints: torchrun's first, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def placed(device: str, *modules: GraphModule) -> Iterator[None]:
    """While the block runs, the modules are on `device`, and so is what their graphs make or move."""
    _place(device, modules)
    try:
        yield
    finally:
        _place("cpu", modules)


def _place(device: str, modules: tuple[GraphModule, ...]) -> None:
    there = torch.device(device)
    for module in modules:
        module.to(there)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                _place_constant(there, module, str(node.target))
        elsewhere = [node for node in module.graph.nodes if _devices(node) - {there}]
        for node in elsewhere:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: there, (node.args, node.kwargs))
        if elsewhere:
            module.recompile()


def _devices(node: Node) -> set[torch.device]:
    """Those that an operation names."""
    return {leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device)}


def _place_constant(there: torch.device, module: GraphModule, path: str) -> None:
    """Move a tensor that is neither parameter nor buffer, which `Module.to` leaves behind."""
    owner, _, name = path.rpartition(".")
    holder = module.get_submodule(owner)
    if isinstance(constant := vars(holder).get(name), Tensor):
        setattr(holder, name, constant.to(there))


def joined_processes() -> Processes:
    """The processes of torchrun (gloo on CPUs, nccl on GPUs), or this one alone; a GPU where there is one.

    Raises:
        InputError: there are fewer GPUs than torchrun has started processes for.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and local >= gpus:
        raise InputError(
            f"torchrun started more processes than this machine's {gpus} GPU{'s' * (gpus > 1)}, and no two share one: "
            f"give --nproc-per-node {gpus}, or CUDA_VISIBLE_DEVICES='' to use the processors"
        )
    device = f"cuda:{local}" if gpus else "cpu"
    if size == 1:
        return Processes(device=device)
    if device != "cpu":
        torch.cuda.set_device(local)  # what nccl goes by
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
        atexit.register(dist.destroy_process_group)  # once: the same processes cannot meet a second time
    return Processes(dist.get_rank(), dist.get_world_size(), device)
