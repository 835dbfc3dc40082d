"""The geometry of the report's two charts. Colours, text and markup are the template's."""

import math
from dataclasses import dataclass

from attnrewrite.evaluation.records import Comparison, Row

LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 40  # margins of the plot, in pixels
FAR_APART = 8  # times whose largest is so many times the smallest are shown on a logarithmic axis


@dataclass(frozen=True)
class Bar:
    """One measured row: `share` of the longest time in its runtime, `ratio` to the first model's time there."""

    row: Row
    model: int
    share: float
    ratio: float | None


@dataclass(frozen=True)
class Point:
    """One measured row in the plot: its median at `x`, its 90 % quantile at `x_high`, its accuracy at `y`."""

    row: Row
    model: int
    runtime: int
    x: float
    x_high: float
    y: float


@dataclass(frozen=True)
class Axis:
    """Values from the first tick to the last, laid out from pixel `start` to pixel `end`."""

    values: list[float]
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        first, last, value = (math.log(v) if self.logarithmic else v for v in (self.values[0], self.values[-1], value))
        return round(self.start + (self.end - self.start) * (value - first) / (last - first), 1)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        return tuple((self.place(value), f"{value:g}") for value in self.values)


@dataclass(frozen=True)
class Plot:
    """Accuracy against latency on a canvas of `width` x `height` pixels; ticks are (place, text)."""

    width: int
    height: int
    x_label: str
    y_label: str
    runtimes: tuple[str, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    points: tuple[Point, ...]


def bars(comparison: Comparison) -> dict[str, tuple[Bar, ...]]:
    """The measured rows by runtime."""
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if row.latency_ms:
            groups.setdefault(_runtime(row), []).append(row)
    return {runtime: _group(comparison, rows) for runtime, rows in groups.items()}


def _group(comparison: Comparison, rows: list[Row]) -> tuple[Bar, ...]:
    longest = max(row.latency_ms.p50 for row in rows if row.latency_ms)
    return tuple(
        Bar(row, comparison.models.index(row.model), row.latency_ms.p50 / longest, comparison.latency_ratio(row))
        for row in rows
        if row.latency_ms
    )


def plot(comparison: Comparison, width: int) -> Plot | None:
    """The rows that have both a time and an accuracy (without labels: an agreement); None where there are none."""
    labelled = any(row.top1 is not None for row in comparison.rows)
    found = [
        (row, row.latency_ms, quality)
        for row in comparison.rows
        if row.latency_ms and (quality := row.top1 if labelled else row.agreement) is not None
    ]
    if not found:
        return None
    height = round(160 + 0.28 * width)
    qualities = [quality for _, _, quality in found]
    y = Axis(ticks(min(qualities), max(qualities), 5), height - BOTTOM, TOP)
    quickest, slowest = min(latency.p50 for _, latency, _ in found), max(latency.p90 for _, latency, _ in found)
    if slowest > FAR_APART * quickest:
        x = Axis(logarithmic_ticks(quickest, slowest), LEFT, width - RIGHT, logarithmic=True)
    else:
        x = Axis(ticks(0.0, slowest, 4 if width < 500 else 8), LEFT, width - RIGHT)
    runtimes = tuple(dict.fromkeys(_runtime(row) for row, _, _ in found))
    points = tuple(
        Point(
            row,
            comparison.models.index(row.model),
            runtimes.index(_runtime(row)),
            x.place(latency.p50),
            x.place(latency.p90),
            y.place(quality),
        )
        for row, latency, quality in found
    )
    return Plot(
        width,
        height,
        f"milliseconds (median{', logarithmic' if x.logarithmic else ''})",
        "top-1" if labelled else f"agreement with {comparison.models[0]}",
        runtimes,
        x.ticks,
        y.ticks,
        points,
    )


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 2 round values, evenly spaced, that enclose low..high."""
    span = high - low or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if span / (factor * magnitude) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:  # one value on a tick: 100 % must not be drawn below 120 %
        first, last = (first - 1, last) if low > 0 else (first, last + 1)
    return [round(index * step, 12) for index in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose low..high, both above zero."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [float(f"{factor}e{decade}") for decade in decades for factor in (1, 2, 5)]
    first = max(index for index, value in enumerate(values) if value <= low)
    last = min(index for index, value in enumerate(values) if value >= high)
    return values[first : last + 1]


def _runtime(row: Row) -> str:
    return f"{row.target} · {row.runtime}"
