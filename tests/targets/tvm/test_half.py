"""Kernels that store and multiply float16, against float64 numpy, run here whatever this processor has.

How far they may be off follows from float16's rounding, U = 2^-11 of a number: an operand is off by U / sqrt(3) of
itself in a root mean square, so that a sum of products of two such is off by U sqrt(2 / 3) of S, the root of the sum of
the products' squares, where their signs are random. Of n sums in a row each is off by U / sqrt(3) of a partial sum,
which grows as sqrt(n): together by U S sqrt(n / 6). Eight times that is allowed: a lost product would not hide in it.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, HOST, erf, scheduled, softmax, values, wide
from tvm import relax

from attnrewrite.targets.tvm.schedules.cpu.register_tile import IN_A_ROW
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, Profile, profile

PROCESSORS = [replace(profile(name), target=HOST.target).storing(FLOAT16) for name in ("host", "cortex-a76")]
SMALL = [replace(each, l1=2**11, l2=2**14) for each in PROCESSORS]  # caches that hold few of the keys
ARM = PROCESSORS[-1]
U = 2.0**-11
SMALLEST = 2.0**-24  # of the numbers above 0
sizes, depths = st.integers(1, 40), st.integers(1, 400)
processors = st.sampled_from(PROCESSORS)


def allowed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The error of each element of a product of matrices: of rounding, and of numbers below float16's digits."""
    depth = left.shape[-1]
    spread = np.sqrt((left**2) @ (right**2))
    lost = SMALLEST * (np.abs(left).sum(-1, keepdims=True) + np.abs(right).sum(-2, keepdims=True) + depth)
    return np.asarray(8 * U * math.sqrt(min(depth, IN_A_ROW) / 6 + 1) * spread + lost)


@DRAWN
@given(
    batch=st.integers(1, 3), rows=sizes, depth=depths, columns=st.integers(1, 90), processor=processors,
    scale=st.sampled_from([1e-12, 1e-5, 1.0, 100.0]),
)  # fmt: skip
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
    found = run()
    assert found.dtype == np.float32
    # What is added is of float32, as bias and residual come.
    largest = np.abs(third).max() + np.abs(fourth).max()
    assert (np.abs(found - (first @ second + third + fourth)) <= allowed(first, second) + 2.0**-20 * largest).all()


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_long_sums_are_of_float32(processor: Profile) -> None:
    """In float16 a sum of ones stays at 2,048."""
    _, run = scheduled([np.ones((7, 5000), np.float32)], relax.op.matmul, [np.ones((5000, 33), np.float32)], processor)
    np.testing.assert_array_equal(run(), 5000)


@DRAWN
@given(heads=st.integers(1, 3), rows=sizes, depth=depths, columns=sizes, transposed=st.booleans(), processor=processors)
def test_product_of_two_tensors(
    heads: int, rows: int, depth: int, columns: int, transposed: bool, processor: Profile
) -> None:
    left, right = values(
        (2, heads, rows, depth), (2, heads, columns, depth) if transposed else (2, heads, depth, columns)
    )
    rules, run = scheduled(
        [left, right],
        lambda x, y: relax.op.matmul(x, relax.op.permute_dims(y, (0, 1, 3, 2)) if transposed else y),
        processor=processor,
    )
    assert set(rules) == {"matmul"}
    first, second = wide(left, right.swapaxes(2, 3) if transposed else right)
    assert (np.abs(run() - first @ second) <= allowed(first, second)).all()


@DRAWN
@given(
    heads=st.integers(1, 3), queries=sizes, keys=st.integers(1, 1300), channels=st.integers(1, 40),
    masked=st.booleans(), scale=st.sampled_from([1e-6, 1.0, 10.0]), processor=st.sampled_from(PROCESSORS + SMALL),
)  # fmt: skip
def test_attention(
    heads: int, queries: int, keys: int, channels: int, masked: bool, scale: float, processor: Profile
) -> None:
    depth = 16
    q, k, v = values((1, heads, queries, depth), (1, heads, keys, depth), (1, heads, keys, channels))
    q *= np.float32(scale)
    mask = np.where(np.random.default_rng(keys).random((queries, keys)) < 0.3, -1e9, 0).astype(np.float32)
    mask[:, 0] = 0

    def body(q: object, k: object, v: object, mask: object) -> object:
        scores = relax.op.matmul(q, relax.op.permute_dims(k, (0, 1, 3, 2)))
        return relax.op.matmul(relax.op.nn.softmax(relax.op.add(scores, mask) if masked else scores), v)

    rules, run = scheduled([q, k, v], body, [mask], processor)
    assert rules == ["attention"]
    first, second, third, fourth = wide(q, k, v, mask)
    turned = second.swapaxes(2, 3)
    weights = softmax(first @ turned + fourth * masked)
    # A score that is off by e makes its weight e times larger; then weights and values are multiplied as operands are.
    error = np.expm1(allowed(first, turned).max(-1, keepdims=True))
    spread = np.sqrt((weights**2) @ (third**2)) + np.abs(weights @ third)
    bound = 2 * error * (weights @ np.abs(third)) + 8 * U * math.sqrt(IN_A_ROW / 6 + 1) * spread
    assert (np.abs(run() - weights @ third) <= bound + SMALLEST * keys * np.abs(third).max()).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("size", "stride", "padding"), [(4, 4, 0), (3, 1, 1), (3, 2, 1)])
