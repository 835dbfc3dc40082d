"""What is made of a comparison: JSON to the contract, a table, a page that stands alone, the geometry of its charts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from comparisons import COMPARISON, LONG, SCHEDULE
from rich.console import Console

from attnrewrite.api import Comparison
from attnrewrite.errors import InputError
from attnrewrite.evaluation.records import Quantiles
from attnrewrite.pages import charts
from attnrewrite.pages.comparison import count, size

# The contract that scripts rely on.
KEYS = [
    "model",
    "target",
    "runtime",
    "status",
    "latency_ms",
    "instructions",
    "cycles",
    "top1",
    "agreement",
    "size_bytes",
    "params",
    "macs",
    "max_abs_error",
    "sites",
    "note",
    "output_error",
]
UNLABELLED = Comparison({}, tuple(replace(row, top1=None) for row in COMPARISON.rows))
UNTIMED = Comparison({}, tuple(row for row in COMPARISON.rows if row.status == "unavailable"))
TIMED_ALONE = Comparison({}, tuple(replace(row, top1=None, agreement=None) for row in COMPARISON.rows))
MAPS = Comparison(
    {},
    tuple(replace(row, top1=None, agreement=None, output_error=0.25 * (row.model == "l1")) for row in COMPARISON.rows),
)
PLAIN = Comparison({"processor": "a processor"}, COMPARISON.rows[:3])


def test_json_has_the_keys_of_the_contract_and_nothing_else(tmp_path: Path) -> None:
    text = COMPARISON.to_json(tmp_path / "report.json")
    found = json.loads(text)
    assert (tmp_path / "report.json").read_text() == text + "\n"
    assert list(found) == ["environment", "rows"]
    assert all(list(row) == KEYS for row in found["rows"])
    assert found["rows"][0]["latency_ms"] == {"p50": 12.0, "p90": pytest.approx(13.2)}
    assert found["rows"][3]["latency_ms"] is None
    assert found["rows"][0]["sites"][0]["n_keys"] == 257


def test_json_holds_no_number_that_json_lacks() -> None:
    row = replace(COMPARISON.rows[0], max_abs_error=float("inf"), top1=float("nan"))
    found = json.loads(Comparison({"folder": Path("out")}, (row,)).to_json(), parse_constant=pytest.fail)
    assert found["rows"][0]["max_abs_error"] is found["rows"][0]["top1"] is None
    assert found["environment"] == {"folder": "out"}


def test_ratios_are_to_the_first_model_in_the_same_runtime() -> None:
    ratios = {(row.model, row.runtime): COMPARISON.latency_ratio(row) for row in COMPARISON.rows}
    assert [ratios["l1", runtime] for runtime in ("torch", "onnxruntime", "tvm")] == [0.75, 0.75, 0.75]
    assert ratios["original", "tvm"] == 1.0
    assert ratios["l1", "coreml"] is None


def test_the_table_names_every_row_and_numbers_its_notes() -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(PLAIN.to_table())
    lines = capture.get().splitlines()
    assert lines[1].split() == ["original", "host", "torch", "12.00", "13.20", "94.8%", "–", "873.3", "kB", "3.4e-07"]
    assert lines[3].split()[-1] == "[1]"
    assert lines[4].strip() == f"[1] {SCHEDULE}"


def test_the_table_has_columns_for_instructions_and_cycles_where_they_are_known(tmp_path: Path) -> None:
    counted = replace(PLAIN.rows[0], status="estimated", latency_ms=None, instructions=56_395_176, cycles=30_123_456)
    console = Console(width=140)
    with console.capture() as capture:
        console.print(Comparison({}, (counted, *PLAIN.rows[1:])).to_table())
    heading, row, other, *_ = capture.get().splitlines()
    assert "p90 ms  instructions  cycles  top-1" in heading
    assert row.split()[3:9] == ["estimated", "56.4", "M", "30.1", "M", "94.8%"]
    assert other.split()[5:7] == ["–", "–"]
    page = Comparison({}, (counted, *PLAIN.rows[1:])).to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert [part in page for part in ("instructions</th>", "cycles</th>", "56.4 M</td>", "30.1 M</td>")] == [True] * 4


@pytest.mark.parametrize("comparison", [COMPARISON, UNLABELLED, UNTIMED, TIMED_ALONE, MAPS, PLAIN])
def test_the_page_stands_alone_and_escapes_names(comparison: Comparison, tmp_path: Path) -> None:
    page = comparison.to_html(tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=[\"'](?!#)|url\(|@import|<script|<link", page) == []
    for row in comparison.rows:
        assert row.target in page
        assert row.note in page
    assert "NaN" not in page
    assert "None" not in page


def test_how_far_outputs_are_off_is_told_where_there_are_no_classes(tmp_path: Path) -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(MAPS.to_table())
    assert "agree   off by" in capture.get()
    assert "2.5e-01" in capture.get()
    assert "off by: the squared difference of the outputs to those of original" in capture.get()
    page = MAPS.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<th class="number">off by</th>' in page
    assert "these models give no classes" in page
    assert "off by" not in PLAIN.to_html(tmp_path / "plain.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*report\.html: .*file is not a folder"):
        COMPARISON.to_html(tmp_path / "file" / "report.html")


def test_bars_share_the_longest_of_their_runtime() -> None:
    bars = charts.bars(COMPARISON)
    assert list(bars) == ["host · torch", "host · onnxruntime", "host · tvm"]
    assert [(bar.row.model, bar.share, bar.ratio) for bar in bars["host · tvm"]] == [
        ("original", 0.5, 1.0),
        ("l1", 0.375, 0.75),
        (LONG, 1.0, 2.0),
    ]


@pytest.mark.parametrize("width", [320, 960])
@pytest.mark.parametrize("comparison", [COMPARISON, UNLABELLED])
def test_the_plot_keeps_inside_itself_and_in_order(comparison: Comparison, width: int) -> None:
    plot = charts.plot(comparison, width)
    assert plot is not None
    assert plot.y_label == ("top-1" if comparison is COMPARISON else "agreement with original")
    for point in plot.points:
        assert plot.x_ticks[0][0] < point.x < point.x_high <= plot.x_ticks[-1][0] <= width
        assert plot.y_ticks[-1][0] <= point.y <= plot.y_ticks[0][0] <= plot.height
    faster, slower = (next(p for p in plot.points if p.row.model == name) for name in ("l1", LONG))
    assert faster.x < slower.x
    assert faster.y > slower.y  # less accurate, so lower on the page


@pytest.mark.parametrize("comparison", [UNTIMED, TIMED_ALONE])
def test_no_plot_without_a_time_and_an_accuracy(comparison: Comparison) -> None:
    assert charts.plot(comparison, 320) is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 79.6, [0, 20, 40, 60, 80]),
        (86.1, 94.8, [86, 88, 90, 92, 94, 96]),
        (0.0, 0.0031, [0, 0.001, 0.002, 0.003, 0.004]),
        (100.0, 100.0, [80, 100]),
        (0.0, 0.0, [0.0, 0.2]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    found = charts.ticks(low, high, 5)
    assert found == expected
    assert found[0] <= low <= high <= found[-1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(2.14, 80.0, [2, 5, 10, 20, 50, 100]), (0.03, 0.4, [0.02, 0.05, 0.1, 0.2, 0.5]), (1, 10, [1, 2, 5, 10])],
)
def test_logarithmic_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    assert charts.logarithmic_ticks(low, high) == expected


def test_times_that_are_far_apart_have_a_logarithmic_axis_and_say_so() -> None:
    near = charts.plot(replace(COMPARISON, rows=COMPARISON.rows[:2]), 320)
    far = charts.plot(COMPARISON, 320)
    assert near is not None
    assert far is not None
    assert (near.x_label, far.x_label) == ("milliseconds (median)", "milliseconds (median, logarithmic)")
    assert (near.x_ticks[0][1], far.x_ticks[0][1]) == ("0", "5")
    places = {text: place for place, text in far.x_ticks}
    assert places["10"] - places["5"] == pytest.approx(places["20"] - places["10"], abs=0.2)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (873_256, "873.3 kB"), (999_990, "1.0 MB"), (None, "–")],
)
def test_sizes_read_well(number: int | None, text: str) -> None:
    assert size(number) == text


def test_counts_read_well() -> None:
    assert [count(number) for number in (12, 218_314, 84_321_000, 2_000_000_000)] == [
        "12",
        "218.3 k",
        "84.3 M",
        "2.0 G",
    ]


def test_quantiles_are_plain_data() -> None:
    assert COMPARISON.rows[0].latency_ms == Quantiles(12.0, 12.0 * 1.1)
