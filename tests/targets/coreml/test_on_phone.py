"""A package measured on a connected iPhone: coremltools' own code down to Xcode's commands; no iPhone was at hand."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xcode
from torch import nn

from attnrewrite.cli.main import main
from attnrewrite.errors import InputError
from attnrewrite.targets.base import get_target
from attnrewrite.targets.coreml import package, phone_process
from attnrewrite.targets.devices import host, on_phone
from attnrewrite.targets.prepare import canonical, specialise
from attnrewrite.targets.runners import device_process
from attnrewrite.targets.runners.programs import Unavailable

pytest.importorskip("coremltools", reason="coremltools is not installed")

from coremltools.models.ml_program.experimental import async_wrapper, remote_device

CONNECTED = {"U1": ("Anna's iPhone", "connected"), "U2": ("iPad", "disconnected")}
ANSWER = np.arange(5, dtype=np.float32)[None]


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, given = tmp_path_factory.mktemp("package"), (torch.zeros(1, 3),)
    return package.convert(canonical(specialise(nn.Linear(3, 5).eval(), given)), folder, "FLOAT16")


@pytest.fixture
def job(linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is asked of the process, on a machine where Core ML compiles and coremltools has its app's sources."""
    (tmp_path / "modelrunner" / "ModelRunner.xcworkspace").mkdir(parents=True)
    monkeypatch.setattr(remote_device._DeviceCtl, "_validation_done", False)
    sources = staticmethod(lambda: tmp_path / "modelrunner")
    monkeypatch.setattr(remote_device._ModelRunnerAppBuilder, "_get_project_path", sources)
    monkeypatch.setattr(async_wrapper, "compile_model", lambda model, destination_path: Path(destination_path).mkdir())
    patience = remote_device._DeviceCtlRemoteService.__init__
    monkeypatch.setattr(patience, "__defaults__", (0.0, 2))  # seconds between attempts, and how many
    np.savez(tmp_path / "inputs.npz", np.ones((1, 3), np.float32))
    return {
        "device": "Anna's iPhone", "development_team": "T3AM", "package": str(linear), "repeats": 3, "budget_s": 600.0,
        "inputs": str(tmp_path / "inputs.npz"), "outputs": str(tmp_path / "outputs.npz"),
    }  # fmt: skip


def measured(job: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **phone: Any) -> dict[str, Any]:
    """What the process says with a phone that behaves so."""
    commands = xcode.install(folder, **{"devices": CONNECTED, **phone})
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    output = package.unloaded(Path(job["package"])).get_spec().description.output[0].name
    with (folder / "prediction.bin").open("wb") as file:
        described = remote_device._TensorDescriptor.from_array(ANSWER, file).as_dict()
    (folder / "prediction.json").write_text(json.dumps({output: described}))
    (folder / "job.json").write_text(json.dumps(job))
    return asyncio.run(phone_process.measure(folder / "job.json"))


