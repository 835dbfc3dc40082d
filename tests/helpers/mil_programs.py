"""MIL programs of one input for tests of passes: built, run, edited and counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
from torch import Tensor

from attnrewrite.targets.coreml import interpreter

RANDOM = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> np.ndarray:
    """Drawn, the same in every run of a file."""
    return torch.randn(shape, generator=RANDOM).numpy()


def program(build: Callable[[Any], Any], *shape: int) -> Any:
    return mb.program(input_specs=[mb.TensorSpec(shape=shape)], opset_version=ct.target.iOS17)(lambda x: build(x))


def run(of: Any, shape: tuple[int, ...]) -> list[Tensor]:
    value = torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    return list(interpreter.interpret(of, {next(iter(of.functions["main"].inputs)): value}).outputs.values())


def kinds(of: Any) -> Counter[str]:
    return Counter(each.op_type for each in of.functions["main"].operations if each.op_type != "const")


def edited(passes: Callable[[Any], int] | list[Callable[[Any], int]], build: Callable[[Any], Any], *shape: int) -> Any:
    """The number of edits of each pass, and the program after them, whose outputs are what they were."""
    made = program(build, *shape)
    before = run(made, shape)
    edits = []
    for each in passes if isinstance(passes, list) else [passes]:
        with made.functions["main"] as block:
            edits.append(each(block))
    PASS_REGISTRY["common::dead_code_elimination"](made)
    for old, new in zip(before, run(made, shape), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=2e-6 * max(1.0, float(old.abs().max())))
    return edits if isinstance(passes, list) else edits[0], made
