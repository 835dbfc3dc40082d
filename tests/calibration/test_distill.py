"""The stages with gradients: they help, never hurt, draw the same images for a seed, and go on after a kill."""

import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fits import calibration
from torch import Tensor

from attnrewrite.calibration import train
from attnrewrite.calibration.distill import Distillation, logit_loss, relative_loss, with_values
from attnrewrite.calibration.points import fit_points
from attnrewrite.calibration.reconstruct import Reconstruction
from attnrewrite.calibration.resume import State, resume_key
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.calibration.train import Schedule, draw
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.augment import moved
from attnrewrite.images.pool import Pool, first_tensor
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.request import Execution
from attnrewrite.variants.registry import get_variant

HELPERS = Path(__file__).parents[1] / "helpers"
SMALL = 32  # images of a step


def tensors(given: StageInput) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in given.student.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_reconstruction_brings_the_student_closer() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    before = distance(given)
    Reconstruction(steps=20).run(given)
    assert distance(given).loss < 0.9 * before.loss


def test_distillation_keeps_its_best_and_says_when() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    before = distance(given)
    (note,) = Distillation(steps=40, rate=2e-3, every=10).run(given).notes
    assert distance(given).loss < 0.9 * before.loss
    assert note.startswith("best after ")


@pytest.mark.parametrize("stage", [Reconstruction(steps=2, rate=50.0), Distillation(steps=2, rate=50.0, every=1)])
def test_a_stage_never_ends_worse_than_it_began(stage: Reconstruction | Distillation) -> None:
    """From the teacher itself, steps this large can only lead away: the student comes back to the bit."""
    given = calibration("pre-norm", get_variant("softmax"))
    before = tensors(given)
    stage.run(given)
    assert same(tensors(given), before)


@pytest.mark.parametrize("stage", [Reconstruction(steps=1), Distillation(steps=1)])
def test_a_loss_that_is_not_finite_names_where(stage: Reconstruction | Distillation) -> None:
    given = calibration("pre-norm", get_variant("l1"))
    with torch.no_grad():
        rewritten_sites(given.student)["site1"].value.weight.fill_(float("nan"))
    with pytest.raises(CheckFailedError, match=f"{stage.name}: the loss at site1 "):
        stage.run(given)


@pytest.mark.parametrize("stage", [Reconstruction(steps=6, blocks=1), Distillation(steps=6)])
def test_the_result_is_the_same_whatever_memory_has_room_for(
    stage: Reconstruction | Distillation, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    found = []
    for size in (16, 1):

        def fewer(pool: Pool, *_: object, size: int = size) -> Pool:
            return replace(pool, batch_size=size)

        monkeypatch.setattr("attnrewrite.calibration.workplace.sized", fewer)
        monkeypatch.setattr("attnrewrite.calibration.train.sized", fewer)
        given = calibration("windows", get_variant("hedgehog"))  # no weight of which is without effect
        stage.run(given)
        found.append(tensors(given))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=1e-3)


def test_logits_are_held_to_the_divergence_at_a_high_temperature() -> None:
    found, wanted = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    temperature = 1e4  # what is left of it is of the order of its inverse
    own, teachers = (found / temperature).log_softmax(1), (wanted / temperature).log_softmax(1)
    divergence = F.kl_div(own, teachers, reduction="batchmean", log_target=True) * temperature**2
    torch.testing.assert_close(logit_loss(found, wanted), divergence, rtol=1e-3, atol=0)
    torch.testing.assert_close(logit_loss(found + 3, wanted), logit_loss(found, wanted))


