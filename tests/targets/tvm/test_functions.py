"""Functions of float16 vectors, given every number of float16: here, where each product and sum is rounded unless the
processor computes in float16, and as code for an ARM core under emulation, where a multiply-add is rounded once.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import HOST, erf
from tvm import relax

from attnrewrite.targets.runners import programs, qemu
from attnrewrite.targets.tvm import compat
from attnrewrite.targets.tvm.schedules.cpu import half, vectors
from attnrewrite.targets.tvm.schedules.cpu.function import each, function
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, Profile, features_for, profile
from attnrewrite.targets.tvm.schedules.rule import Argument

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
U = 2.0**-11  # half a place of the numbers from 1 to 2
ARM = profile("cortex-a76")
HERE = replace(ARM, target=HOST.target)
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: np.asarray(x * (1 + erf(x / 2**0.5)) / 2),
    "falling_power": np.exp2,
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(x / 2),
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(x / 2)),
}
FALLING = ("falling_power",)  # have no arguments above 0
LIKE_THEIR_ARGUMENT = ("gelu", "silu")
# the largest errors that are told, in units of U
EACH_ROUNDED = {"gelu": 1.4, "falling_power": 1.4, "sigmoid": 1.6, "silu": 2.0}
ROUNDED_ONCE = {"gelu": 1.2, "falling_power": 1.1, "sigmoid": 1.6, "silu": 2.0}
TOLD_HERE = EACH_ROUNDED if HOST.features.isdisjoint(features_for("fp16")) else ROUNDED_ONCE


def compiled(name: str, lanes: int, processor: Profile) -> object:
    """A program that gives a function's value for each number of a tensor."""

    def body(read: object, written: object) -> None:
        with each((ALL.size // lanes,), 0) as (index,):
            x = vectors.name(vectors.load(read, index * lanes, lanes, dtype=FLOAT16))
            vectors.store(written, index * lanes, getattr(half, name)(x), lanes)

    tensor = relax.TensorType(ALL.shape, "float32")
    x, builder = relax.Var("x", tensor), relax.BlockBuilder()
    kernel = builder.add_func(function([Argument(ALL.shape, "float32")] * 2, body), "kernel")
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.call_tir(kernel, relax.Tuple([x]), out_ty=tensor)))
    return pipeline.build(builder.get(), processor)


def here(name: str, lanes: int) -> np.ndarray:
    """A function of all numbers."""
    machine = relax.VirtualMachine(compiled(name, lanes, HERE), tvm.cpu())
    return np.asarray(machine["main"](tvm.runtime.tensor(ALL)).numpy())


def off(found: np.ndarray, name: str) -> float:
    """The largest error, in units of U, and of the argument's size where that is above 1 and the function grows so."""
    asked = np.isfinite(ALL) & ((ALL <= 0) | (name not in FALLING))
    x = ALL[asked].astype(np.float64)
    size = np.maximum(1, np.abs(x)) if name in LIKE_THEIR_ARGUMENT else 1
    return float((np.abs(found[asked] - FUNCTIONS[name](x)) / size).max() / U)


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize(("name", "worst"), TOLD_HERE.items())
def test_every_number_gives_what_is_told(name: str, worst: float, lanes: int) -> None:
    found = here(name, lanes)
    assert worst - 0.1 < off(found, name) <= worst
    assert np.isnan(found[np.isnan(ALL)]).all()


@pytest.mark.parametrize(("name", "worst"), ROUNDED_ONCE.items())
def test_so_does_code_for_arm(name: str, worst: float, tmp_path: Path) -> None:
    library = tmp_path / "function.so"
    try:
        runtime = compat.runtime_packages()
        qemu.runtime(runtime)
        compat.export_library(compiled(name, 8, ARM), library, qemu.CROSS_COMPILER)
        (found,) = qemu.execute(library, [ALL], runtime, 120).outputs
    except programs.Unavailable as reason:
        pytest.skip(f"aarch64 code does not run here: {reason}")
    assert worst - 0.1 < off(found, name) <= worst
    assert np.isnan(found[np.isnan(ALL)]).all()


def test_whole_powers_are_exact_down_to_the_least_number() -> None:
    found = here("falling_power", 8)
    whole = np.isin(ALL, np.arange(-40, 1))
    np.testing.assert_array_equal(found[whole], np.exp2(ALL[whole]).astype(np.float16))
    assert found[np.isneginf(ALL)] == 0


def test_gelu_is_its_argument_far_above_zero_and_next_to_nothing_far_below() -> None:
    found = here("gelu", 8)
    far = ALL >= half.GELU_END
    np.testing.assert_array_equal(found[far], ALL[far])
    assert np.abs(found[ALL <= -half.GELU_END]).max() < 0.01 * U
