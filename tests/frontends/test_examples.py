"""What a model is run on: one image among several, where the first axis is a batch."""

import pytest
import torch
from tiny_vits import Attention
from torch import Tensor, nn

from attnrewrite.frontends.examples import one_image


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


class Joined(nn.Module):
    """Attention over tokens whose first axis is no batch: [N, C] -> [N, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.T, 1) @ x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.attention(x * other.sum())


class TwoImages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1)


# The model, its inputs' sizes, and those of what it is given one image of.
CASES: dict[str, tuple[nn.Module, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "images": (Attention(), [(3, 9, 32)], [(1, 9, 32)]),
    "one image": (Attention(), [(1, 9, 32)], [(1, 9, 32)]),
    "tokens alone": (Joined(), [(9, 16)], [(9, 16)]),
    "a number beside": (Scaled(), [(3, 9, 32), ()], [(1, 9, 32), ()]),
    "tokens by tokens beside": (Scaled(), [(3, 9, 32), (9, 9)], [(1, 9, 32), (9, 9)]),
    "what mixes its images beside": (Scaled(), [(3, 9, 32), (3, 3)], [(3, 9, 32), (3, 3)]),
    "a batch of its own": (TwoImages(), [(2, 9, 32)], [(2, 9, 32)]),
    "a number alone": (nn.Identity(), [()], [()]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_image_is_taken_where_the_first_axis_is_a_batch(case: str) -> None:
    model, sizes, wanted = CASES[case]
    found = one_image(model, tuple(drawn(*size) for size in sizes))
    assert [tuple(tensor.shape) for tensor in found] == wanted
