"""Which device a process computes on."""

import pytest
import torch

from attnrewrite.calibration.processes import joined_processes
from attnrewrite.errors import InputError


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_process_alone_takes_the_first_gpu() -> None:
    assert joined_processes().device == "cuda:0"


def test_more_processes_than_gpus_are_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"2 GPUs.*--nproc-per-node 2"):
        joined_processes()
