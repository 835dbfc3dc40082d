"""What a comparison found, as a table for the terminal and as one HTML page that needs no network."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from attnrewrite.evaluation.records import Comparison
from attnrewrite.pages import charts
from attnrewrite.pages.render import render

OFF_BY = "the squared difference of the outputs to those of {}, over the energy of these around their mean"


def comparison_table(comparison: Comparison) -> Group:
    """A table for the terminal, its notes numbered below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    counted = counts_of(comparison)
    headings = ("model", "target", "runtime", "p50 ms", "p90 ms", *counted)
    off = ("off by",) if any(row.output_error is not None for row in comparison.rows) else ()
    for heading in (*headings, "top-1", "agree", *off, "size", "max error", "note"):
        table.add_column(heading, justify="left" if heading in ("model", "target", "runtime") else "right")
    for row in comparison.rows:
        times = (f"{row.latency_ms.p50:.2f}", f"{row.latency_ms.p90:.2f}") if row.latency_ms else (row.status, "")
        counts = tuple(count(getattr(row, what)) for what in counted)
        quality = (percent(row.top1), percent(row.agreement), *(error(row.output_error) for _ in off))
        made = (size(row.size_bytes), error(row.max_abs_error))
        number = f"[{comparison.notes.index(row.note) + 1}]" if row.note else ""
        table.add_row(*map(Text, (row.model, row.target, row.runtime, *times, *counts, *quality, *made, number)))
    footnotes = [Text(f"[{number}] {note}") for number, note in enumerate(comparison.notes, 1)]
    if off:
        footnotes.insert(0, Text(f"off by: {OFF_BY.format(comparison.models[0])}"))
    return Group(table, *footnotes)


def counts_of(comparison: Comparison) -> tuple[str, ...]:
    """What of instructions and cycles is known of any row."""
    counted = ("instructions", "cycles")
    return tuple(what for what in counted if any(getattr(row, what) is not None for row in comparison.rows))


def comparison_page(comparison: Comparison) -> str:
    """The page: self-contained, for a phone and for a desk, light and dark."""
    return render(
        "comparison.html.jinja",
        {"percent": percent, "size": size, "count": count, "error": error},
        comparison=comparison,
        counted=counts_of(comparison),
        off_by=OFF_BY.format(comparison.models[0]) if any(r.output_error is not None for r in comparison.rows) else "",
        bars=charts.bars(comparison),
        # The same plot twice, drawn for its width: text scaled with the picture would be unreadable on a phone.
        plots=[plot for width in (320, 960) if (plot := charts.plot(comparison, width))],
    )


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
