"""Windows that lie side by side: a convolution of them is a linear layer of each."""

import pytest
import torch
import torch.nn.functional as F

from attnrewrite.passes.fx.resampling import patches

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.mark.parametrize("size", [(4,), (2, 3), (1, 1), (2, 3, 1), (2, 2, 2)], ids=str)
def test_they_are_what_the_convolution_multiplies(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(size))
    weight = torch.randn(5, 3, *size, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, *(each * count for each, count in zip(size, (3, 2, 4), strict=False)), dtype=torch.float64)
    axes = len(size)
    parts = patches(x, weight, size, (0,) * axes, (1,) * axes, 1)
    expected = CONVOLUTIONS[axes](x, weight, stride=size)
    torch.testing.assert_close(F.linear(parts, weight.flatten(1)).movedim(-1, 1), expected, rtol=0, atol=1e-12)


OTHERS = {
    "overlapping": ((1, 1), (0, 0), (1, 1), 1, 8),
    "padded": ((2, 2), (0, 1), (1, 1), 1, 8),
    "dilated": ((2, 2), (0, 0), (2, 1), 1, 8),
    "in groups": ((2, 2), (0, 0), (1, 1), 2, 8),
    "a column is left": ((2, 2), (0, 0), (1, 1), 1, 9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_there_are_none_otherwise(name: str) -> None:
    *how, wide = OTHERS[name]
    assert patches(torch.ones(1, 4, 8, wide), torch.ones(6, 4, 2, 2), *how) is None
