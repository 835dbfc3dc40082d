"""The published modules against the numbers of the original implementations, in float64, to 1e-9."""

import pathlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnrewrite.variants.l1 import SimA

FIXTURES = pathlib.Path(__file__).parents[2] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="needs ../shared/fixtures")


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A fixture's tensors, and its weights by the name that follows `w:`."""
    with np.load(FIXTURES / f"{name}.npz") as archive:
        tensors = {key: torch.from_numpy(archive[key]) for key in archive}
    weights = {key[2:]: value for key, value in tensors.items() if key.startswith("w:")}
    return tensors, weights


def run(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    module.double().load_state_dict(weights)
    return module(x)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", ["auto", "qk", "kv"])
@pytest.mark.parametrize(("name", "dim", "heads"), [("sima_N50_D64_H4", 64, 4), ("sima_N197_D96_H3", 96, 3)])
def test_sima(name: str, dim: int, heads: int, order: str) -> None:
    tensors, weights = load(name)
    assert_same(run(SimA(dim, heads, order), weights, tensors["x"]), tensors["out"])  # type: ignore[arg-type]
