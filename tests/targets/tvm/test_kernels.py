"""Every rule of the CPU schedules against float64 numpy, over drawn shapes and sizes of values.

A case is a Relax function of one operator and what follows it, scheduled, compiled and run; its reference is numpy's.
"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, PROCESSORS, Shape, close, erf, scheduled, softmax, values, wide
from tvm import relax

from attnrewrite.targets.tvm.schedules.profile import Profile

sizes = st.integers(1, 70)
processors = st.sampled_from(PROCESSORS)
HOST, ARM, _ = PROCESSORS
images = st.tuples(st.integers(5, 19), st.integers(5, 19))
scales = st.sampled_from([1e-18, 1.0, 1e15])


@DRAWN
@given(batch=st.integers(1, 3), rows=sizes, depth=sizes, columns=sizes, scale=scales, processor=processors)
def test_product_with_weights_bias_and_residual(
    batch: int, rows: int, depth: int, columns: int, scale: float, processor: Profile
) -> None:
    x, residual = values((batch, rows, depth), (batch, rows, columns), scale=scale)
    weight, bias = values((depth, columns), (columns,))
    rules, run = scheduled(
        [x, residual],
        lambda x, r, w, b: relax.op.add(r, relax.op.add(relax.op.matmul(x, w), b)),
        [weight, bias],
        processor,
    )
    assert rules == ["matmul"]
    first, second, third, fourth = wide(x, weight, bias, residual)
    close(run(), first @ second + third + fourth)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_product_with_an_activation(activation: str) -> None:
    x, weight = values((2, 13, 24), (24, 37))
    rules, run = scheduled([x], lambda x, w: getattr(relax.op.nn, activation)(relax.op.matmul(x, w)), [weight])
    assert rules == ["matmul"]
    first, second = wide(x, weight)
    z = first @ second
    expected = {"gelu": z * (1 + erf(z / 2**0.5)) / 2, "relu": np.maximum(z, 0), "silu": z / (1 + np.exp(-z))}
    close(run(), expected[activation])


@DRAWN
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), rows=sizes, depth=sizes, columns=sizes, transposed=st.booleans()
)
def test_product_of_two_tensors(batch: int, heads: int, rows: int, depth: int, columns: int, transposed: bool) -> None:
    right_shape = (batch, heads, columns, depth) if transposed else (batch, heads, depth, columns)
    left, right = values((batch, heads, rows, depth), right_shape)
    rules, run = scheduled(
        [left, right],
        lambda x, y: relax.op.multiply(
            relax.op.matmul(x, relax.op.permute_dims(y, (0, 1, 3, 2)) if transposed else y), relax.const(0.3)
        ),
    )
    assert set(rules) == {"matmul"}
    first, second = wide(left, right)
    close(run(), first @ (second.swapaxes(2, 3) if transposed else second) * np.float64(np.float32(0.3)))


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "computed"), [(40, "by row"), (40, "by column"), (3, "by column")])
def test_arithmetic_before_a_product_of_two_tensors(processor: Profile, rows: int, computed: str, turned: bool) -> None:
    x, size, y = values((2, rows, 24), (2, rows, 1) if computed == "by row" else (2, 1, 24), (2, 24, 21))
    size = np.abs(size) + 1
    first, second, third = wide(x, size, y)
    if turned:
        x, size = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (x, size))

    def body(x: relax.Var, size: relax.Var, y: relax.Var) -> relax.Expr:
        left = relax.op.divide(x, size)
        return relax.op.matmul(relax.op.permute_dims(left, (0, 2, 1)) if turned else left, y)

    rules, run = scheduled([x, size, y], body, [], processor)
    assert rules == ["matmul"]
    close(run(), first / second @ third)


@DRAWN
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 3), queries=sizes, keys=st.integers(1, 1300),
    channels=st.integers(1, 40), masked=st.sampled_from(["none", "some", "some by least", "all by least"]),
    scale=st.sampled_from([1e-6, 1.0, 30.0]), processor=processors,
)  # fmt: skip
@example(1, 2, 29, 1300, 13, "some", 1.0, ARM)  # queries side by side, over several blocks of keys, and over one
@example(2, 1, 24, 1025, 8, "none", 30.0, ARM)
@example(2, 3, 12, 8, 37, "some", 1.0, ARM)
@example(1, 2, 29, 1300, 13, "all by least", 1.0, ARM)  # keys are alike then
@example(1, 2, 29, 1300, 13, "all by least", 1.0, HOST)
@example(2, 3, 1, 1300, 37, "some", 1.0, HOST)  # one query: nothing is packed
@example(2, 3, 1, 77, 32, "all by least", 30.0, ARM)
def test_attention_in_one_kernel(
    batch: int, heads: int, queries: int, keys: int, channels: int, masked: str, scale: float,
    processor: Profile,
) -> None:  # fmt: skip
    q, k, v = values((batch, heads, queries, channels), *2 * ((batch, heads, keys, channels),), scale=scale)
    least = -np.inf if masked == "some" else np.finfo(np.float32).min
    places = (np.arange(keys) % 3 == 1) & (masked != "none") | (masked == "all by least")
    mask = np.where(places, least, 0).astype(np.float32)

    def attention(q: object, k: object, v: object, mask: object) -> object:
        scores = relax.op.matmul(relax.op.multiply(q, relax.const(0.7)), relax.op.permute_dims(k, (0, 1, 3, 2)))
        mixed = relax.op.matmul(relax.op.nn.softmax(relax.op.add(scores, mask)), v)
        return relax.op.reshape(relax.op.permute_dims(mixed, (0, 2, 1, 3)), (batch, queries, heads * channels))

    rules, run = scheduled([q, k, v], attention, [mask], processor)
    assert rules == ["attention"]
    first, second, third = wide(q, k, v)
    scores = np.float64(np.float32(0.7)) * first @ second.swapaxes(2, 3)
    mixed = softmax(scores + mask) @ third
    # The scores' own rounding moves every probability by as much.
    rounding = 1 + np.abs(scores).max()
    close(run(), mixed.swapaxes(1, 2).reshape(batch, queries, -1), np.abs(third).max() * rounding)


@pytest.mark.parametrize("turned", [False, True])
def test_attention_with_a_bias_of_each_pair(turned: bool) -> None:
    q, k, v = values(*3 * [(1, 2, 30, 16)])
    (bias,) = values((2, 30, 30))

    def attention(q: object, k: object, v: object, bias: object) -> object:
        scores = relax.op.matmul(q, relax.op.permute_dims(k, (0, 1, 3, 2)))
        beside = relax.op.permute_dims(bias, (0, 2, 1)) if turned else bias
        return relax.op.matmul(relax.op.nn.softmax(relax.op.add(scores, beside)), v)

    rules, run = scheduled([q, k, v, bias], attention, processor=ARM)
    assert rules == ["attention"]
    first, second, third, fourth = wide(q, k, v, bias)
    scores = first @ second.swapaxes(2, 3) + (fourth.swapaxes(1, 2) if turned else fourth)
    close(run(), softmax(scores) @ third, np.abs(third).max() * (1 + np.abs(scores).max()))


@DRAWN
@given(
    rows=sizes, channels=st.integers(1, 130), offset=st.sampled_from([0.0, 50.0]), scale=st.sampled_from([1e-9, 1, 1e9])
)
def test_layer_norm(rows: int, channels: int, offset: float, scale: float) -> None:
    (x,) = values((2, rows, channels))
    x = ((x + np.float32(offset)) * np.float32(scale)).astype(np.float32)
    gamma, beta = values((channels,), (channels,))
    rules, run = scheduled([x], lambda x, g, b: relax.op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5), [gamma, beta])
    assert rules == ["normalise"]
    (z,) = wide(x)
    centred = z - z.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    # The mean is rounded in the units of x: what is left of x beside it is as much less exact.
    close(run(), expected, np.abs(expected).max() * (1 + offset))


@DRAWN
@given(batch=st.integers(1, 2), places=sizes, channels=st.integers(1, 40), back=st.booleans())
def test_layer_norm_over_the_channels_of_images(batch: int, places: int, channels: int, back: bool) -> None:
    (x,) = values((batch, channels, places))
    gamma, beta = values((channels,), (channels,))

    def norm(x: object, g: object, b: object) -> object:
        found = relax.op.nn.layer_norm(relax.op.permute_dims(x, (0, 2, 1)), g, b, axes=[-1], epsilon=1e-5)
        return relax.op.permute_dims(found, (0, 2, 1)) if back else found

    rules, run = scheduled([x], norm, [gamma, beta])
    assert rules == ["normalise"]
    (z,) = wide(x.swapaxes(1, 2))
    centred = z - z.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    close(run(), expected.swapaxes(1, 2) if back else expected)


@DRAWN
@given(batch=st.integers(1, 3), groups=st.integers(1, 4), each=st.integers(1, 5), image=images)
def test_group_norm(batch: int, groups: int, each: int, image: tuple[int, int]) -> None:
    channels = groups * each
    (x,) = values((batch, channels, *image))
    gamma, beta = values((channels,), (channels,))
    rules, run = scheduled(
        [x], lambda x, g, b: relax.op.nn.group_norm(x, g, b, groups, 1, [2, 3], epsilon=1e-5), [gamma, beta]
    )
    assert rules == ["normalise groups"]
    (z,) = wide(x.reshape(batch, groups, -1))
    centred = z - z.mean(-1, keepdims=True)
    found = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    close(run(), found * gamma[:, None, None] + beta[:, None, None])


@DRAWN
@given(
    batch=st.integers(1, 2), windows=st.tuples(st.integers(1, 3), st.integers(1, 3)), size=st.integers(1, 5),
    channels=st.integers(1, 40), columns=sizes, processor=processors,
)  # fmt: skip
def test_product_of_windows_of_an_image(
    batch: int, windows: tuple[int, int], size: int, channels: int, columns: int, processor: Profile
) -> None:
    down, right = windows
    image = (batch, down * size, right * size, channels)
    (x,), (weight, bias) = values(image), values((channels, columns), (columns,))
    parts, tokens = (batch, down, size, right, size, channels), (batch * down * right, size * size, channels)

    def partitioned(x: object, w: object, b: object) -> object:
        found = relax.op.permute_dims(relax.op.reshape(x, parts), (0, 1, 3, 2, 4, 5))
        return relax.op.add(relax.op.matmul(relax.op.reshape(found, tokens), w), b)

    rules, run = scheduled([x], partitioned, [weight, bias], processor)
    first, second, third = wide(x, weight, bias)
    close(run(), first.reshape(parts).transpose(0, 1, 3, 2, 4, 5).reshape(tokens) @ second + third)
    assert "matmul" in rules


@DRAWN
@given(rows=sizes, channels=st.integers(1, 130), scale=scales)
def test_rms_norm(rows: int, channels: int, scale: float) -> None:
    (x,), (gamma,) = values((rows, channels), scale=scale), values((channels,))
    rules, run = scheduled([x], lambda x, g: relax.op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-6), [gamma])
    assert rules == ["normalise"]
    (z,) = wide(x)
    close(run(), z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6) * gamma)


@DRAWN
@given(
    shape=st.tuples(st.integers(1, 4), sizes, sizes),
    axis=st.sampled_from([-1, 1]),
    scale=st.sampled_from([1e-20, 1, 1e4]),
)
def test_softmax(shape: Shape, axis: int, scale: float) -> None:
    (x,) = values(shape, scale=scale)
    rules, run = scheduled([x], lambda x: relax.op.nn.softmax(x, axis))
    assert rules == ["softmax"]
    close(run(), np.moveaxis(softmax(np.moveaxis(*wide(x), axis, -1)), -1, axis))


@DRAWN
@given(
    shape=st.tuples(*4 * [st.integers(1, 9)]), axes=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    kind=st.sampled_from(["sum", "mean", "max", "min"]), keep=st.booleans(),
)  # fmt: skip
@example((2, 3, 9, 4), {3}, "sum", False)  # short rows, more than fill squares
def test_reductions(shape: Shape, axes: set[int], kind: str, keep: bool) -> None:
    (x,) = values(shape)
    rules, run = scheduled([x], lambda x: getattr(relax.op, kind)(relax.op.abs(x), sorted(axes), keep))
    assert rules == ["reduction"]
    close(run(), getattr(np, kind)(np.abs(*wide(x)), tuple(axes), keepdims=keep))


@DRAWN
@given(
    batch=st.integers(1, 2), channels=st.sampled_from([(3, 8), (4, 4), (8, 12)]), size=images,
    window=st.sampled_from([1, 2, 3, 5]), stride=st.integers(1, 3), padding=st.integers(0, 2),
    groups=st.sampled_from(["one", "all", "two"]), dilation=st.integers(1, 2),
)  # fmt: skip
@example(1, (3, 8), (7, 16), 3, 1, 1, "one", 1)  # neighbours in a row by fours and more: copied panel by panel
@example(2, (8, 12), (10, 24), 3, 2, 1, "two", 1)
@example(2, (4, 4), (9, 12), 5, 1, 2, "one", 2)
@example(1, (3, 8), (5, 8), 1, 2, 0, "one", 1)
@example(1, (3, 8), (7, 7), 1, 1, 0, "one", 1)  # 49 columns: one beside a tile
@example(2, (4, 16), (14, 14), 3, 1, 1, "two", 1)
def test_convolutions(
    batch: int,
    channels: tuple[int, int],
    size: Shape,
    window: int,
    stride: int,
    padding: int,
    groups: str,
    dilation: int,
) -> None:
    import torch

    inner, outer = channels
    count = {"one": 1, "all": inner, "two": 2 if inner % 2 == outer % 2 == 0 else 1}[groups]
    outer = outer - outer % count or count
    if (window - 1) * dilation + 1 > min(size) + 2 * padding:
        return
    (x,), (weight, bias) = values((batch, inner, *size)), values((outer, inner // count, window, window), (outer, 1, 1))
    options = {"strides": stride, "padding": padding, "dilation": dilation, "groups": count}
    rules, run = scheduled(
        [x], lambda x, w, b: relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w, **options), b)), [weight, bias]
    )
    assert rules == ["convolution"]
    first, second, third = (torch.from_numpy(array) for array in wide(x, weight, bias))
    expected = torch.conv2d(first, second, third.flatten(), stride, padding, dilation, count).relu()
    close(run(), expected.numpy())


@DRAWN
@given(
    batch=st.integers(1, 2), channels=st.integers(1, 70), grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    window=st.sampled_from([(3, 3), (1, 3), (5, 2), (7, 7)]), stride=st.integers(1, 3), padding=st.integers(0, 3),
    dilation=st.integers(1, 2), processor=processors,
)  # fmt: skip
@example(1, 64, (7, 11), (3, 3), 1, 1, 1, PROCESSORS[0])
@example(2, 33, (1, 5), (3, 3), 1, 1, 1, PROCESSORS[0])
@example(1, 20, (2, 2), (7, 7), 1, 3, 2, PROCESSORS[0])
def test_channels_of_tokens_by_themselves(
    batch: int, channels: int, grid: Shape, window: Shape, stride: int, padding: int, dilation: int, processor: Profile
) -> None:
    import torch

    if any((size - 1) * dilation + 1 > length + 2 * padding for size, length in zip(window, grid, strict=True)):
        return
    x, residual = values((batch, grid[0] * grid[1], channels), (batch, 1, channels))
    weight, bias = values((channels, 1, *window), (channels, 1, 1))
    options = {"strides": stride, "padding": padding, "dilation": dilation, "groups": channels}

    def tokens(x: object, r: object, w: object, b: object) -> object:
        image = relax.op.reshape(relax.op.permute_dims(relax.op.exp(x), (0, 2, 1)), (batch, channels, *grid))
        made = relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(image, w, **options), b))
        sizes = torch.conv2d(torch.zeros(1, 1, *grid), torch.zeros(1, 1, *window), None, stride, padding, dilation)
        flat = relax.op.reshape(made, (batch, channels, sizes.numel()))
        return relax.op.add(r, relax.op.permute_dims(flat, (0, 2, 1)))

    rules, run = scheduled([x, residual], tokens, [weight, bias], processor)
    assert rules.count("convolution") == 1
    first, beside, second, third = (torch.from_numpy(array) for array in wide(x, residual, weight, bias))
    image = first.exp().transpose(1, 2).unflatten(2, grid)
    made = torch.conv2d(image, second, third.flatten(), stride, padding, dilation, channels).relu()
    close(run(), (beside + made.flatten(2).transpose(1, 2)).numpy())


@DRAWN
@given(batch=st.integers(1, 2), grid=st.tuples(st.integers(1, 9), st.integers(1, 9)), patch=st.sampled_from([2, 4, 7]))
def test_patches_become_tokens(batch: int, grid: Shape, patch: int) -> None:
    rows, columns = grid
    (x,) = values((batch, 3, rows * patch, columns * patch))
    weight, bias = values((20, 3, patch, patch), (20, 1, 1))

    def tokens(x: object, w: object, b: object) -> object:
        image = relax.op.add(relax.op.nn.conv2d(x, w, strides=patch), b)
        return relax.op.permute_dims(relax.op.reshape(image, (batch, 20, rows * columns)), (0, 2, 1))

    rules, run = scheduled([x], tokens, [weight, bias])
    assert rules == ["convolution"]
    windows = wide(x)[0].reshape(batch, 3, rows, patch, columns, patch).transpose(0, 2, 4, 1, 3, 5)
    expected = np.tensordot(windows, weight.astype(np.float64), ((3, 4, 5), (1, 2, 3))) + bias.reshape(-1)
    close(run(), expected.reshape(batch, rows * columns, 20))


@DRAWN
@given(
    size=st.tuples(st.integers(8, 20), st.integers(8, 20)), window=st.sampled_from([2, 3, 8]),
    stride=st.integers(1, 3), padding=st.integers(0, 1), ceil=st.booleans(),
    kind=st.sampled_from(["largest", "mean", "mean of the inside"]),
)  # fmt: skip
def test_pooling(size: Shape, window: int, stride: int, padding: int, ceil: bool, kind: str) -> None:
    import torch

    (x,) = values((2, 3, *size))
    at = (window, window), (stride, stride)
    if kind == "largest":
        pool, given = relax.op.nn.max_pool2d, {}
        reference = torch.max_pool2d(torch.from_numpy(*wide(x)), *at, padding, ceil_mode=ceil)
    else:
        pool, given = relax.op.nn.avg_pool2d, {"count_include_pad": kind == "mean"}
        reference = torch.nn.functional.avg_pool2d(torch.from_numpy(*wide(x)), *at, padding, ceil, kind == "mean")
    # The operator rounds up and keeps what windows beyond the padding would see; torch leaves these windows out.
    rules, run = scheduled([x], lambda x: pool(x, *at, (padding,) * 4, ceil_mode=ceil, **given))
    assert rules == ["pool"]
    close(run()[..., : reference.shape[2], : reference.shape[3]], reference.numpy())


@DRAWN
@given(shape=st.tuples(*4 * [st.integers(1, 20)]), order=st.permutations(range(4)), scale=scales)
def test_arithmetic_on_moved_tensors(shape: Shape, order: list[int], scale: float) -> None:
    moved = tuple(shape[axis] for axis in order)
    x, y = values(shape, moved, scale=scale)
    (row,) = values((moved[-1],), scale=scale)
    rules, run = scheduled(
        [x, y], lambda x, y, r: relax.op.maximum(relax.op.add(relax.op.permute_dims(x, order), y), r), [row]
    )
    assert rules == ["elementwise"]
    first, second, third = wide(x, y, row)
    close(run(), np.maximum(first.transpose(order) + second, third))


@DRAWN
@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=3).filter(any), axis=st.integers(0, 2))
def test_concatenation(lengths: list[int], axis: int) -> None:
    shapes = [tuple(length if each == axis else 5 for each in range(3)) for length in lengths]
    arrays = values(*shapes)
    rules, run = scheduled(arrays, lambda *x: relax.op.concat([relax.op.negative(x[0]), *x[1:]], axis))
    assert rules == ["concat"]
    np.testing.assert_array_equal(run(), np.concatenate([-arrays[0], *arrays[1:]], axis))


def test_a_part_of_a_product_is_read_where_it_lies() -> None:
    x, first = values((1, 20, 24), (1, 1, 32))
    weight, bias = values((24, 32), (32,))

    def body(x: object, first: object, weight: object, bias: object) -> object:
        made = relax.op.add(relax.op.matmul(x, weight), bias)
        return relax.op.concat([first, relax.op.strided_slice(made, [1], [1], [20])], 1)

    rules, run = scheduled([x, first], body, [weight, bias])
    assert rules == ["matmul", "concat"]
    one, other, *_ = wide(x @ weight + bias, first)
    close(run(), np.concatenate([other, one[:, 1:]], 1))


@DRAWN
@given(
    shape=st.tuples(*3 * [st.integers(1, 20)]), axis=st.integers(0, 2), count=st.integers(1, 30), moved=st.booleans()
)
def test_elements_from_known_places(shape: Shape, axis: int, count: int, moved: bool) -> None:
    (x,) = values(shape)
    places = np.random.default_rng(count).integers(-shape[axis], shape[axis], count)

    def take(x: object) -> object:
        found = relax.op.take(x, relax.const(places), axis, mode="wrap")
        return relax.op.permute_dims(found, (2, 0, 1)) if moved else found

    rules, run = scheduled([x], take)
    assert rules == ["take"]
    expected = np.take(x, places, axis)
    np.testing.assert_array_equal(run(), expected.transpose(2, 0, 1) if moved else expected)


@pytest.mark.parametrize("shape", [(3, 5), (16,), (4099,)])
def test_batch_norm_and_other_arithmetic_with_constants_is_elementwise(shape: Shape) -> None:
    (x,) = values((1, *shape))
    names = ("gamma", "beta", "mean", "variance")
    parameters = dict(zip(names, values(*4 * [shape[:1]]), strict=True))
    parameters["variance"] = np.abs(parameters["variance"]) + np.float32(0.1)
    builder = [*parameters.values()]
    rules, run = scheduled(
        [x], lambda x, *p: relax.TupleGetItem(relax.op.nn.batch_norm(x, *p, 1, training=False), 0), builder
    )
    assert rules == ["elementwise"]
    gamma, beta, mean, variance = (each.reshape(-1, *[1] * (len(shape) - 1)) for each in wide(*parameters.values()))
    close(run(), (wide(x)[0] - mean) / np.sqrt(variance + 1e-5) * gamma + beta)


def test_what_is_not_a_number_stays_none() -> None:
    x = np.array([[np.nan, 1, -1, np.inf]], np.float32)
    for operator in ("relu", "gelu", "silu"):
        _, run = scheduled([x], lambda x, operator=operator: getattr(relax.op.nn, operator)(x))
        assert np.isnan(run()[0]).tolist()[:3] == [True, False, False]