def test_a_phone_gives_times_answers_and_both_times_of_loading(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(job, tmp_path, monkeypatch)
    assert found["seconds"] == [0.002] * 3
    assert found["note"].startswith("loaded in 250 ms, again in 40 ms; no plan: ")  # plans are read by a Mac's library
    with np.load(job["outputs"]) as outputs:
        np.testing.assert_array_equal(outputs["arr_0"], ANSWER)
    asked = (tmp_path / "xcodebuild.txt").read_text()
    assert "DEVELOPMENT_TEAM=T3AM" in asked
    assert "platform=iOS,id=U1" in asked
    methods = (tmp_path / "methods.txt").read_text().splitlines()
    assert methods.count("MLModelService.Load") == 3  # the benchmarker's two, and one for the answers
    assert (
        methods.count("MLModelService.Prediction") == 1 + 1 + 3
    )  # the answers, a call to warm up, those that are timed


# What goes wrong: (what is asked otherwise, how the phone behaves, what is said).
FAILURES = {
    "no device of that name": (
        {"device": "Bert's"}, {}, "Xcode knows no such device; it knows Anna's iPhone (connected), iPad (disconnected)"
    ),
    "no device": ({}, {"devices": {}}, "Xcode knows no such device; it knows none"),
    "two of that name": (
        {}, {"devices": {"U1": CONNECTED["U1"], "U2": CONNECTED["U1"]}},
        "2 have that name: give an identifier, U1 or U2",
    ),
    "it is not connected": (
        {"device": "U2"}, {}, "app is not built and launched there (The device cannot be used for model debugging."
    ),
    "Xcode fails to list": (
        {}, {"fails": {"list devices": "CoreDevice is off"}}, "cannot be asked for devices (CoreDevice is off)"
    ),
    "nothing signs": ({}, {"fails": {"build": "no team"}}, "coremltools' app is not built and launched there ("),
    "it is locked": (
        {}, {"fails": {"install app": "the device is locked"}}, "not built and launched there (the device is locked)"
    ),
    "the app refuses the model": (
        {}, {"refuses": "MLModelService.Load"}, "the package does not load there ([Error Code -1] out of room)"
    ),
    "the app fails at it": (
        {}, {"refuses": "MLModelService.Prediction"}, "it fails at running the model ([Error Code -1] out of room)"
    ),
    "it is lost": ({}, {"fails": {"copy to": "gone"}}, "the package does not load there (gone)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_what_goes_wrong_is_told(
    case: str, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, phone, said = FAILURES[case]
    found = measured({**job, **asked}, tmp_path, monkeypatch, **phone)
    assert found.keys() == {"reason"}
    assert said in found["reason"]
    assert "\n" not in found["reason"]


def test_without_xcode_the_row_says_so_and_the_others_stand(
    models_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "_RUNTIMES", {"torch eager": host._RUNTIMES["torch eager"]})
    model = [f"{models_file}:vit", "--input-size", "3x16x16", "--out", str(tmp_path / "out")]
    targets = ["--target", "host", "--target", "coreml-npu", "--device", "Anna's iPhone"]
    assert main(["compare", *model, *targets, "--json"]) == 0
    eager, row = json.loads(capsys.readouterr().out)["rows"]
    assert [row["runtime"], row["status"], row["latency_ms"]] == ["core ml on Anna's iPhone", "unavailable", None]
    assert (
        "Anna's iPhone: Xcode's tools cannot be asked for devices (The 'devicectl' command is required" in row["note"]
    )
    assert eager["status"] == "measured"


def test_a_phone_that_hangs_is_told_after_its_timeout(linear: Path, tmp_path: Path, monkeypatch) -> None:
    commands = xcode.install(tmp_path, devices=CONNECTED, hangs="list devices")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    given, phone = np.ones((1, 3), np.float32), on_phone.Phone("Anna's iPhone", None, 1.0)
    run = on_phone.run("linear", linear, [given], [ANSWER], phone)
    assert str(run.reason) == "Anna's iPhone did not answer within 1 s"


# What a phone leaves: (its answers, what the run then has).
MEASURED = {
    "the right answers": (ANSWER, None),
    "others": (ANSWER + 1, "linear on Anna's iPhone"),
}


@pytest.mark.parametrize("case", MEASURED)
def test_answers_are_held_to_the_model(case: str, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, refused = MEASURED[case]
    found = device_process.Measured((answers,), (0.002, 0.003), "loaded in 250 ms")
    monkeypatch.setattr(device_process, "measure", lambda *_: found)
    run = on_phone.run("linear", linear, [ANSWER], [ANSWER], on_phone.Phone("Anna's iPhone", None, 1.0))
    if refused is None:
        assert (run.reason, run.seconds, run.max_abs_error) == (None, (0.002, 0.003), 0.0)
        assert run.note == "timed by the device's own clock over 2 calls; loaded in 250 ms"
    else:
        assert refused in str(run.reason)
        assert run.seconds == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"device": " "}, "--device ' ' is no name"), ({"device": "X", "device_timeout": -1.0}, "--device-timeout -1.0")],
)
def test_what_is_no_phone(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_target("coreml-npu").configured(**options)


def test_a_process_that_ends_is_a_lost_connection(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"X: the connection ended \(false failed with status 1"):
        device_process.measure(["false"], "X", 10.0, {}, [])
