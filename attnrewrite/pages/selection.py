"""The page of a conversion whose variants were selected: the promise, the frontier as a picture, and the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.pages.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, ticks
from attnrewrite.pages.render import render

WIDTHS = (320, 960)  # drawn twice: text scaled with the picture would be unreadable on a phone
SEEN = 2.0  # predicted losses up to so many times the largest that matters are drawn


@dataclass(frozen=True)
class Mark:
    """A choice in the picture: `y` what it loses, `y_bound` the most that it may (a predicted one: the same)."""

    x: float
    y: float
    y_bound: float
    kind: str
    chosen: bool
    holds: bool
    replaced: int
    label: str


@dataclass(frozen=True)
class Frontier:
    """Loss against cost on a canvas of `width` x `height` pixels; `budget_x` or `budget_y` is where the budget ends.

    `beyond` predicted choices lose more than the picture shows.
    """

    width: int
    height: int
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    marks: tuple[Mark, ...]
    line: str
    budget_x: float | None
    budget_y: float | None
    beyond: int


def page(report: Mapping[str, Any]) -> str:
    """The page of a conversion's report that holds a selection. Raises InputError where jinja2 is not installed."""
    selection = report["selection"]
    plots = [frontier(selection, width) for width in WIDTHS]
    filters = {"part": lambda value: "–" if value is None else f"{value:.2f}", "short": _short}
    return render("selection.html.jinja", filters, report=report, selection=selection, plots=plots)


def frontier(selection: Mapping[str, Any], width: int) -> Frontier:
    """Where everything that was predicted and measured goes."""
    measured = [each for each in selection["frontier"] if each["kind"] == "measured"]
    predicted = [each for each in selection["frontier"] if each["kind"] == "predicted"]
    budget = selection["max_drop"]
    matters = SEEN * max([each["bound"] for each in measured] + ([budget] if budget is not None else []))
    drawn = [each for each in predicted if each["points"] <= matters]
    height = round(160 + 0.28 * width)
    y = _axis([0.0, *_losses([*drawn, *measured]), *([budget] if budget else [])], 5, height - BOTTOM, TOP)
    limit = selection["max_latency"]
    costs = [_cost(each) for each in (*drawn, *measured)] + ([limit] if limit is not None else [])
    x = _axis(costs, 4 if width < 500 else 8, LEFT, width - RIGHT)
    marks = tuple(_mark(each, x, y) for each in (*drawn, *measured))
    line = " ".join(f"{mark.x},{mark.y}" for mark in marks if mark.kind == "predicted")
    return Frontier(
        width, height, x.ticks, y.ticks, marks, line, None if limit is None else x.place(limit),
        None if budget is None else y.place(budget), len(predicted) - len(drawn),
    )  # fmt: skip


def _axis(values: Sequence[float], most: int, start: float, end: float) -> Axis:
    return Axis(ticks(min(values), max(values), most), start, end)


def _losses(points: Sequence[Mapping[str, Any]]) -> list[float]:
    return [value for each in points for value in (each["points"], each.get("bound", each["points"]))]


def _cost(point: Mapping[str, Any]) -> float:
    """The cost over the original's: timed on the whole model where that was done."""
    timed = point.get("timed_ratio")
    return float(point["cost_ratio"] if timed is None else timed)


def _mark(point: Mapping[str, Any], x: Axis, y: Axis) -> Mark:
    lost = point["points"]
    bound = point.get("bound", lost)
    label = f"{point['kind']}: {point['replaced']} sites, {_cost(point):.2f} of the cost, {lost:.2f} points"
    label += "" if bound == lost else f", at most {bound:.2f}"
    return Mark(
        x.place(_cost(point)), y.place(lost), y.place(bound), point["kind"], point.get("chosen", False),
        point.get("holds", True), point["replaced"], label,
    )  # fmt: skip


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
