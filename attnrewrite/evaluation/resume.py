"""What an earlier comparison has measured already, for one that goes on from it."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from attnrewrite.evaluation.records import Comparison, Row
from attnrewrite.targets.base import Target
from attnrewrite.targets.prepare import arrays

Key = tuple[str, str, str]  # model, target, runtime
MAY_DIFFER = frozenset({"date", "models", "targets", "memory_bytes"})  # of the environments of two runs
# Options of targets that change nothing of what is built and measured.
WITHOUT_EFFECT = frozenset({"rpc_timeout", "emulation_s", "device_timeout", "development_team"})
# Values that are written alike in every process; others may write where in memory they lie.
PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
BEFORE = "measured in an earlier run, "


def key_of(row: Row) -> Key:
    return row.model, row.target, row.runtime


@torch.no_grad()
def fingerprint(module: nn.Module, inputs: Sequence[Tensor], sites: Sequence[Mapping[str, Any]]) -> str:
    """A hash of a model's tensors, of the operations that one call runs, of what stands at its sites and of the shapes
    that it is called with. The same in every process.
    """
    stands = [[site.get("id"), site.get("variant"), site.get("options")] for site in sites]
    shapes = [[list(tensor.shape), str(tensor.dtype)] for tensor in inputs]
    digest = hashlib.sha256(json.dumps([type(module).__name__, stands, shapes], default=str).encode())
    for name, tensor in _tensors(module).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays(tensor)))
    with _Operations(digest.update):
        module(*inputs)
    return digest.hexdigest()[:16]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Everything that a model holds, by name: buffers that are not saved and plain attributes among it."""
    plain = {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }
    return {**module.state_dict(), **dict(module.named_buffers()), **plain}


class _Operations(TorchDispatchMode):
    """Tells each operation that runs to `write`: its name, its numbers, and which tensors it reads, as numbered in the
    order in which they were read or made.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self.write, self.numbers, self.count = write, WeakTensorKeyDictionary(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.write(f"{func} {tree_map(self._named, (args, kwargs or {}))}".encode())
        result = func(*args, **(kwargs or {}))
        tree_map(self._named, result)
        return result

    def _named(self, value: object) -> str:
        if isinstance(value, Tensor):
            if value not in self.numbers:
                self.numbers[value], self.count = self.count, self.count + 1
            return f"%{self.numbers[value]}"
        return (
            repr(value) if isinstance(value, PLAIN) else type(value).__name__
        )  # others write where in memory they lie


def described(targets: Iterable[Target]) -> dict[str, str]:
    """The options of each target that decide what is built and where it is measured, as text, by the target's name."""
    return {
        target.name: " ".join(
            f"{name}={getattr(target, name)}"
            for name in target.options()
            if name not in WITHOUT_EFFECT and getattr(target, name) is not None
        )
        for target in targets
    }


def measured_before(earlier: Comparison | None, environment: Mapping[str, Any]) -> dict[Key, Row]:
    """The rows of `earlier` that were measured, of models and targets that are still the same; none where they were
    measured on another machine or with other versions. Their notes say when that was.
    """
    if earlier is None or _machine(earlier.environment) != _machine(environment):
        return {}
    same = {
        what: {name for name, told in environment[what].items() if earlier.environment.get(what, {}).get(name) == told}
        for what in ("models", "targets")
    }
    return {
        key_of(row): _dated(row, str(earlier.environment.get("date")))
        for row in earlier.rows
        if row.status == "measured" and row.model in same["models"] and row.target in same["targets"]
    }


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in environment.items() if key not in MAY_DIFFER}


def _dated(row: Row, date: str) -> Row:
    return row if BEFORE in row.note else replace(row, note="; ".join(filter(None, (row.note, f"{BEFORE}{date}"))))
