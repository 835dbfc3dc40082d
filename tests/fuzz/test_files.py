"""Damaged files end in one clear line or in the right result; what holds the cases in bounds is itself held to it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz.limits import Limits, confined

HELPERS = Path(__file__).parents[1] / "helpers"


def test_damaged_files_are_refused_or_read_right() -> None:
    """The command of `make fuzz`, on a few of its ten thousand."""
    kinds = ("safetensors", "pth", "pictures", "configuration")  # the others take long to begin with
    command = [sys.executable, "-m", "fuzz", "--cases", "100", *(word for kind in kinds for word in ("--kind", kind))]
    path = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases of seed 1" in done.stdout


@pytest.mark.parametrize(
    ("work", "patience", "told"),
    [
        (lambda: "right", 60, "right"),
        (lambda: time.sleep(60) or "", 1, "died: it hangs (SIGALRM)"),
        (lambda: spin(), 60, "died: it hangs (SIGXCPU)"),
        (lambda: str(len(bytes(1 << 31))), 60, "MemoryError"),
        (lambda: str(1 // 0), 60, "ZeroDivisionError"),
        (lambda: os.abort(), 60, "died: it crashes (SIGABRT)"),
        (lambda: os._exit(3), 60, "died: it leaves with 3"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_confined_and_told(work: object, patience: int, told: str) -> None:
    assert told in confined(work, Limits(seconds=1, patience=patience, memory=1 << 30))  # type: ignore[arg-type]


def spin() -> str:
    while True:
        pass
