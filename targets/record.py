"""What lies beside an artifact to say what it is: artifact.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = "artifact.json"


@dataclass(frozen=True)
class Port:
    """The shape and type of a tensor that an artifact takes or gives."""

    shape: tuple[int, ...]
    dtype: str


def is_package(source: object) -> bool:
    """Whether a source is a Core ML package on disk, by its name."""
    return isinstance(source, str | Path) and str(source).rstrip("/").endswith(".mlpackage")


@dataclass(frozen=True)
class Labels:
    """What an artifact calls the classes of a classifier, in their order, instead of giving numbers.

    Beside each name it gives the `softmax` of the model's outputs, or the outputs as they are.
    """

    names: tuple[str, ...]
    softmax: bool


@dataclass(frozen=True)
class Compression:
    """How an artifact's weights are held in fewer bytes, how many are, and what the model takes without and with it."""

    method: str
    weights: int
    size_bytes_before: int
    size_bytes: int


@dataclass(frozen=True)
class Decision:
    """What became of one value of the lowered graph: the rule that took its operators, or why none did.

    `operators` are those that one kernel does, the last one first. `multiply_adds` is how many they make as they are
    written (Winograd's algorithm gets by with fewer), `share` their part of the whole model's; `reason` is None where a
    rule took them, and `before` says why rules that were asked before did not.
    """

    value: str
    operators: tuple[str, ...]
    shape: tuple[int, ...]
    rule: str
    multiply_adds: int
    share: float
    reason: str | None = None
    before: tuple[str, ...] = ()


def ports(arrays: Sequence[np.ndarray]) -> tuple[Port, ...]:
    return tuple(Port(tuple(array.shape), str(array.dtype)) for array in arrays)


def as_data(artifact: Any) -> dict[str, Any]:
    """Everything that an artifact's record says, but for where it lies, as JSON holds it; types by their names."""
    data = {key: value for key, value in asdict(artifact).items() if key != "path"}
    if data["preprocessing"] is not None:
        data["preprocessing"]["dtype"] = str(data["preprocessing"]["dtype"]).removeprefix("torch.")
    return data


def write_record(artifact: Any, folder: Path) -> Path:
    """Write an artifact's record to `folder`/artifact.json."""
    path = folder / FILE
    path.write_text(json.dumps(as_data(artifact), indent=2) + "\n", encoding="utf-8")
    return path
