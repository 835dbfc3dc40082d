"""Products by Strassen's algorithm against float64 numpy: tails of tiles, groups, panels and depth; the algorithm by
itself on integers; which products it takes, and why not others.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, HOST, PROCESSORS, Shape, close, erf, relax_module, scheduled, values, wide
from tvm import relax

from attnrewrite.targets.record import Decision
from attnrewrite.targets.tvm.schedules.cpu.strassen import rule
from attnrewrite.targets.tvm.schedules.cpu.strassen.algorithm import Scheme, left_factors, places
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, Profile, Tile

_, ARM, _ = PROCESSORS


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_steps_make_the_product_of_integers(levels: int) -> None:
    scheme = Scheme(levels)
    side, generator = scheme.side, np.random.default_rng(levels)
    shapes = ((3 * side, 2 * side), (2 * side, side))
    left, right = (generator.integers(-9, 10, shape).astype(float) for shape in shapes)
    factors = left.reshape(side, 3, side, 2).swapaxes(1, 2).reshape(-1, 3, 2)[places(side)]
    for level in range(levels):
        quarters = factors.reshape(7**level, 4, -1, 3, 2).swapaxes(0, 1)
        factors = np.stack(left_factors(*quarters), axis=1)
    factors = factors.reshape(-1, 3, 2)
    assert len(factors) == 7**levels == len(scheme.steps)
    tiles = np.full((scheme.tiles, 3, 1), np.nan)
    tiles[scheme.zero] = 0
    for step, one, other in zip(scheme.steps, factors, scheme.of_weights(right), strict=True):
        made = tiles[[*step.seeds]].sum(0) + one @ other
        tiles[step.into] = made
        for added, into in step.after:
            made = made + tiles[added]
            tiles[into] = made
    found = tiles[: side**2].reshape(side, side, 3, 1).swapaxes(1, 2).reshape(3 * side, side)
    np.testing.assert_array_equal(found, left @ right)


def by(levels: int, tile: Tile = ARM.packed[0]) -> AbstractContextManager[object]:
    """Products go by so many levels and such tiles, whatever that costs."""
    return patch.object(rule, "best_scheme", return_value=(Scheme(levels) if levels else None, tile))


@DRAWN
@given(
    batch=st.integers(1, 2), rows=st.integers(1, 70), steps=st.integers(1, 21), columns=st.integers(1, 110),
    levels=st.integers(1, 2), tile=st.sampled_from(ARM.packed), scale=st.sampled_from([1e-18, 1.0, 1e15]),
)  # fmt: skip
@example(1, 1, 48, 48, 2, ARM.packed[0], 1.0)  # one row of a group
@example(1, 31, 3, 37, 2, ARM.packed[0], 1e15)  # the last group as high as others, not full; steps fewer than lanes
@example(2, 15, 16, 24, 1, ARM.packed[0], 1.0)
@example(1, 64, 17, 96, 2, ARM.packed[0], 1e-18)  # nothing left over but a step
@example(1, 33, 5, 50, 1, ARM.packed[1], 1.0)
def test_products_with_what_follows(
    batch: int, rows: int, steps: int, columns: int, levels: int, tile: Tile, scale: float
) -> None:
    depth = steps * 2**levels
    x, residual = values((batch, rows, depth), (batch, rows, columns), scale=scale)
    weight, bias = values((depth, columns), (columns,))
    with by(levels, tile):
        rules, run = scheduled(
            [x, residual],
            lambda x, r, w, b: relax.op.add(r, relax.op.add(relax.op.matmul(x, w), b)),
            [weight, bias],
            ARM,
        )
    assert rules == ["strassen"]
    first, second, third, fourth = wide(x, weight, bias, residual)
    close(run(), first @ second + third + fourth)


@pytest.mark.parametrize("rows", [224, 197])
def test_an_activation_follows(rows: int) -> None:
    x, weight = values((1, rows, 192), (192, 144))
    rules, run = scheduled([x], lambda x, w: relax.op.nn.gelu(relax.op.matmul(x, w)), [weight], ARM)
    assert rules == ["strassen"]
    z = np.matmul(*wide(x, weight))
    close(run(), z * (1 + erf(z / 2**0.5)) / 2)


def test_weights_that_lie_as_linear_layers_have_them() -> None:
    x, weight = values((1, 224, 192), (144, 192))
    rules, run = scheduled([x], lambda x, w: relax.op.matmul(x, relax.op.permute_dims(w)), [weight], ARM)
    assert rules == ["strassen"]
    first, second = wide(x, weight)
    close(run(), first @ second.T)


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_patches_of_an_image(levels: int) -> None:
    image, weight = values((2, 4, 32, 48), (40, 4, 4, 4))

    def body(x: relax.Var, w: relax.Expr) -> relax.Expr:
        patches = relax.op.reshape(relax.op.nn.conv2d(x, w, strides=4), (2, 40, 96))
        return relax.op.permute_dims(patches, (0, 2, 1))

    with by(levels):
        made = pipeline.schedule(relax_module([image.shape], body, [weight]), ARM)
        assert any("strassen" in name.name_hint for name in made.module.get_global_vars()) is bool(levels)
        rules, run = scheduled([image], body, [weight], ARM)
    assert rules == ["convolution"]
    first, second = wide(image, weight)
    windows = first.reshape(2, 4, 8, 4, 12, 4).transpose(0, 2, 4, 1, 3, 5).reshape(2, 96, 64)
    close(run(), windows @ second.reshape(40, 64).T)


@pytest.mark.parametrize("levels", [1, 2])
def test_integers_are_exact(levels: int) -> None:
    generator = np.random.default_rng(0)
    x, weight = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((1, 50, 64), (64, 70)))
    with by(levels):
        _, run = scheduled([x], relax.op.matmul, [weight], ARM)
    np.testing.assert_array_equal(run(), x @ weight)


def test_each_level_at_most_doubles_the_error() -> None:
    x, weight = values((1, 128, 192), (192, 96))
    exact, errors = np.matmul(*wide(x, weight)), []
    for levels in range(3):
        with by(levels):
            rules, run = scheduled([x], relax.op.matmul, [weight], ARM)
        assert rules == ["strassen" if levels else "matmul"]
        errors.append(np.square(run() - exact).mean() ** 0.5)
    direct, one, two = errors
    assert 1.5 * direct < one < 2.2 * direct
    assert 1.5 * one < two < 2.2 * one


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_group(number: float) -> None:
    (x,), (weight,) = values((1, 96, 64)), values((64, 48))
    x[0, 40, 3] = number
    with by(2):
        _, run = scheduled([x], relax.op.matmul, [weight], ARM)
    found, (first, second) = run(), wide(x, weight)
    assert not np.isfinite(found[0, 40]).any()
    close(found[:, :32], first[:, :32] @ second)
    close(found[:, 64:], first[:, 64:] @ second)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "levels"),
    [
        *[(1025, 192, columns, 2) for columns in (192, 576, 768)],
        *[(197, 192, columns, 1) for columns in (192, 576, 768)],
        *[(1025, 768, 192, 2), (197, 768, 192, 1), (1025, 98, 768, 1)],  # 98 has no quarters
        *[(1, 192, 1000, 0), (49, 384, 1536, 0), (3136, 64, 64, 0), (1025, 99, 768, 0)],
        *[(1025, 384, 1536, 1), (1025, 768, 3072, 0)],  # two levels' weights, and one's, are more than MOST_BYTES
    ],
)
def test_levels_are_those_that_gain_more_than_their_weights_take(
    rows: int, depth: int, columns: int, levels: int
) -> None:
    scheme, tile = rule.best_scheme(rows, depth, columns, ARM)
    assert (scheme.levels if scheme else 0) == levels
    assert tile in ARM.packed


def decided(body: Callable[..., object], shapes: list[Shape], weight: Shape, processor: Profile = ARM) -> Decision:
    module = relax_module(shapes, body, values(weight))
    (found,) = pipeline.schedule(module, processor).decisions
    return found


TOKENS, MATRIX = (1, 224, 192), (192, 192)


@pytest.mark.parametrize(
    ("body", "shapes", "weight", "processor", "why"),
    [
        (lambda x, y, _: relax.op.matmul(x, y), [TOKENS, MATRIX], (1, 1), ARM, None),
        (relax.op.matmul, [(2, *TOKENS[1:])], (2, 192, 192), ARM, None),
        (lambda x, w: relax.op.matmul(w, x), [(1, 192, 224)], (64, 192), ARM, None),
        (relax.op.matmul, [(1, 24, 192)], MATRIX, ARM, "too few rows"),
        (relax.op.matmul, [(1, 224, 191)], (191, 192), ARM, "too few rows, columns or steps"),
        (lambda x, w: relax.op.matmul(relax.op.permute_dims(x, (0, 2, 1)), w), [(1, 192, 224)], MATRIX, ARM, "one by"),
        (relax.op.matmul, [TOKENS], MATRIX, HOST, "read from memory"),
        (relax.op.matmul, [TOKENS], MATRIX, replace(ARM, target=HOST.target).storing(FLOAT16), "float16"),
    ],
)
def test_other_products_are_multiplied_directly(
    body: Callable[..., object], shapes: list[Shape], weight: Shape, processor: Profile, why: str | None
) -> None:
    found = decided(body, shapes, weight, processor)
    assert (found.rule, found.reason) == ("matmul", None)
    assert [why in each for each in found.before] == ([True] if why else [])
