"""Calibration elsewhere than on the processor, as on a GPU: the same to rounding, and operands never meet across."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from second_device import built

HELPERS = Path(__file__).parents[1] / "helpers"
CALIBRATED = HELPERS / "second_device" / "calibrated.py"
CASES = ("pre-norm:l1", "windows:masked", "convolutions:additive")

USED = f"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, {str(HELPERS)!r})
from second_device import use

second = use(Path(sys.argv[1]))
"""

LEAVE = """
import os

os._exit(0)  # as the process ends, torch's thread for the device may be left without what it runs on, and abort
"""

ACROSS = """
torch.cat([torch.ones(2, device=second), torch.ones(2)])
"""

PLACED = """
from attnrewrite.calibration.processes import placed
from attnrewrite.frontends.capture import capture


class Constants(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(12.0).reshape(3, 4)  # neither parameter nor buffer

    def forward(self, x):
        kept = torch.ones(len(x), 4).to(torch.device("cpu"), torch.bool)
        return torch.where(kept[:, None], x + self.table, torch.zeros(3, 4))


x = torch.randn(2, 3, 4)
module = capture("constants", Constants(), (x,)).module
with placed(second, module):
    there = module(x.to(second))
    assert there.device == torch.device(second)
assert torch.equal(there.cpu(), module(x))
"""

METERED = """
from attnrewrite.calibration.room import peak_memory_of

peaks = []
for device in ("cpu", second):
    x = torch.randn(1 << 18).to(device).requires_grad_()
    peaks.append(peak_memory_of(lambda: torch.autograd.grad(x.exp().exp().exp().sum(), x)))
assert peaks[0] == peaks[1] > 3 * 4 * len(x), peaks
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = built(tmp_path_factory.mktemp("device"))
    return pytest.skip("there is no g++ on Linux here") if found is None else found


def run(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=600)


def test_calibration_on_another_device_gives_the_same(library: Path) -> None:
    done = run(str(CALIBRATED), str(library), *CASES)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f"{kind}:{form}" for kind, form, *_ in found] == list(CASES)
    for *_, wanted, errors in found:
        copied, fitted, *trained = errors
        assert [copied, fitted] == pytest.approx(wanted[:2], rel=1e-3)
        assert trained[-1] <= fitted * 1.001  # trained in bfloat16, which is kept where it helps


@pytest.mark.parametrize("code", [PLACED, METERED], ids=["constants go where their graph goes", "memory is counted"])
def test_there_as_on_the_processor(code: str, library: Path) -> None:
    done = run("-c", USED + code + LEAVE, str(library))
    assert done.returncode == 0, done.stderr[-2000:]


def test_operands_of_two_devices_are_refused(library: Path) -> None:
    done = run("-c", USED + ACROSS, str(library))
    assert "aten::cat has operands on the processor and on the second device" in done.stderr
