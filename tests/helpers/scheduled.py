"""Relax functions of a few operators through the CPU schedules: what is made of them, and numpy's functions beside."""

import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from attnrewrite.targets.tvm.schedules.cpu import pipeline
from attnrewrite.targets.tvm.schedules.profile import Profile, profile

HOST = profile("host")
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
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"x{i}", relax.TensorType(x.shape, "float32")) for i, x in enumerate(inputs)]
    with builder.function("main", parameters):
        with builder.dataflow():
            found = builder.emit(body(*parameters, *map(relax.const, weights or [])))
            result = builder.emit_output(found)
        builder.emit_func_output(result)
    made = pipeline.schedule(builder.get(), processor)
    machine = relax.VirtualMachine(pipeline.build(made.module, processor), tvm.cpu())
    return [each.rule for each in made.decisions], lambda: machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
