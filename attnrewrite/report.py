"""What a comparison found, as JSON, as a table for the terminal and as one HTML page that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnrewrite.errors import InputError
from attnrewrite.pages import render

if TYPE_CHECKING:
    from rich.console import Group

Status = Literal["measured", "estimated", "unavailable"]


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds for one call: the median, and what nine calls in ten stay below."""

    p50: float
    p90: float


@dataclass(frozen=True)
class Row:
    """One model in one runtime of one target.

    `latency_ms` is a time of this machine's clock and stands only where `status` is "measured"; `instructions` a count
    of an emulator. `top1` and `agreement` (with the first model) are percentages, `macs` multiply-adds for one image,
    `max_abs_error` the distance to the module's own outputs. None: not known. `note` says why, and what to know.
    """

    model: str
    target: str
    runtime: str
    status: Status
    latency_ms: Quantiles | None
    instructions: int | None
    top1: float | None
    agreement: float | None
    size_bytes: int | None
    params: int
    macs: int
    max_abs_error: float | None
    sites: tuple[dict[str, Any], ...]
    note: str


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
            write(Path(path), text + "\n")
        return text

    def to_table(self) -> Group:
        """A table for the terminal, its notes numbered below it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (
            "model",
            "target",
            "runtime",
            "p50 ms",
            "p90 ms",
            "top-1",
            "agree",
            "size",
            "max error",
            "note",
        ):
            table.add_column(heading, justify="left" if heading in ("model", "target", "runtime") else "right")
        for row in self.rows:
            times = (f"{row.latency_ms.p50:.2f}", f"{row.latency_ms.p90:.2f}") if row.latency_ms else (row.status, "")
            quality = (percent(row.top1), percent(row.agreement), size(row.size_bytes), error(row.max_abs_error))
            number = f"[{self.notes.index(row.note) + 1}]" if row.note else ""
            table.add_row(*map(Text, (row.model, row.target, row.runtime, *times, *quality, number)))
        footnotes = (Text(f"[{number}] {note}") for number, note in enumerate(self.notes, 1))
        return Group(table, *footnotes)

    def to_html(self, path: str | Path) -> Path:
        """Write the page: self-contained, for a phone and for a desk, light and dark."""
        from attnrewrite import charts

        page = render(
            "report.html.jinja",
            {"percent": percent, "size": size, "count": count, "error": error},
            comparison=self,
            bars=charts.bars(self),
            # The same plot twice, drawn for its width: text scaled with the picture would be unreadable on a phone.
            plots=[plot for width in (320, 960) if (plot := charts.plot(self, width))],
        )
        return write(Path(path), page)


def write(path: Path, text: str) -> Path:
    """Write `text` to `path`, making its folder; InputError where that is not allowed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another place") from error
    return path


def percent(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}%"


def error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def size(number: int | None) -> str:
    return "–" if number is None else _scaled(number, ("B", "kB", "MB", "GB"))


def count(number: int | None) -> str:
    return "–" if number is None else _scaled(number, ("", "k", "M", "G"))


def _scaled(number: float, units: Sequence[str]) -> str:
    """`number` in three digits and a unit, each unit a thousand of the one before."""
    for unit in units[:-1]:
        if round(number, 1) < 1000:
            return f"{number:.{0 if number == int(number) else 1}f} {unit}".strip()
        number /= 1000
    return f"{number:.1f} {units[-1]}"


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
