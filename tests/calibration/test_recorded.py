"""Steps that are recorded: each is taken once, with what it was given, whether it is replayed or not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from searches import first_site, samples
from torch import Tensor

from attnrewrite.calibration import descent
from attnrewrite.calibration.recorded import BEFORE, Recorded, cuda_graph, recorder_for

SHAPES = [(4, 3)] * (BEFORE + 2) + [(2, 3)] + [(4, 3)] * 2  # the last batch of a pass over images is shorter


class Recorder:
    """Records on the processor: the call is made again. Counts what was recorded and what replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


class Sums:
    """A step that keeps what it was given."""

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def __call__(self, one: Tensor, other: Tensor) -> None:
        self.taken.append(one + other)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape[:1], generator=generator)[:, None])
        for shape in SHAPES
    ]


def test_every_step_is_taken_once_with_its_own_tensors() -> None:
    sums, recorder = Sums(), Recorder()
    step = Recorded(sums, recorder)
    for one, other in pairs():
        step(one, other)
    assert (recorder.recorded, recorder.replayed) == (1, len(SHAPES) - BEFORE - 1)  # the shorter one is not replayed
    assert len(sums.taken) == len(SHAPES)
    assert all(torch.equal(taken, one + other) for taken, (one, other) in zip(sums.taken, pairs(), strict=True))


def test_what_cannot_be_recorded_is_taken_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(call: Callable[[], Any]) -> Callable[[], Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    sums = Sums()
    step = Recorded(sums, refuse)
    with caplog.at_level(logging.INFO, "attnrewrite"):
        for one, other in pairs():
            step(one, other)
    assert len(sums.taken) == len(SHAPES)
    assert caplog.text.count("cannot be recorded") == 1


@pytest.mark.parametrize("name", ["l1", "mobile", "separable", "additive", "masked"])
def test_a_recorded_search_ends_in_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    plain, recorded = (found_by(name, each, "cpu", monkeypatch) for each in (None, recorder))
    assert recorder.recorded == 1
    assert recorder.replayed > BEFORE
    assert torch.equal(plain, recorded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", ["l1", "mobile", "separable", "additive", "masked"])
def test_a_search_that_a_gpu_replays_ends_in_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = (found_by(name, each, "cuda", monkeypatch) for each in (None, cuda_graph))
    assert torch.equal(plain, recorded)


def found_by(name: str, recorder: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The weights that a search ends in."""
    monkeypatch.setattr(descent, "recorder_for", lambda _: recorder)
    site, teacher = first_site(name)
    (given,) = samples(site, teacher)
    assert descent.search(site.to(device), [given.rows(slice(300)).to(device)], 300) is None
    return torch.cat([parameter.detach().flatten() for parameter in descent.searched(site)])


def test_a_processor_records_nothing() -> None:
    assert recorder_for(torch.device("cpu")) is None
    assert recorder_for(torch.device("cuda:1")) is cuda_graph
