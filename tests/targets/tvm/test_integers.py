"""Products of integers of eight bits: exactly numpy's, rounded once for all that read them, and nothing else's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, HOST, PROCESSORS, close, scheduled, values, wide
from tvm import relax

from attnrewrite.targets.devices.arm_cpu import ArmCpu
from attnrewrite.targets.tvm.schedules.cpu.int8.dot import dot_of
from attnrewrite.targets.tvm.schedules.pipelines.cpu import schedule
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, Profile, profile

# The same where what lies between kernels is of float16, with instructions for integers and without.
NO_DOT = replace(HOST, target={"kind": "llvm", "mcpu": HOST.target["mcpu"]})
HALF = [each.storing(FLOAT16) for each in (HOST, NO_DOT)]
sizes = st.integers(1, 70)


def taken(processor: Profile) -> list[str]:
    """The rules for a product of integers: in float32, sums of so few are as exact."""
    return ["elementwise", "matmul"] if dot_of(processor) is None else ["matmul int8"]


def rounded(x: Any, factor: Any, bound: float = 127) -> Any:
    return relax.op.clip(relax.op.round(relax.op.multiply(x, factor)), -bound, bound)


def integers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-127, 128, shape).astype(np.float32)


@pytest.mark.parametrize("processor", [*PROCESSORS, *HALF], ids=["host", "neon", "avx2", "float16", "float16, no dot"])
@settings(DRAWN, max_examples=2)
@given(
    batch=st.integers(1, 3), rows=sizes, depth=sizes, columns=sizes,
    kind=st.sampled_from(["normal", "halves", "huge", "zero", "tiny"]),
)  # fmt: skip
@example(batch=1, rows=9, depth=40, columns=5, kind="normal")
def test_products_of_integers_are_exact(
    processor: Profile, batch: int, rows: int, depth: int, columns: int, kind: str
) -> None:
    x, factor = values((batch, rows, depth), (batch, rows, 1))
    scale = {"normal": 60.0, "halves": 0.0, "huge": 1e30, "zero": 0.0, "tiny": 1e-30}[kind]
    x = integers(batch, rows, depth) * np.float32(0.5) if kind == "halves" else x * np.float32(scale)
    factor = np.ones_like(factor) if kind == "halves" else np.abs(factor)
    weight = integers(depth, columns)
    rules, run = scheduled([x, factor], lambda x, f, w: relax.op.matmul(rounded(x, f), w), [weight], processor)
    assert rules == taken(processor)
    left = np.clip(np.rint(x * factor), -127, 127).astype(np.int64)
    np.testing.assert_array_equal(run(), left @ weight.astype(np.int64))


@DRAWN
@given(rows=sizes, depth=sizes, columns=sizes, strided=st.booleans(), processor=st.sampled_from(PROCESSORS))
def test_arithmetic_follows_in_the_same_kernel(
    rows: int, depth: int, columns: int, strided: bool, processor: Profile
) -> None:
    x, factor, residual = values((2, depth, rows) if strided else (2, rows, depth), (2, rows, 1), (2, rows, columns))
    unit, bias = values((columns,), (columns,))

    def layer(x: Any, f: Any, r: Any, w: Any, unit: Any, bias: Any) -> Any:
        x = relax.op.permute_dims(x, (0, 2, 1)) if strided else x
        sums = relax.op.matmul(rounded(x, f), w)
        scaled = relax.op.multiply(relax.op.multiply(sums, f), unit)
        return relax.op.add(r, relax.op.nn.relu(relax.op.add(scaled, bias)))

    weight = integers(depth, columns)
    rules, run = scheduled([x, factor, residual], layer, [weight, unit, bias], processor)
    assert rules == taken(processor)
    left = np.clip(np.rint((x.swapaxes(1, 2) if strided else x) * factor), -127, 127)
    second, third, fourth, fifth, sixth = wide(factor, residual, unit, bias, weight)
    close(run(), third + np.maximum(left.astype(np.float64) @ sixth * second * fourth + fifth, 0))


def linear(weight: np.ndarray, *, bound: float = 127, rounds: bool = True) -> Callable[..., Any]:
    def body(x: Any, f: Any) -> Any:
        left = rounded(x, f, bound) if rounds else relax.op.clip(relax.op.multiply(x, f), -bound, bound)
        return relax.op.matmul(left, relax.const(weight))

    return body


NO_INTEGERS = {
    "weights between integers": (linear(integers(8, 8) + np.float32(0.5)), HOST),
    "weights beyond eight bits": (linear(integers(8, 8) * 2), HOST),
    "activations beyond eight bits": (linear(integers(8, 8), bound=128), HOST),
    "activations that are not rounded": (linear(integers(8, 8), rounds=False), HOST),
    "no instructions": (linear(integers(8, 8)), NO_DOT),
}


@pytest.mark.parametrize("case", NO_INTEGERS)
def test_other_products_stay_in_float32(case: str) -> None:
    body, processor = NO_INTEGERS[case]
    rules, _ = scheduled(values((4, 8), (4, 1)), body, processor=processor)
    assert rules == ["elementwise", "matmul"]


def test_rows_are_rounded_once_for_all_that_read_them() -> None:
    builder = relax.BlockBuilder()
    x, f = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (9, 8)), ("f", (9, 1))))
    with builder.function("main", [x, f]):
        with builder.dataflow():
            left = builder.emit(rounded(x, f))
            made = [builder.emit(relax.op.matmul(left, relax.const(integers(8, 8 + n)))) for n in range(3)]
            found = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(found)
    done = schedule(builder.get(), profile("cortex-a76"))
    called = [str(binding.value.args[0].name_hint) for binding in done.module["main"].body.blocks[0].bindings[:-1]]
    assert sorted(name.rstrip("_0123456789") for name in called) == [*3 * ["product_of_integers"], "words"]


@pytest.mark.parametrize("processor", HALF, ids=["integers", "float32"])
def test_a_row_of_nothing_has_its_unit_whole(processor: Profile) -> None:
    """Float16 holds neither the smallest unit of a row nor its inverse."""
    x, eye, weight = np.zeros((3, 24), np.float32), np.eye(24, dtype=np.float32), integers(24, 8)
    x[1], x[2, 5] = 1e-5, 3

    def layer(x: Any, eye: Any, w: Any) -> Any:
        x = relax.op.matmul(x, eye)
        largest = relax.op.max(relax.op.abs(x), -1, keepdims=True)
        factor = relax.op.divide(relax.const(127.0), relax.op.maximum(largest, relax.const(2.0**-100)))
        return relax.op.multiply(relax.op.matmul(rounded(x, factor), w), largest)

    _, run = scheduled([x], layer, [eye, weight], processor)
    left = np.stack([np.zeros(24), np.full(24, 127), 127 * eye[5]])
    expected = left @ weight.astype(np.float64) * np.array([[0], [1e-5], [3]])
    # Float16 holds 1e-5 to half a hundredth, and the other rows exactly.
    assert (np.abs(run() - expected) <= np.array([[0], [1e-2], [1e-6]]) * np.abs(expected).max(1, keepdims=True)).all()


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 7, 5), (13, 50, 37), (8, 16, 12)])
def test_an_arm_processor_gives_the_same_integers(rows: int, depth: int, columns: int, tmp_path: Any) -> None:
    torch.manual_seed(rows)
    layer, x = nn.Linear(depth, columns).eval(), 10 * torch.randn(2, rows, depth)
    x[:, 0] = 0
    made = ArmCpu(precision="int8").lower("layer", layer, (x,), tmp_path, threads=1)
    # Only the last arithmetic is in float32: no integer may be another one.
    assert made.max_abs_error <= 1e-6 * float(layer(x).detach().abs().max())
    assert "matmul int8" in [each.rule for each in made.operators]
