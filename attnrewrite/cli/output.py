"""What commands hand back, and how it is shown: results on standard output, everything else on standard error."""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrewrite.errors import InputError, NothingMatchedError
from attnrewrite.evaluation.records import Evaluation

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from attnrewrite.targets.base import Artifact


WORTH_A_LINE = 5.0  # seconds: what is done sooner needs no line of a log


@dataclass(frozen=True)
class Outcome:
    """A command's result: `data` is what --json prints, `shown` is printed otherwise, `note` goes to standard error."""

    data: dict[str, Any]
    shown: "RenderableType"
    exit_code: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Failure:
    """What went wrong, as --json prints it: a code for programs, one sentence, and the site that it is about."""

    code: str
    message: str
    site: str | None = None


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Print an outcome on standard output."""
    if as_json:
        failed = {} if outcome.exit_code == 0 else {"error": asdict(_failure(outcome))}
        text = json.dumps(_finite(outcome.data | failed), indent=2, allow_nan=False) + "\n"
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty(), markup=False)
        with console.capture() as captured:
            console.print(outcome.shown)
        text = captured.get()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or "its encoding lacks a character"
        raise InputError(f"cannot write the result to standard output: {reason}") from error
    if outcome.note:
        say(outcome.note)


def _failure(outcome: Outcome) -> Failure:
    """Why a command that has a result to show does not return 0: nothing matched."""
    return Failure(NothingMatchedError.code, (outcome.note or "nothing matched").removeprefix("attnrewrite: "))


def _finite(value: Any) -> Any:
    """`value` with null where JSON has no number."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(message: str) -> None:
    """One line on standard error."""
    print(" ".join(message.split()), file=sys.stderr)


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """Whatever is printed inside, by Python or by a compiler's own code, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class Notes(logging.Handler):
    """attnrewrite's own log messages, as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