def test_an_output_that_is_no_logits_is_held_to_its_values() -> None:
    found, wanted = torch.randn(2, 7, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(relative_loss(found, wanted, energy=2.0), F.mse_loss(found, wanted) / 2)


def test_the_values_beside_the_output_are_the_graphs_own() -> None:
    given = calibration("parallel", get_variant("l1"))
    streams = [point.stream.name for point in fit_points(given.student)]
    (images,) = given.images.batch(0)
    output, values = with_values(given.student, streams)(images)
    assert torch.equal(first_tensor(output), given.student(images))
    assert [value.shape for value in values] == [(16, 36, 8)] * 4


def test_a_batch_is_drawn_from_the_seed_and_the_step_alone() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    assert len(draw(given, 3)) == 256
    assert torch.equal(draw(given, 3), draw(given, 3))
    assert not torch.equal(draw(given, 3), draw(given, 4))
    assert not torch.equal(draw(given, 3), draw(replace(given, execution=Execution(seed=1)), 3))


def test_where_a_batch_is_fixed_every_process_has_whole_ones() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    fixed = replace(given.images, batch_size=5, filled=True)
    shares = []
    for rank in range(3):
        own = replace(given, images=fixed, processes=replace(given.processes, rank=rank, size=3))
        shares.append(len(own.processes.part(draw(own, 0))))
    assert shares == [85, 85, 85]


def test_pictures_are_moved_but_not_made_up() -> None:
    generator = torch.Generator().manual_seed(0)
    ramp = torch.arange(16.0).reshape(1, 1, 1, 16).expand(64, 3, 16, 16)
    shifted = moved(ramp, generator)
    assert shifted.shape == ramp.shape
    assert (shifted.diff(dim=3).abs() <= 1).all()
    assert shifted.unique().tolist() == ramp.unique().tolist()


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(20, 1.0)
    assert [schedule.rate_at(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert schedule.rate_at(11) == pytest.approx(0.5)
    assert 0 < schedule.rate_at(19) < 0.01


class Killed(Exception):
    pass


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not follow from how many images a step has."""
    monkeypatch.setattr(train, "IMAGES", SMALL)


@cache
def uninterrupted(stage: Reconstruction | Distillation) -> dict[str, Tensor]:
    whole = calibration("pre-norm", get_variant("l1"))
    stage.run(whole)
    return tensors(whole)


@pytest.mark.parametrize("at", [3, 21, 23])
@pytest.mark.parametrize("stage", [Reconstruction(steps=20, blocks=1), Distillation(steps=24, every=10)])
@pytest.mark.usefixtures("small_batches")
def test_interrupted_anywhere_it_ends_in_the_same_bits(
    stage: Reconstruction | Distillation, at: int, tmp_path: Path
) -> None:
    done: list[int] = []

    def stop(what: str, step: int, total: int) -> None:
        if what == stage.name and step == at:
            raise Killed

    def count(what: str, step: int, total: int) -> None:
        if what == stage.name:
            done.append(step)

    again = calibration("pre-norm", get_variant("l1"))
    with pytest.raises(Killed):
        stage.run(replace(again, execution=Execution(progress=stop, state=tmp_path)))
    again = calibration("pre-norm", get_variant("l1"))
    stage.run(replace(again, execution=Execution(progress=count, state=tmp_path)))
    assert same(uninterrupted(stage), tensors(again))
    assert done[0] == at // 20 * 20 + 1


@pytest.mark.usefixtures("small_batches")
def test_what_was_not_trained_is_told_behind_an_interruption(tmp_path: Path) -> None:
    stage = Reconstruction(steps=3, blocks=1, rate=100.0)  # which makes every block worse

    def stop(what: str, step: int, total: int) -> None:
        if step == 4:
            raise Killed

    given = [calibration("pre-norm", get_variant("l1")) for _ in range(3)]
    whole = stage.run(given[0])
    assert [note.split(":")[0] for note in whole.notes] == 2 * ["not trained, as that made it worse"]
    with pytest.raises(Killed):
        stage.run(replace(given[1], execution=Execution(progress=stop, state=tmp_path)))
    again = stage.run(replace(given[2], execution=Execution(state=tmp_path)))
    assert again.notes == whole.notes


@pytest.mark.parametrize("changed", ["images", "held_out"])
def test_an_interrupted_run_is_not_taken_up_with_other_images(changed: str, tmp_path: Path) -> None:
    stage, steps = Reconstruction(steps=20), []

    def count(what: str, step: int, total: int) -> None:
        steps.append(step)

    stage.run(replace(calibration("pre-norm", get_variant("l1")), execution=Execution(state=tmp_path)))
    again = calibration("pre-norm", get_variant("l1"))
    pool = getattr(again, changed)
    others = {changed: pool.take(np.roll(np.arange(len(pool.images)), 1))}
    stage.run(replace(again, execution=Execution(progress=count, state=tmp_path), **others))
    assert steps[0] == 1


def test_a_checkpoint_of_another_version_is_not_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resume_key([torch.ones(3)], "rate")
    assert resume_key([torch.ones(3)], "rate") == before
    monkeypatch.setattr("attnrewrite.__version__", "another")
    assert resume_key([torch.ones(3)], "rate") != before


def test_a_checkpoint_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    state, weights = State(tmp_path), [torch.ones(3)]
    state.save("a stage", resume_key(weights, "rate", 1), {"step": 1})
    assert state.load("a stage", resume_key(weights, "rate", 1)) == {"step": 1}
    for other in (resume_key(weights, "rate", 2), resume_key([torch.zeros(3)], "rate", 1)):
        assert state.load("a stage", other) is None
    assert state.load("another", resume_key(weights)) is None
    assert State(None).load("a stage", "key") is None


SCRIPT = """
import os, signal, sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {helpers!r})
from fits import calibration
from attnrewrite.calibration import train
from attnrewrite.calibration.processes import joined_processes
from attnrewrite.calibration.stages import calibrate
from attnrewrite.request import Execution
from attnrewrite.variants.registry import get_variant
torch.set_num_threads(1)
train.IMAGES = {images}
given = calibration("pre-norm", get_variant("l1"))
def progress(what, done, total):
    if (what, done) == ("distillation", int(os.environ.get("KILL_AT", "-1"))):
        os.kill(os.getpid(), signal.SIGKILL)
execution = Execution(progress=progress, state=Path(os.environ["STATE"]))
given = replace(given, execution=execution, processes=joined_processes())
reports = calibrate(given, steps=24)
rank = os.environ.get("RANK", "0")
torch.save((given.student.state_dict(), [r.kl_after for r in reports]), os.environ["OUT"] + rank)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(helpers=str(HELPERS), images=SMALL))
    return file


def names(script: Path, name: str, kill_at: int = -1) -> dict[str, str]:
    """What SCRIPT reads in its environment; what it saves is called `name` and the rank, beside it."""
    return {
        "STATE": str(script.with_name(f"{name}-state")),
        "OUT": str(script.with_name(name)),
        "KILL_AT": str(kill_at),
    }


def launch(script: Path, name: str, *prefix: str, kill_at: int = -1) -> subprocess.CompletedProcess[str]:
    """Run SCRIPT in a process of its own, or those of `prefix`."""
    environment = {**os.environ, **names(script, name, kill_at), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *prefix, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_killed_and_started_again_or_shared_by_two_it_ends_the_same(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    """The same command after kill -9 gives the same bits; two processes give the same fit and an equal student."""
    assert launch(script, "killed", kill_at=22).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed0").exists()
    for started in ("whole", "killed"):
        with monkeypatch.context() as patch:
            for name, value in names(script, started).items():
                patch.setenv(name, value)
            runpy.run_path(str(script))
    done = launch(script, "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    (whole, losses), (killed, _) = (torch.load(tmp_path / name) for name in ("whole0", "killed0"))
    (one, shared), (other, _) = (torch.load(tmp_path / name) for name in ("two0", "two1"))
    assert same(whole, killed)
    assert same(one, other)
    copy, fit, *trained = zip(losses, shared, strict=True)
    assert copy[0] == copy[1]
    assert fit[0] == pytest.approx(fit[1], rel=1e-4)
    assert all(alone == pytest.approx(together, rel=0.2) for alone, together in trained)
