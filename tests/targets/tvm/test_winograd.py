"""Convolutions by Winograd's algorithm against float64 torch: tails of tiles, of channels and of vectors; which
convolutions it takes, and why not others.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, HOST, PROCESSORS, Shape, close, relax_module, scheduled, values, wide
from tvm import relax

from attnrewrite.targets.record import Decision
from attnrewrite.targets.tvm.schedules.cpu.winograd import rule
from attnrewrite.targets.tvm.schedules.cpu.winograd.rule import LARGE, SMALL, tiling
from attnrewrite.targets.tvm.schedules.cpu.winograd.transforms import Scheme
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, Profile

channels = st.integers(24, 70)
sides = st.integers(16, 41)
AVX, ARM, NARROW = PROCESSORS


def convolved(x: np.ndarray, weight: np.ndarray, padding: tuple[int, int, int, int], groups: int = 1) -> torch.Tensor:
    top, left, bottom, right = padding
    image, factors = (torch.from_numpy(array) for array in wide(x, weight))
    return torch.conv2d(torch.nn.functional.pad(image, (left, right, top, bottom)), factors, groups=groups)


@DRAWN
@given(
    batch=st.integers(1, 2), depth=channels, outer=channels, size=st.tuples(sides, sides),
    padding=st.sampled_from([(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 1, 0), (2, 0, 1, 2)]),
    scale=st.sampled_from([1e-18, 1.0, 1e15]), processor=st.sampled_from(PROCESSORS),
)  # fmt: skip
@example(1, 64, 48, (41, 30), (1, 1, 1, 1), 1.0, AVX)  # large tiles by several tasks, the last row of them cut
@example(1, 25, 70, (13, 16), (2, 0, 1, 2), 1.0, AVX)  # small ones, all in one task, made before
@example(1, 33, 37, (40, 40), (1, 1, 1, 1), 1e15, ARM)
@example(1, 30, 20, (18, 17), (0, 0, 0, 0), 1.0, NARROW)
def test_convolutions_with_what_follows(
    batch: int, depth: int, outer: int, size: Shape, padding: tuple[int, int, int, int], scale: float,
    processor: Profile,
) -> None:  # fmt: skip
    (x,), (weight, bias) = values((batch, depth, *size), scale=scale), values((outer, depth, 3, 3), (outer, 1, 1))
    expected = convolved(x, weight, padding)
    (residual,) = values(tuple(expected.shape), scale=scale)
    with patch.object(rule, "_cost", return_value=0.0):  # some of these sizes gain nothing
        rules, run = scheduled(
            [x, residual],
            lambda x, r, w, b: relax.op.nn.relu(
                relax.op.add(r, relax.op.add(relax.op.nn.conv2d(x, w, padding=padding), b))
            ),
            [weight, bias],
            processor,
        )
    assert rules == ["winograd"]
    close(run(), (expected + torch.from_numpy(bias) + torch.from_numpy(residual)).relu().numpy())


@pytest.mark.parametrize("size", [(12, 12), (32, 28)])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_channels_of_a_place_that_are_neighbours(size: Shape, before: bool, after: bool) -> None:
    """Tokens on either side, and arithmetic on the way in."""
    shape = (1, *size, 24) if before else (1, 24, *size)
    (x,), (weight,) = values(shape), values((40, 24, 3, 3))

    def body(x: object, w: object) -> object:
        image = relax.op.permute_dims(x, (0, 3, 1, 2)) if before else x
        made = relax.op.nn.conv2d(relax.op.abs(image), w, padding=1)
        return relax.op.permute_dims(made, (0, 2, 3, 1)) if after else made

    rules, run = scheduled([x], body, [weight])
    assert rules == ["winograd"]
    expected = convolved(np.abs(x.transpose(0, 3, 1, 2) if before else x), weight, (1, 1, 1, 1)).numpy()
    close(run(), expected.transpose(0, 2, 3, 1) if after else expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [(14, 15), (30, 28)])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_are_images_of_their_own(batch: int, size: Shape, biased: bool) -> None:
    x, residual = values((batch, 48, *size), (batch, 96, *size))
    weight, bias = values((96, 24, 3, 3), (96, 1, 1))

    def body(x: object, r: object, w: object, b: object) -> object:
        made = relax.op.add(r, relax.op.nn.conv2d(x, w, padding=1, groups=2))
        return relax.op.add(made, b) if biased else made

    rules, run = scheduled([x, residual], body, [weight, bias])
    # A bias of all channels, the same for each image, is no tensor of images that groups are.
    assert rules == (["convolution"] if biased and batch > 1 else ["winograd"])
    expected = convolved(x, weight, (1, 1, 1, 1), 2).numpy() + residual
    close(run(), expected + bias if biased else expected)


def test_small_tiles_are_exact_where_halves_are() -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(-8, 9, (1, 16, 10, 10)).astype(np.float32)
    weight = 4 * generator.integers(-8, 9, (16, 16, 3, 3)).astype(np.float32)
    rules, run = scheduled([x], lambda x, w: relax.op.nn.conv2d(x, w, padding=1), [weight])
    assert rules == ["winograd"]
    np.testing.assert_array_equal(run(), convolved(x, weight, (1, 1, 1, 1)).numpy())


@pytest.mark.parametrize(
    ("out", "scheme", "blocks", "tiles"),
    [
        ((1, 64, 56, 56), LARGE, 7, 28),
        ((1, 64, 28, 28), LARGE, 4, 14),
        ((1, 64, 14, 14), SMALL, 1, 49),
        ((4, 64, 14, 14), LARGE, 1, 16),
        ((1, 64, 7, 7), SMALL, 1, 16),
        ((1, 64, 1, 90), SMALL, 1, 45),
    ],
)
def test_large_tiles_are_for_images_with_enough_of_them(out: Shape, scheme: Scheme, blocks: int, tiles: int) -> None:
    found, grid = tiling(out, 64, HOST)
    assert (found, grid.blocks, grid.tiles) == (scheme, blocks, tiles)


def decided(image: Shape, weight: Shape, processor: Profile = HOST, **options: int) -> Decision:
    (factors,) = values(weight)
    module = relax_module([image], lambda x, w: relax.op.nn.conv2d(x, w, **options), [factors])
    (found,) = pipeline.schedule(module, processor).decisions
    return found


@pytest.mark.parametrize(
    ("image", "weight", "options", "why"),
    [
        ((1, 32, 28, 28), (32, 32, 1, 1), {}, None),
        ((1, 32, 28, 28), (32, 32, 3, 3), {"strides": 2}, None),
        ((1, 32, 28, 28), (32, 32, 3, 3), {"dilation": 2}, None),
        ((1, 32, 28, 28), (32, 8, 3, 3), {"groups": 4}, "too few channels or places"),
        ((1, 3, 56, 56), (32, 3, 3, 3), {}, "too few channels or places"),
        ((1, 64, 6, 6), (64, 64, 3, 3), {}, "too few channels or places"),
    ],
)
def test_other_convolutions_are_multiplied_as_they_are_written(
    image: Shape, weight: Shape, options: dict[str, int], why: str | None
) -> None:
    found = decided(image, weight, **options)
    assert (found.rule, found.reason) == ("convolution", None)
    assert [why in each for each in found.before] == ([True] if why else [])


def test_float16_holds_no_tiles() -> None:
    found = decided((1, 64, 28, 28), (64, 64, 3, 3), replace(ARM, target=HOST.target).storing(FLOAT16))
    assert found.rule == "convolution"
    assert "float16" in found.before[0]