@contextlib.contextmanager
def bars() -> Iterator["Bars"]:
    """Progress on standard error: bars on a terminal, elsewhere a line for each thing done that took WORTH_A_LINE."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bars(progress, console)


class Bars:
    """Told (what, done, total); one bar for each `what`."""

    def __init__(self, progress: Any, console: "Console") -> None:
        self._progress, self._console = progress, console
        self._tasks: dict[str, Any] = {}
        self._since = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if done == total:
            took, self._since = time.monotonic() - self._since, time.monotonic()
            if took >= WORTH_A_LINE and not self._console.is_terminal:
                say(f"{what}: {total} of {total}")


def table(title: str | None, columns: Mapping[str, str], rows: list[list[str]]) -> "RenderableType":
    """A plain table; `columns` maps each heading to "left" or "right"."""
    from rich.table import Table
    from rich.text import Text

    built = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="bold")
    for heading, side in columns.items():
        built.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        built.add_row(*map(Text, row))
    return built


def conversion_table(report: Mapping[str, Any], out: Path) -> "RenderableType":
    """What became of each site, and what each stage of calibration did."""
    from rich.console import Group

    selection = report.get("selection")
    chosen = selection["promise"]["sites"] if selection else {}  # with their options
    sites = [
        [each["id"], each["name"], chosen.get(each["id"], each["variant"]), each["note"] or ""]
        for each in report["sites"]
    ]
    named = sum(each["variant"] == report["variant"] for each in report["sites"])
    changed, what = (selection["promise"]["replaced"], "replaced") if selection else (named, report["variant"])
    title = f"{out}: {changed} of {len(sites)} sites of {report['model']} are {what}"
    parts = [table(title, dict.fromkeys(("id", "name", "is now", "note"), "left"), sites)]
    if stages := report["calibration"]["stages"]:
        rows = [
            [
                stage["name"],
                f"{stage['seconds']:.1f}",
                *(_change(stage, what, form) for what, form in (("error", ".3g"), ("kl", ".3g"), ("agreement", ".1f"))),
                "; ".join(stage["notes"]),
            ]
            for stage in stages
        ]
        columns = dict.fromkeys(("stage", "seconds", "error", "KL, nats", "agreement, %", "note"), "left")
        title = f"\ncalibrated on {report['calibration']['images']} images; distance to the original on held-out ones"
        parts.append(table(title, columns, rows))
    if selection:
        parts.append(f"\n{promised(selection)}")
    batches, seconds = len(report["checks"]["draws"]), report["checks"]["seconds"]
    parts.append(
        f"\nchecked against the original on the example and drawn inputs, in {batches} batches: {seconds:.1f} s"
    )
    return Group(*parts)


def promised(selection: Mapping[str, Any]) -> str:
    """What a selection promises, in one sentence."""
    found, cost = selection["promise"], selection["cost"]
    lost = f"loses {found['points']:.2f} {selection['measure']}; at most {found['bound']:.2f} with 95 % confidence"
    ratio = found["cost_ratio"] if found["timed_ratio"] is None else found["timed_ratio"]
    return f"{lost}; {ratio:.2f} of the original's cost ({cost['status']}: {cost['how']})"


def _change(stage: Mapping[str, Any], what: str, form: str) -> str:
    before, after = stage[f"{what}_before"], stage[f"{what}_after"]
    return "" if after is None else f"{before:{form}} -> {after:{form}}"


def schedule_table(artifact: "Artifact") -> "RenderableType":
    """Which rule took which operators, alike ones in one row, those with most multiply-adds first."""
    alike: dict[tuple[str, str, str], list[float]] = {}
    for each in artifact.operators:
        # As they follow each other, where the record has the last one first.
        why = each.reason or "; ".join(each.before)
        row = (each.rule, ", ".join(reversed(each.operators)), why)
        alike.setdefault(row, []).append(each.share)
    rows = [
        [rule, operators, str(len(shares)), f"{100 * sum(shares):.1f} %", why]
        for (rule, operators, why), shares in sorted(alike.items(), key=lambda item: -sum(item[1]))
    ]
    columns = {"rule": "left", "operators": "left", "times": "right", "multiply-adds": "right", "why": "left"}
    return table(f"{artifact.model} for {artifact.target}: {artifact.schedule}", columns, rows)


def made_lines(artifact: "Artifact") -> str:
    """What an artifact is, how it was checked, what its weights take and how it did on images."""
    lines = [f"{artifact.path}: {', '.join(artifact.files)} (checked: {artifact.check})"]
    if (smaller := artifact.compression) is not None:
        share = smaller.size_bytes / smaller.size_bytes_before
        lines.append(
            f"{smaller.method} on {smaller.weights} weights: {smaller.size_bytes:,} bytes, {share:.0%} of "
            f"{smaller.size_bytes_before:,}"
        )
    for name, each in artifact.measured.items():
        figures = (("top-1", each["top1"]), ("agreement with the model", each["agreement"]))
        told = [f"{figure} {value:.2f} %" for figure, value in figures if value is not None]
        if each["logit_mse"] is not None:
            told.append(f"squared distance of the outputs {each['logit_mse']:.3g} on average")
        if each["error"] is not None:
            told.append(f"outputs off by {each['error']:.3g} of their energy")
        if told:
            lines.append(f"the {name} on {each['n']} images: {', '.join(told)}")
    return "\n".join(lines)


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> "RenderableType":
    figures = {
        "top-1": ("top1", ".2f", " %"),
        "agreement": ("agreement", ".2f", " %"),
        "logit MSE": ("logit_mse", ".3g", ""),
        "error": ("error", ".3g", ""),
    }
    known = {
        heading: [_figure(getattr(each, name), form, unit) for each in evaluations.values()]
        for heading, (name, form, unit) in figures.items()
    }
    shown = {heading: cells for heading, cells in known.items() if any(cells)}
    shown = shown or {"top-1": ["no labels"] * len(evaluations)}
    counts = [str(each.n) for each in evaluations.values()]
    rows = zip(evaluations, counts, *shown.values(), strict=True)
    return table(None, {"model": "left"} | dict.fromkeys(("images", *shown), "right"), [list(row) for row in rows])


def _figure(value: float | None, form: str, unit: str) -> str:
    return "" if value is None else f"{value:{form}}{unit}"
