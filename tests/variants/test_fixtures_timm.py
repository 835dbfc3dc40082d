"""The published modules against timm's own, with timm's weights loaded, in float64 to 1e-9."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.variants.additive import EfficientAdditiveAttention
from attnrewrite.variants.separable import SeparableSelfAttention
from attnrewrite.variants.xca import CrossCovarianceAttention


@dataclass(frozen=True)
class Case:
    """timm's class and its arguments, ours, the input's shape, and how timm's input is ours."""

    module: str
    name: str
    arguments: dict
    ours: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = True


CASES = [
    Case("swiftformer", "EfficientAdditiveAttention", {"in_dims": 32, "token_dim": 32},
         lambda: EfficientAdditiveAttention(32), (2, 32, 5, 6), tokens=False),
    Case("mobilevit", "LinearSelfAttention", {"embed_dim": 24}, lambda: SeparableSelfAttention(24), (2, 24, 4, 15)),
    Case("xcit", "XCA", {"dim": 32, "num_heads": 4, "qkv_bias": True},
         lambda: CrossCovarianceAttention(32, 4), (2, 21, 32)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_timm_weights_give_timm_outputs(case: Case) -> None:
    pytest.importorskip("timm", exc_type=ImportError) if import_torchvision() else pytest.skip("needs torchvision")
    torch.manual_seed(0)
    theirs = getattr(import_module(f"timm.models.{case.module}"), case.name)(**case.arguments).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    ours = case.ours().double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(case.shape, dtype=torch.float64)
    expected = theirs(x)
    given = ours(x) if case.tokens else as_image(ours(x.flatten(2).transpose(1, 2)), case.shape)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-9)


def as_image(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tokens.transpose(1, 2).reshape(shape)
