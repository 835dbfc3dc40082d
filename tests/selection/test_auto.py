"""Conversions whose variants were selected: what stands where, what is written, what an interruption leaves."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vits import INPUTS, encoder

import attnrewrite as ar
from attnrewrite.calibration import fit
from attnrewrite.calibration.workplace import Workplace
from attnrewrite.cli.main import main
from attnrewrite.errors import CheckFailedError, InputError, NothingMatchedError, Refusal
from attnrewrite.evaluation.latency import Latency
from attnrewrite.pages.selection import page
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.plan import Plan
from attnrewrite.selection import measurements
from attnrewrite.selection.costs import WHOLE, Costs, Timer, priced
from attnrewrite.selection.knapsack import Table
from attnrewrite.selection.problem import described
from attnrewrite.selection.search import Losing, Step
from attnrewrite.selection.trials import Trial
from attnrewrite.targets.base import Availability, Pricing, get_target
from attnrewrite.targets.devices.apple_npu import CoreMLNpu
from attnrewrite.variants.base import Variant

COUNT = 160
FEW = ["l1", "polynomial:rank=2"]


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(COUNT, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def labelled(images: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Every image with the class that the original gives it."""
    model = encoder().eval()
    with torch.no_grad():
        return list(zip(images, model(images).argmax(1).tolist(), strict=True))


@pytest.fixture(scope="module")
def dropped(labelled: list) -> ar.Conversion:
    model, inputs = encoder(), INPUTS
    return ar.convert(model, inputs, variant="auto", max_drop=8.0, candidates=FEW, calibration=labelled)


def test_a_budget_on_the_drop_is_held_and_reported(dropped: ar.Conversion) -> None:
    told = dropped.report["selection"]
    assert (dropped.report["variant"], told["max_drop"], told["candidates"]) == ("auto", 8.0, FEW)
    assert told["measure"].startswith("top-1 points")
    assert told["cost"]["status"] == "estimated"
    assert told["promise"]["bound"] <= 8.0
    assert told["promise"]["images"] == COUNT
    measured = [each for each in told["frontier"] if each["kind"] == "measured"]
    assert [each["chosen"] for each in measured].count(True) == 1
    assert all(each["holds"] == (each["bound"] <= 8.0) for each in measured)
    assert len([each for each in told["frontier"] if each["kind"] == "predicted"]) > 1
    standing = {site["id"]: site["variant"] for site in dropped.report["sites"]}
    assert {site: name.split(":")[0] for site, name in told["promise"]["sites"].items()} == standing
    assert [p.site for p in dropped.plan.placements] == [site for site, name in standing.items() if name != "softmax"]
    for site in dropped.report["sites"]:
        if site["variant"] == "softmax":
            assert "stays as it is: the budget is better spent elsewhere (closest there:" in site["note"]
        else:
            assert site["identity_error"] <= 1e-5
            assert site["float64_error"] <= 1e-3


