"""The records that a conversion is asked with: the command line, a TOML file and Python build the same ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tiny_vits import INPUTS, encoder

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.cli.options import RunOptions
from attnrewrite.cli.parameters import flattened
from attnrewrite.errors import InputError
from attnrewrite.request import Budget, Calibration, Execution

Records = tuple[Calibration, Budget, Execution]


def built(*arguments: object) -> Records:
    """The records that a command line makes."""
    found: list[Records] = []

    def probe(calibration: Calibration, budget: Budget, run: RunOptions) -> None:
        found.append((calibration, budget, run.execution))

    app = typer.Typer()
    app.command()(flattened(probe))
    command = typer.main.get_command(app)
    with command.make_context("probe", [str(argument) for argument in arguments]) as context:
        command.invoke(context)
    return found[0]


def in_toml(folder: Path, text: str) -> Records:
    (folder / "options.toml").write_text(text)
    return built("--config", folder / "options.toml")


# name: (command line, TOML, what Python writes)
CASES: dict[str, tuple[list[str], str, Records]] = {
    "defaults": ([], "", (Calibration(), Budget(), Execution())),
    "calibration": (
        ["--calibrate", "images", "--samples", "12", "--steps", "3", "--skip-bad"],
        "calibrate = 'images'\nsamples = 12\nsteps = 3\nskip-bad = true",
        (Calibration("images", samples=12, steps=3, skip_bad=True), Budget(), Execution()),
    ),
    "a budget on the drop": (
        ["--max-drop", "0.5", "--candidates", "l1", "--candidates", "masked:heads=1"],
        "max-drop = 0.5\ncandidates = ['l1', 'masked:heads=1']",
        (Calibration(), Budget(max_drop=0.5, candidates=("l1", "masked:heads=1")), Execution()),
    ),
    "a budget on the time": (
        ["--max-latency", "0.7", "--for", "host"],
        "max-latency = 0.7\ntarget = 'host'",
        (Calibration(), Budget(max_latency=0.7, target="host"), Execution()),
    ),
    "execution": (
        ["--seed", "7", "--threads", "2", "--memory", "1.5GiB"],
        "seed = 7\nthreads = 2\nmemory = '1536 MiB'",
        (Calibration(), Budget(), Execution(seed=7, threads=2, memory=1536 << 20)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_line_toml_and_python_build_equal_records(case: str, tmp_path: Path) -> None:
    line, text, records = CASES[case]
    assert built(*line) == records
    assert in_toml(tmp_path, text) == records


def test_what_nobody_gives_is_the_default() -> None:
    calibration, budget, execution = built()
    assert (calibration.images, calibration.samples, calibration.steps, calibration.skip_bad) == (None, 1000, 0, False)
    assert (budget.max_drop, budget.max_latency, budget.target, budget.candidates) == (None, None, None, ())
    assert execution == Execution(seed=0, threads=None, progress=None, state=None, memory=None)


@pytest.mark.parametrize("given", ["l1", ["l1"], ("l1",)])
def test_one_candidate_or_a_list_of_them_is_the_same_budget(given: Any) -> None:
    assert Budget(max_drop=1.0, candidates=given) == Budget(max_drop=1.0, candidates=("l1",))


def test_the_keywords_of_convert_build_the_same_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("attnrewrite.api.convert_source", lambda source, *asked: seen.append(asked))
    images = torch.zeros(8, 3, 16, 16)

    def progress(what: str, done: int, total: int) -> None: ...

    ar.convert(
        encoder(), INPUTS, variant="auto", max_drop=0.5, candidates=["l1"], calibration=images, samples=9, steps=2,
        keep=["site0"], seed=3, threads=1, memory="2GB", state=str(tmp_path), progress=progress,
    )  # fmt: skip
    ((auto, calibration, execution, keep, keep_bad),) = seen
    assert auto.budget == Budget(max_drop=0.5, candidates=("l1",))
    assert (calibration.images is images, calibration.samples, calibration.steps) == (True, 9, 2)
    assert execution == Execution(3, 1, progress, tmp_path, 2 * 10**9)
    assert keep == ["site0"]
    assert keep_bad is False


BAD: dict[str, tuple[type, dict[str, Any], str]] = {
    "no drop": (Budget, {"max_drop": 0.0}, "--max-drop 0 must lie between 0 and 100"),
    "everything": (Budget, {"max_drop": 100.0}, "--max-drop 100 must lie between 0 and 100"),
    "NaN": (Budget, {"max_drop": float("nan")}, "--max-drop nan must lie between 0 and 100"),
    "no time": (Budget, {"max_latency": 0.0}, "--max-latency 0 must lie above 0 and be at most 1"),
    "slower": (Budget, {"max_latency": 1.2}, "--max-latency 1.2 must lie above 0 and be at most 1"),
    "no samples": (Calibration, {"samples": 0}, "--samples 0 must lie between 1 and "),
    "fewer than no steps": (Calibration, {"steps": -1}, "--steps -1 must lie between 0 and "),
    "steps without images": (Calibration, {"steps": 5}, "--steps 5 distils on images, and none are given"),
    "a seed below zero": (Execution, {"seed": -1}, "--seed -1 must lie between 0 and "),
    "no threads": (Execution, {"threads": 0}, "--threads 0 must lie between 1 and "),
    "no memory": (Execution, {"memory": "0"}, "'0' is no size of memory: write it as 4GiB, 500MB"),
    "memory in words": (Execution, {"memory": "plenty"}, "'plenty' is no size of memory"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_value_out_of_range_is_refused_in_one_line(case: str) -> None:
    record, values, message = BAD[case]
    with pytest.raises(InputError) as raised:
        record(**values)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["max-drop = 0.0", "max-latency = 1.2", "steps = 5", "samples = 0", "seed = -1"])
def test_a_value_out_of_range_in_a_file_is_one_line_and_exit_code_2(
    text: str, tmp_path: Path, models_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(f"{text}\nvariant = 'auto'")
    line = ["convert", f"{models_file}:vit", "--out", str(tmp_path / "out"), "--config", str(tmp_path / "c.toml")]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert text.split(" ")[0] in error
    assert not (tmp_path / "out").exists()


def test_execution_seeds_torch_and_sets_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    Execution(seed=5).apply()
    first = torch.rand(3)
    Execution(seed=5, threads=3).apply()
    assert torch.equal(torch.rand(3), first)
    assert threads == [3]