def test_convolution(size: int, stride: int, padding: int, groups: int) -> None:
    x, weight = values((2, 6, 13, 14), (10, 6 // groups, size, size))
    rules, run = scheduled(
        [x],
        lambda x, w: relax.op.nn.conv2d(x, w, strides=stride, padding=padding, groups=groups),
        [weight],
        ARM,
    )
    assert rules == ["convolution"]
    first, second = wide(np.pad(x, ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2)), weight)
    seen = np.lib.stride_tricks.sliding_window_view(first, (size, size), (2, 3))[:, :, ::stride, ::stride]
    b, c, h, w = seen.shape[:4]
    rows = seen.reshape(b, groups, c // groups, h, w, -1).transpose(0, 1, 3, 4, 2, 5).reshape(b, groups, h * w, -1)
    columns = second.reshape(groups, 10 // groups, -1).swapaxes(1, 2)
    expected = (rows @ columns).swapaxes(2, 3).reshape(b, 10, h, w)
    error = allowed(rows, columns).swapaxes(2, 3).reshape(b, 10, h, w)
    assert (np.abs(run() - expected) <= error).all()


def test_what_lies_between_kernels_is_float16_and_what_others_read_is_not() -> None:
    x, first, second = values((5, 24), (24, 16), (16, 8), scale=0.2)
    inputs = [relax.Var("x", relax.TensorType(x.shape, "float32"))]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.gelu(relax.op.matmul(inputs[0], relax.const(first))))
            product = builder.emit(relax.op.matmul(hidden, relax.const(second)))
            result = builder.emit_output(relax.op.sinh(product))
        builder.emit_func_output(result)
    made = pipeline.schedule(builder.get(), ARM).module
    found = [
        (str(binding.var.ty.dtype), [str(each.ty.dtype) for each in binding.value.args[1].fields])
        for binding in made["main"].body.blocks[0].bindings
        if binding.value.op.name == "relax.call_tir"
    ]
    assert found == [("float16", ["float32", "float16"]), ("float32", ["float16", "float16"])]
    (z,) = wide(x)
    z = z @ first
    machine = relax.VirtualMachine(pipeline.build(made, ARM), tvm.cpu())
    expected = np.sinh(z * (1 + erf(z / 2**0.5)) / 2 @ second)
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(x)).numpy(), expected, rtol=0, atol=16 * U)


def test_data_that_float16_holds_moves_unchanged() -> None:
    x = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)

    def body(x: object) -> object:
        turned = relax.op.nn.pad(
            relax.op.permute_dims(relax.op.add(x, relax.const(1.0)), (0, 2, 1)), [0, 0, 1, 0, 0, 0]
        )
        return relax.op.take(relax.op.concat([turned, turned], 2), relax.const(np.array([0, 5, -1])), axis=1)

    _, run = scheduled([x], body, processor=ARM)
    turned = np.pad((x + 1).swapaxes(1, 2), ((0, 0), (1, 0), (0, 0)))
    np.testing.assert_array_equal(run(), np.concatenate([turned, turned], 2)[:, [0, 5, -1]])


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_statistics_of_rows_are_of_float32(scale: float) -> None:
    """Squares of numbers near 10^3 are none of float16; the rows are, as two kernels read them."""
    x, gamma, beta = values((7, 200), (200,), (200,))
    x = (scale * (x + 3)).astype(np.float16).astype(np.float32)
    eye = np.eye(200, dtype=np.float32)

    def body(x: object, eye: object, gamma: object, beta: object) -> object:
        rows = relax.op.matmul(x, eye)
        return relax.op.add(relax.op.nn.layer_norm(rows, gamma, beta, axes=-1), relax.op.nn.softmax(rows))

    rules, run = scheduled([x], body, [eye, gamma, beta], ARM)
    assert {"matmul", "normalise", "softmax"} <= set(rules)
    rows, factor, summand = wide(x, gamma, beta)
    centred = rows - rows.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * factor + summand
    expected = normal + softmax(rows)
    assert np.abs(run() - expected).max() <= 2 * U * np.abs(normal).max() + U
