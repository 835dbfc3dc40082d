"""The published modules against the numbers of the original implementations, in float64, to 1e-9."""

import pathlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnrewrite.site import Grid
from attnrewrite.variants.additive import EfficientAdditiveAttention
from attnrewrite.variants.l1 import SimA
from attnrewrite.variants.masked import MaskedAttention, SoftMaskedForm, soft_masked_attention
from attnrewrite.variants.mobile import MobileAttention, Reading
from attnrewrite.variants.parts.tensors import merge_heads, split_heads
from attnrewrite.variants.separable import SeparableSelfAttention

FIXTURES = pathlib.Path(__file__).parents[3] / "shared" / "fixtures"
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


@pytest.mark.parametrize(
    ("name", "dim", "heads", "reading"),
    [
        ("mobile_code_N49_D64_H16", 64, 16, "code"),
        ("mobile_code_N196_D96_H24", 96, 24, "code"),
        ("mobile_paper_N49_D64_H16", 64, 16, "paper"),
    ],
)
def test_mobile_attention(name: str, dim: int, heads: int, reading: Reading) -> None:
    tensors, weights = load(name)
    assert_same(run(MobileAttention(dim, heads, reading), weights, tensors["x"]), tensors["out"])


def mait_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"qkv_w": "qkv.weight", "qkv_b": "qkv.bias", "proj_w": "proj.weight", "proj_b": "proj.bias"}
    return {ours: tensors[theirs] for theirs, ours in names.items()}


@pytest.mark.parametrize(("name", "side", "size"), [("mait_g7_R3_H4", 7, 3), ("mait_g14_R5_H4", 14, 5)])
def test_masked_attention_hard_and_soft(name: str, side: int, size: int) -> None:
    tensors, _ = load(name)
    masked = tuple(tensors["masked_heads"].nonzero().flatten().tolist())
    grid = Grid(side, side, prefix=1)
    hard = MaskedAttention(32, 4, grid, size, masked)
    assert_same(run(hard, mait_weights(tensors), tensors["x"]), tensors["out_hard_zero"])
    query, key, value = (split_heads(part, 4) for part in hard.qkv(tensors["x"]).chunk(3, dim=-1))
    alpha = tensors["alpha"].reshape(4, 1, 1)
    soft = soft_masked_attention(query, key, value, 8**-0.5, SoftMaskedForm(hard.form.mask, 4).dense.double(), alpha)
    assert_same(hard.proj(merge_heads(soft)), tensors["out_soft"])


def test_additive() -> None:
    tensors, weights = load("additive_N49_D64_t64_H1")
    weights = {name.lower(): value for name, value in weights.items()}
    assert_same(run(EfficientAdditiveAttention(64), weights, tensors["x"]), tensors["out"])


@pytest.mark.parametrize(("name", "dim"), [("separable_P1_N49_D64", 64), ("separable_P4_N49_D32", 32)])
def test_separable(name: str, dim: int) -> None:
    tensors, weights = load(name)
    weights = {name.replace(".block.conv", ""): value for name, value in weights.items()}
    assert_same(run(SeparableSelfAttention(dim), weights, tensors["x"]), tensors["out"])
