"""What evaluating and comparing models finds, as data, and the JSON that `compare --json` prints."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from attnrewrite.errors import InputError
from attnrewrite.files import as_path, read_json
from attnrewrite.outputs import write_file

Status = Literal["measured", "estimated", "unavailable"]


@dataclass(frozen=True)
class Evaluation:
    """How a model did on `n` images, against their labels and against a reference model.

    `top1` is the percentage of images whose highest logit is at their label (None without labels), `agreement` the
    percentage whose highest logit is where the reference's is, and `logit_mse` the mean of (logit - reference's)^2 over
    images and classes. Of a model that gives no logits these are None, and `error` is how far its outputs are from the
    reference's: the squared difference over the energy of the reference's around their mean, of several outputs on
    average; None where they are alike for all images. All three are None without a reference, and for itself.
    """

    model: str
    n: int
    top1: float | None
    agreement: float | None
    logit_mse: float | None
    error: float | None = None


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds for one call: the median, and what nine calls in ten stay below."""

    p50: float
    p90: float


@dataclass(frozen=True)
class Row:
    """One model in one runtime of one target.

    None: not known.

    latency_ms: by this machine's or the device's clock where `status` is "measured"; by the target's model of its
        device's costs where it is "estimated" (p90: the end of its interval).
    instructions: those of one call on one thread, counted by an emulator; `cycles` the compiler's estimate for them. A
        row that has these alone is "estimated", too.
    top1, agreement: percentages, the latter with the first model.
    params, macs: parameters, and multiply-adds for one image.
    max_abs_error: the largest difference to the module's own outputs.
    output_error: of models that give no logits, how far the outputs are from the first model's (`Evaluation.error`).
    note: why something is not known, and what else to know.
    """

    model: str
    target: str
    runtime: str
    status: Status
    latency_ms: Quantiles | None
    instructions: int | None
    cycles: int | None
    top1: float | None
    agreement: float | None
    size_bytes: int | None
    params: int
    macs: int
    max_abs_error: float | None
    sites: tuple[dict[str, Any], ...]
    note: str
    output_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One row per (model, target, runtime), and where they were measured. The first model is the others' reference."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.model for row in self.rows))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every note once: tables give its number."""
        return tuple(dict.fromkeys(row.note for row in self.rows if row.note))

    def of(self, model: str) -> tuple[Row, ...]:
        """The rows of one model."""
        return tuple(row for row in self.rows if row.model == model)

    def latency_ratio(self, row: Row) -> float | None:
        """The row's median over the first model's in the same runtime; None where either was not measured."""
        for other in self.of(self.models[0]):
            if (other.target, other.runtime) == (row.target, row.runtime) and row.latency_ms and other.latency_ms:
                return row.latency_ms.p50 / other.latency_ms.p50
        return None

    def to_dict(self) -> dict[str, Any]:
        """The object that `compare --json` prints: plain data, NaN and infinities as null."""
        return {"environment": _plain(self.environment), "rows": [_plain(asdict(row)) for row in self.rows]}

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text, written to `path` as well where one is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_file(as_path(path), text + "\n", force=True)
        return text


def load_comparison(path: Path) -> Comparison:
    """The comparison that `to_json` wrote to `path`. Raises InputError where there is none."""
    found = read_json(path)
    try:
        return Comparison(dict(found["environment"]), tuple(map(_row, found["rows"])))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no report of a comparison: give another --out, or leave --resume out") from error


def _row(data: dict[str, Any]) -> Row:
    time = data["latency_ms"]
    return Row(**{**data, "latency_ms": time and Quantiles(**time), "sites": tuple(data["sites"])})


def _plain(value: Any) -> Any:
    """Data that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
