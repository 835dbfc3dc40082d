"""Relax functions scheduled, compiled and run, for tests of kernels: what is expected of them is numpy's."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tvm
from hypothesis import HealthCheck, settings
from tvm import relax

from attnrewrite.targets.agreement import FLOAT32
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import Profile, profile

# Few, as each compiles kernels; a next run draws others.
DRAWN = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
HOST = profile("host")
# The widths, tiles and lanes of other instruction sets, compiled for this machine.
PROCESSORS = [HOST, *(replace(profile(name), target=HOST.target) for name in ("cortex-a76", "haswell"))]
Shape = tuple[int, ...]


def values(*shapes: Shape, scale: float = 1.0) -> list[np.ndarray]:
    generator = np.random.default_rng(sum(map(sum, shapes)))
    return [(scale * generator.standard_normal(shape)).astype(np.float32) for shape in shapes]


def scheduled(
    inputs: list[np.ndarray],
    body: Callable[..., object],
    weights: list[np.ndarray] | None = None,
    processor: Profile = HOST,
) -> tuple[list[str], Callable[[], np.ndarray]]:
    """The rules that took the values of `body`(inputs..., weights...), and a call of what was compiled."""
    made = pipeline.schedule(relax_module([x.shape for x in inputs], body, weights or []), processor)
    machine = relax.VirtualMachine(pipeline.build(made.module, processor), tvm.cpu())
    return [each.rule for each in made.decisions], lambda: machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


def relax_module(shapes: list[Shape], body: Callable[..., object], weights: list[np.ndarray]) -> tvm.IRModule:
    """A module whose `main` is `body`(inputs..., weights...)."""
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", parameters):
        with builder.dataflow():
            found = builder.emit(body(*parameters, *map(relax.const, weights)))
            result = builder.emit_output(found)
        builder.emit_func_output(result)
    return builder.get()


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def close(found: np.ndarray, expected: np.ndarray, scale: float | None = None) -> None:
    """Within the tolerance of an artifact, relative to the largest value (`scale`, where terms cancel)."""
    assert found.shape == expected.shape
    largest = np.abs(expected).max(initial=0.0) if scale is None else scale
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32 * largest + np.finfo(np.float32).tiny)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