def test_what_is_chosen_is_fitted_as_it_was_measured(labelled: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """To each image once, where a form that is asked for by name is fitted to each several times."""
    times: list[int] = []
    own = Workplace.of
    monkeypatch.setattr(Workplace, "of", lambda *args: times.append(args[3].times) or own(*args))
    ar.convert(encoder(), INPUTS, variant="auto", max_drop=8.0, candidates=["l1"], calibration=labelled)
    assert set(times) == {1}
    times.clear()
    ar.convert(encoder(), INPUTS, variant="l1", calibration=labelled)
    assert times == [fit.MOST_TIMES]


def test_without_labels_the_budget_is_in_points_of_agreement(images: torch.Tensor) -> None:
    model, inputs = encoder(), INPUTS
    done = ar.convert(model, inputs, variant="auto", max_drop=10.0, candidates=FEW, calibration=images)
    promise = done.report["selection"]["promise"]
    assert promise["measure"].startswith("points of agreement")
    assert (promise["counted"], promise["points"]) == (None, pytest.approx(100 - promise["agreement"]))


def test_a_budget_on_an_unmeasured_target_is_estimated_and_says_so(labelled: list) -> None:
    model, inputs = encoder(), INPUTS
    how: dict[str, Any] = {"variant": "auto", "target": "gpu", "candidates": FEW, "calibration": labelled}
    done = ar.convert(model, inputs, max_latency=0.98, **how)
    told = done.report["selection"]
    assert (told["cost"]["status"], told["cost"]["unit"]) == ("estimated", "multiply-adds")
    assert told["cost"]["how"].endswith("target 'gpu' has no model of its device's costs")
    assert told["promise"]["timed_ratio"] <= 0.98
    with pytest.raises(CheckFailedError, match=r"no choice of candidates brings Encoder down to 0.2 of its cost"):
        ar.convert(model, inputs, max_latency=0.2, **how)


def test_a_target_with_a_model_of_its_device_prices_candidates_by_it(
    labelled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def price(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
        return 1.0 if "l1" in str(module).lower() else 5.0

    pricing = Pricing("estimated time", "the estimate of coreml-npu", price)
    monkeypatch.setattr(CoreMLNpu, "pricing", lambda self: pricing)
    monkeypatch.setattr(CoreMLNpu, "availability", lambda self: Availability(None, Refusal("far", "it is elsewhere")))
    how: dict[str, Any] = {"variant": "auto", "target": "coreml-npu", "candidates": ["l1"], "calibration": labelled}
    done = ar.convert(encoder(), INPUTS, max_drop=99.0, **how)
    told = done.report["selection"]["cost"]
    assert (told["status"], told["unit"], told["original"]) == ("estimated", "estimated time", 5.0)
    assert told["how"] == "the estimate of coreml-npu, each site's module by itself; it is elsewhere"


def test_a_target_that_is_emulated_prices_candidates_by_instructions(
    labelled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(pricing := get_target("arm-cpu").pricing(), Refusal):
        pytest.skip(pricing.sentence)
    found: list[Costs] = []
    monkeypatch.setattr(measurements, "priced", lambda *given: found.append(priced(*given)) or found[-1])
    how: dict[str, Any] = {"variant": "auto", "target": "arm-cpu", "candidates": ["l1"], "calibration": labelled}
    with pytest.raises(NothingMatchedError, match="softmax everywhere suits the budget best"):
        ar.convert(encoder(), INPUTS, max_drop=99.0, **how)  # 16 tokens are too few for l1 to pay
    (costs,) = found
    assert (costs.status, costs.unit) == ("estimated", "instructions")
    assert costs.how.startswith("instructions for cortex-a76 counted under qemu-aarch64, each site's module")
    assert all(10_000 < softmax < l1 < 2 * softmax for softmax, l1 in costs.sites.values())
    assert sum(softmax for softmax, _ in costs.sites.values()) < costs.whole


def clock(calls: Mapping[str, Callable[[], object]], **_: Any) -> dict[str, Latency]:
    """Stands in for `measure`: the whole original takes 10 ms, softmax at a site 3, anything else there 1."""
    took = {WHOLE: 10.0, "original": 10.0, "converted": 6.4}
    return {name: Latency(took.get(name, 3.0 if name.startswith("0 at") else 1.0), 0.0, 1) for name in calls}


def test_times_on_the_host_are_measured_and_sites_that_are_alike_share_them(
    labelled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(calls: Mapping[str, Callable[[], object]], **how: Any) -> dict[str, Latency]:
        asked.append(len(calls))
        return clock(calls, **how)

    monkeypatch.setattr("attnrewrite.selection.costs.measure", counted)
    eager = Timer("host", "torch", lambda module, inputs: lambda: module(*inputs))
    monkeypatch.setattr("attnrewrite.selection.measurements.timer_of", lambda target, threads: eager)
    model, inputs = encoder(), INPUTS
    how: dict[str, Any] = {"variant": "auto", "target": "host", "candidates": FEW, "calibration": labelled[:80]}
    done = ar.convert(model, inputs, max_latency=0.7, **how)
    told = done.report["selection"]
    assert asked[:2] == [1 + 3, 2]  # the original, softmax and two candidates for both sites; then the whole model
    assert (told["cost"]["status"], told["cost"]["original"]) == ("measured", 10.0)
    assert told["cost"]["how"].startswith("median times on host (torch)")
    assert told["promise"]["cost_ratio"] == pytest.approx(0.6)
    assert told["promise"]["timed_ratio"] == pytest.approx(0.64)
    with pytest.raises(CheckFailedError, match=r"down to 0.61 of its cost on host \(the lowest is 0.60"):
        ar.convert(model, inputs, max_latency=0.61, **how)


def test_a_mixed_plan_is_saved_applied_and_loaded_again(dropped: ar.Conversion, tmp_path: Path) -> None:
    folder = dropped.save(tmp_path / "out")
    assert json.loads((folder / "report.json").read_text())["selection"] == json.loads(
        json.dumps(dropped.report["selection"])
    )
    plan = Plan.load(folder)
    assert {p.site: described(p.variant) for p in plan.placements} == {
        p.site: described(p.variant) for p in dropped.plan.placements
    }
    again = FxRewrite(plan)(dropped.original)
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(again(x), dropped.module(x))
    assert "at most <b>" in (folder / "report.html").read_text()


def test_the_page_shows_every_choice_and_where_the_budget_ends(dropped: ar.Conversion) -> None:
    told = dropped.report["selection"]
    html = page(dropped.report)
    marks = sum(each["kind"] == "measured" for each in told["frontier"])
    assert html.count('class="held"') + html.count('class="broke"') == 2 * marks + 2  # drawn twice, and the legend
    assert html.count('class="budget"') == 2 + 1
    assert "estimated" in html
    assert "http" not in html


def test_an_interrupted_selection_goes_on_to_the_same_weights(
    dropped: ar.Conversion, labelled: list, tmp_path: Path
) -> None:
    model, inputs = encoder(), INPUTS
    how: dict[str, Any] = {"variant": "auto", "max_drop": 8.0, "candidates": FEW, "calibration": labelled}
    begun: list[str] = []

    def stop_while_fitting(what: str, done: int, total: int) -> None:
        begun.append(what)
        if what.startswith("fit for"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ar.convert(model, inputs, **how, state=tmp_path, progress=stop_while_fitting)
    assert "candidates" in begun
    begun.clear()
    again = ar.convert(model, inputs, **how, state=tmp_path, progress=lambda what, done, total: begun.append(what))
    assert "candidates" not in begun
    assert again.report["selection"] == dropped.report["selection"]
    assert all(torch.equal(a, b) for a, b in zip(again.module.parameters(), dropped.module.parameters(), strict=True))


def test_a_choice_that_loses_too_much_on_one_fold_is_not_fitted_on_the_other(
    labelled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontier tells on how many images it was measured; what holds is measured on all."""
    fitted = []

    def outputs(
        self: measurements.CrossFit, standing: Mapping[str, Variant]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        right = torch.nn.functional.one_hot(torch.from_numpy(self.images.images.y), 5) * 9.0
        given_up = all(variant.name != "softmax" for variant in standing.values())
        for fold in (np.arange(0, COUNT, 2), np.arange(1, COUNT, 2)):
            fitted.append((given_up, int(fold[0])))
            yield fold, (right[fold].flip(1) if given_up else right[fold]).double()

    monkeypatch.setattr(measurements.CrossFit, "outputs", outputs)
    done = ar.convert(
        encoder().eval(), INPUTS, variant="auto", max_drop=8.0, candidates=FEW, calibration=labelled
    ).report["selection"]
    measured = [each for each in done["frontier"] if each["kind"] == "measured"]
    assert {each["images"] for each in measured if each["holds"]} == {COUNT}
    assert {each["images"] for each in measured if not each["holds"]} == {COUNT // 2}
    assert (True, 0) in fitted
    assert (True, 1) not in fitted


def test_what_cannot_be_promised_or_found_says_so(images: torch.Tensor, labelled: list) -> None:
    model, inputs = encoder(), INPUTS
    auto: dict[str, Any] = {"variant": "auto", "candidates": ["l1"]}
    with pytest.raises(InputError, match=r"80 images cannot tell a loss of 0.5 points .* give about 8\d\d "):
        ar.convert(model, inputs, **auto, max_drop=0.5, calibration=images[:80])
    with pytest.raises(InputError, match="a label 99"):
        ar.convert(model, inputs, **auto, max_drop=9.0, calibration=[(images[0], 99), *labelled])
    with pytest.raises(NothingMatchedError, match=r"no site of Encoder is to be replaced .*\(replacing 1 of 1"):
        ar.convert(model, inputs, variant="auto", candidates=["l1"], max_drop=2.0, keep=["site1"], calibration=labelled)


def test_where_no_candidate_can_stand_the_budget_is_not_to_blame(
    labelled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = measurements.trials
    broken: set[str] = set()

    def trials(*given: Any) -> Iterator[Trial]:
        return (replace(each, output=None, reason="it fell") if each.site in broken else each for each in own(*given))

    monkeypatch.setattr(measurements, "trials", trials)
    how: dict[str, Any] = {"variant": "auto", "candidates": FEW, "calibration": labelled[:80]}
    broken.add("site1")
    done = ar.convert(encoder(), INPUTS, max_drop=60.0, **how)
    notes = {site["id"]: site["note"] for site in done.report["sites"]}
    assert notes["site1"].endswith("no candidate can stand there (l1: it fell)")
    broken.add("site0")
    budgets: list[dict[str, Any]] = [{"max_drop": 60.0}, {"max_latency": 0.5, "target": "gpu"}]
    for budget in budgets:
        with pytest.raises(NothingMatchedError) as raised:
            ar.convert(encoder(), INPUTS, **budget, **how)
        assert str(raised.value) == (
            "no candidate can stand at any site of Encoder (l1 at site0: it fell): give other candidates (--candidates)"
        )


def test_a_candidate_that_has_no_price_can_not_stand() -> None:
    table = Table(("a", "b"), ((0.0, math.inf, 0.1), (0.0, 0.2, 0.1)), ((0.0, -1.0, math.inf), (0.0, -1.0, math.inf)))
    assert [table.possible(site) for site in range(2)] == [[], [1]]


def test_the_command_line_selects_and_writes_the_page(
    capsys: pytest.CaptureFixture[str], models_file: Path, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=x)
    size = ["--input-size", "3x16x16", "--mean", "0.5", "--std", "0.25"]
    command = ["convert", f"{models_file}:vit", *size, "--variant", "auto", "--calibrate", str(tmp_path / "images.npz")]
    command += ["--max-drop", "40", "--candidates", "l1", "--candidates", "polynomial:rank=2"]
    assert main([*command, "--out", str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == {"site0": "auto", "site1": "auto"}
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "of 2 sites of vit are replaced" in shown
    assert "points of agreement with the original (the images have no labels); at most" in shown
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.json", "report.html", "plan.json", "model.pt2"} <= names
    assert not (tmp_path / ".out.calibration").exists()
    assert main(["convert", f"{models_file}:vit", *size, "--max-drop", "1", "--out", str(tmp_path / "other")]) == 2
    assert "--max-drop is for --variant auto" in capsys.readouterr().err


def test_processes_of_torchrun_choose_alike_and_the_first_one_writes(
    models_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=x)
    command = ["convert", f"{models_file}:vit", "--input-size", "3x16x16", "--variant", "auto"]
    command += ["--mean", "0.5", "--std", "0.25", "--calibrate", str(tmp_path / "images.npz"), "--max-drop", "40"]
    command += ["--candidates", "l1", "--candidates", "polynomial:rank=2", "--steps", "2", "--json", "--out"]
    assert main([*command, str(tmp_path / "alone")]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "alone")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "attnrewrite", *command, str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["out"] == str(tmp_path / "two")  # one process prints
    plans = {name: Plan.load(tmp_path / name).placements for name in ("alone", "two")}
    chosen = [[(placement.site, described(placement.variant)) for placement in plan] for plan in plans.values()]
    assert chosen[0] == chosen[1]
    assert {path.name for path in tmp_path.iterdir()} == {"images.npz", *plans}


def test_only_the_first_process_removes_the_checkpoints(
    models_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / ".out.calibration"
    checkpoints.mkdir()
    command = ["convert", f"{models_file}:vit", "--input-size", "3x16x16", "--variant", "l1", "--out"]
    for rank, left in (("1", True), ("0", False)):
        monkeypatch.setenv("RANK", rank)
        assert main([*command, str(tmp_path / "out")]) == 0
        assert checkpoints.exists() is left


def test_an_onnx_file_gets_a_mixed_plan_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx_ir", reason="needs onnx_ir")
    import onnx_ir as ir
    from onnx_runs import exported_vit, run
    from tiny_vits import IMAGE, Vit

    def one_of_each(table: Table, budget: float, expected: float, losing: Losing, *of: object) -> list[Step]:
        return [Step((1, 2), 0.0, losing((1, 2)), True)]

    monkeypatch.setattr("attnrewrite.selection.select.within_drop", one_of_each)
    torch.manual_seed(0)
    ir.save(exported_vit(Vit().eval()), tmp_path / "vit.onnx")
    images = torch.rand(24, *IMAGE[1:])
    done = ar.convert(tmp_path / "vit.onnx", variant="auto", max_drop=90, candidates=FEW, calibration=images)
    assert [described(p.variant) for p in done.plan.placements] == FEW
    folder = done.save(tmp_path / "out")
    with torch.no_grad():
        wanted = done.module(images[:3])
    found = run(ir.load(folder / "model.onnx"), images[:3].numpy())[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
