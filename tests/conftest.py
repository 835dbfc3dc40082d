"""What several tests start from: one thread, the folder of shared data, and a Python file of small models."""

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import quick_torch
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

MODELS = '''
import torch
from torch import nn


class Vit(nn.Module):
    """[B, 3, 16, 16] -> [B, 5]: 4 patches and a class token, two blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))[:, 0])


class Gated(nn.Module):
    """No attention: a softmax over branches only."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        pooled = self.conv(x).mean((2, 3))
        return self.head(pooled * self.gate(pooled).softmax(-1))


def vit():
    return Vit()


def gated():
    return Gated()


def failing():
    raise ValueError("no weights here")


def a_string():
    return "vit"


def needs(argument):
    return Vit()
'''


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept for the user is kept for these tests alone, by commands that they start, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def torchs_tables_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quick_torch.apply(patch)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What imports made lives to the end: the garbage collector need not look through it in every test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(7_000)  # tenfold: a trace makes and drops objects by the hundred thousand


def pytest_runtest_setup() -> None:
    """coremltools ends each conversion with a look through all that lives; here it looks at what is young."""
    if entry := sys.modules.get("coremltools.converters._converters_entry"):
        entry.gc = SimpleNamespace(collect=partial(gc.collect, 1))


@pytest.fixture(scope="session")
def shared() -> Path:
    """../shared, which holds trained checkpoints and images; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED


@pytest.fixture(scope="session")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to be given as file.py:factory; `vit` takes 3x16x16 and has 2 attention sites, `gated` has none."""
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path
