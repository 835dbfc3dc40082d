"""The command line on small models: what each command prints and writes, its JSON keys, its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from attnrewrite.cli.main import main
from attnrewrite.errors import CheckFailedError
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.variants.registry import variants

SIZE = ["--input-size", "3x16x16", "--mean", "0.5", "--std", "0.25"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object, exit_code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of a command line."""
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == exit_code, printed.err
    return printed.out, printed.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return json.loads(run(capsys, *arguments, "--json", exit_code=exit_code)[0])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "images.npz"
    generator = np.random.default_rng(0)
    np.savez(path, x=generator.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8), y=np.arange(20) % 5)
    return path


@pytest.fixture(scope="module")
def converted(models_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "deep" / "out"
    assert main(["convert", f"{models_file}:vit", *SIZE, "--out", str(out)]) == 0
    return out


def test_explain_tells_every_site_and_near_miss(capsys: pytest.CaptureFixture[str], models_file: Path) -> None:
    told = run_json(capsys, "explain", f"{models_file}:vit", *SIZE)
    assert list(told) == ["model", "frontend", "sites", "near_misses", "groups"]
    assert (told["model"], told["frontend"], told["near_misses"]) == ("vit", "fx", [])
    site = {
        key: told["sites"][0][key] for key in ("kind", "axis", "heads", "head_dim", "n_queries", "n_keys", "windowed")
    }
    assert site == {
        "kind": "self",
        "axis": "token",
        "heads": 2,
        "head_dim": 8,
        "n_queries": 5,
        "n_keys": 5,
        "windowed": False,
    }
    assert list(told["sites"][0]["supported"]) == list(variants())
    assert told["sites"][0]["supported"]["l1"] is True
    text, _ = run(capsys, "explain", f"{models_file}:vit", *SIZE)
    assert [line.split()[:1] for line in text.splitlines()] == [
        ["vit:"], [], ["id"], ["site0"], ["site1"], [], ["variants"], ["(1)"],
    ]  # fmt: skip
    assert re.search(r"^site1 +blocks.layers.1.self_attn +self +2x8 +5x5 +none +\(1\)", text, re.MULTILINE)
    assert "(1) can stand there: softmax, l1, " in text


def test_no_attention_is_exit_3_with_the_near_misses(capsys: pytest.CaptureFixture[str], models_file: Path) -> None:
    told = run_json(capsys, "explain", f"{models_file}:gated", *SIZE, exit_code=3)
    assert told["sites"] == []
    assert [miss["anchor"] for miss in told["near_misses"]] == ["softmax"]
    text, error = run(capsys, "explain", f"{models_file}:gated", *SIZE, exit_code=3)
    assert told["near_misses"][0]["detail"] in text
    assert error == "attnrewrite: nothing matched: gated holds no attention that can be rewritten\n"


def test_convert_writes_what_evaluate_reads(
    capsys: pytest.CaptureFixture[str],
    converted: Path,
    data: Path,
    models_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sorted(os.listdir(converted)) == ["model.pt2", "plan.json", "report.json", "weights.safetensors"]
    assert os.listdir(converted.parent) == ["out"]
    told = run_json(capsys, "evaluate", converted, "--data", data)
    assert list(told) == ["model", "n", "top1", "agreement", "logit_mse", "error", "original"]
    assert (told["model"], told["n"]) == ("out", 20)
    assert told["original"]["agreement"] is None
    alone = run_json(capsys, "evaluate", f"{models_file}:vit", *SIZE, "--data", data)
    assert alone["original"] is None
    assert alone["top1"] == told["original"]["top1"]
    monkeypatch.setattr("attnrewrite.cli.output.WORTH_A_LINE", 0.0)
    text, error = run(capsys, "evaluate", converted, "--data", data, "--samples", 7)
    assert re.search(r"^out +7 ", text, re.MULTILINE)
    assert error == "evaluate: 7 of 7\n"


def test_images_of_a_folder_are_resized_to_the_model(
    capsys: pytest.CaptureFixture[str], converted: Path, tmp_path: Path
) -> None:
    for label in range(5):
        (tmp_path / f"class{label}").mkdir()
        Image.new("RGB", (40, 20 + label)).save(tmp_path / f"class{label}" / "a.png")
    assert run_json(capsys, "evaluate", converted, "--data", tmp_path)["n"] == 5


def test_calibration_and_options_reach_the_conversion(
    capsys: pytest.CaptureFixture[str], models_file: Path, data: Path, tmp_path: Path
) -> None:
    command = [
        "convert",
        f"{models_file}:vit",
        *SIZE,
        "--calibrate",
        data,
        "--samples",
        12,
        "--option",
        "centred=false",
    ]
    told = run_json(capsys, *command, "--keep", "site1", "--out", tmp_path / "out")
    assert told["options"]["centred"] is False
    assert [site["variant"] for site in told["sites"]] == ["l1", "softmax"]
    assert told["calibration"]["images"] == 12
    assert told["out"] == str(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["options"] == told["options"]


DRY_RUNS = {
    "convert": ["convert", "{vit}", *SIZE, "--out", "out", "--keep", "site1", "--calibrate", "{data}"],
    "evaluate": ["evaluate", "{vit}", *SIZE, "--data", "{data}"],
    "lower": ["lower", "{vit}", *SIZE, "--target", "host", "--out", "out"],
    "compare": ["compare", "a={vit}", "b={vit}", *SIZE, "--target", "host", "--data", "{data}", "--out", "out"],
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_writes_nothing(
    capsys: pytest.CaptureFixture[str],
    models_file: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if name == "lower":
        pytest.importorskip("tvm", reason="needs tvm")
    monkeypatch.chdir(tmp_path)
    arguments = [part.format(vit=f"{models_file}:vit", data=data) for part in DRY_RUNS[name]]
    told = run_json(capsys, *arguments, "--dry-run")
    assert told["dry_run"] is True
    if name == "convert":
        assert told["sites"] == {"site0": "l1", "site1": "softmax: kept on request"}
    assert os.listdir(tmp_path) == []


def test_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "variants")["variants"]
    assert [each["name"] for each in listed] == list(variants())
    assert next(each["options"]["centred"] for each in listed if each["name"] == "l1") is True
    targets = run_json(capsys, "targets")["targets"]
    assert {"host", "arm-cpu", "gpu", "coreml-npu"} <= {each["name"] for each in targets}
    assert all(each[key] is True or isinstance(each[key], str) for each in targets for key in ("build", "measure"))
    for command in ("variants", "targets"):
        assert len(run(capsys, command)[0].splitlines()) > 4


def test_a_config_file_stands_in_for_options_and_the_command_line_wins(
    capsys: pytest.CaptureFixture[str], models_file: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "convert.toml"
    command = [
        "convert",
        f"{models_file}:vit",
        *SIZE,
        "--option",
        "order=kv",
        "--keep",
        "site0",
        "--out",
        tmp_path / "out",
    ]
    first = run_json(capsys, *command, "--save-config", saved, "--dry-run")
    assert tomllib.loads(saved.read_text()) == {
        "source": f"{models_file}:vit",
        "input-size": "3x16x16",
        "mean": "0.5",
        "std": "0.25",
        "option": ["order=kv"],
        "keep": ["site0"],
        "out": str(tmp_path / "out"),
        "json": True,
    }
    assert json.loads(run(capsys, "convert", "--config", saved, "--dry-run")[0]) == first
    assert run_json(capsys, "convert", "--config", saved, "--keep", "site1", "--dry-run")["sites"]["site0"] == "l1"
    saved.write_text(
        f"source = '{models_file}:vit'\ninput_size = '3x16x16'\nout = 'x'\noption = {{order = 'qk'}}\nsamples = 3"
    )
    assert run_json(capsys, "convert", "--config", saved, "--dry-run")["sites"]["site0"] == "l1"


def test_the_seed_and_the_threads_are_those_asked_for(
    capsys: pytest.CaptureFixture[str], models_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seen.append(("seed", seed)))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: seen.append(("threads", n)))
    run(capsys, "explain", f"{models_file}:vit", *SIZE, "--seed", 5, "--threads", 3)
    assert ("seed", 5) in seen
    assert ("threads", 3) in seen


RAISED = {
    "check": (CheckFailedError("site0 differs by 0.1"), 4, "attnrewrite: error: site0 differs by 0.1\n"),
    "stopped": (KeyboardInterrupt(), 130, "attnrewrite: stopped\n"),
    "unexpected": (
        ZeroDivisionError("division\nby zero"),
        1,
        "attnrewrite: unexpected error: ZeroDivisionError: division (ATTNREWRITE_DEBUG=1 shows where)\n",
    ),
}


@pytest.mark.parametrize("case", RAISED)
def test_what_goes_wrong_inside_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], models_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    error, code, message = RAISED[case]

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("attnrewrite.conversion.convert.convert_source", fail)
    command = ["convert", f"{models_file}:vit", *SIZE, "--out", tmp_path / "out"]
    text, told = run(capsys, *command, exit_code=code)
    assert text == ""
    assert told == message
    monkeypatch.setenv("ATTNREWRITE_DEBUG", "1")
    assert "Traceback" in run(capsys, *command, exit_code=code)[1]
    assert os.listdir(tmp_path) == []


def test_numbers_that_json_has_no_word_for_are_null(
    capsys: pytest.CaptureFixture[str], models_file: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    found = {"vit": Evaluation("vit", 20, 50.0, None, float("nan"))}
    monkeypatch.setattr("attnrewrite.api.evaluate", lambda *arguments, **options: found)
    assert run_json(capsys, "evaluate", f"{models_file}:vit", *SIZE, "--data", data)["logit_mse"] is None


@pytest.mark.parametrize("arguments", [[], ["--help"], ["convert", "-h"], ["--version"], ["variants", "--help"]])
def test_help_comes_at_once(arguments: list[str]) -> None:
    code = "import sys; from attnrewrite.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    assert ran.stdout.endswith("0 False\n")
    assert ran.stderr == ""


NOISY = """
import os
from torch import nn
print("from Python")
os.system("echo from a tool that was started")

def vit():
    return nn.Linear(2, 2)
"""


def test_standard_output_holds_the_json_alone_and_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(NOISY)
    command = [
        sys.executable,
        "-m",
        "attnrewrite",
        "explain",
        f"{tmp_path / 'm.py'}:vit",
        "--input-size",
        "1x2x2",
        "--json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 3
    assert json.loads(ran.stdout)["model"] == "vit"
    assert "from Python" in ran.stderr
    assert "from a tool that was started" in ran.stderr
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "attnrewrite", "variants"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    assert (ran.returncode, ran.stderr) == (141, "")


SLOW = """
import pathlib, time

def vit():
    pathlib.Path("started").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_without_a_trace(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    (tmp_path / "m.py").write_text(SLOW)
    command = [sys.executable, "-m", "attnrewrite", "convert", "m.py:vit", "--input-size", "1x2x2", "--out", "out"]

    def heed_signals() -> None:  # a background job is started deaf to interrupts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(sent)
        _, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
