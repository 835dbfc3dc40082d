"""What is done to attention on its way is understood in ONNX files, too: converted, a file answers as before.

Each drawn module is written by torch's older exporter, at any opset; its file is refused, stopped by a
check, or converted to one that answers new inputs of another batch size as the file before, and as the torch module.
`make fuzz` draws others, many more.
"""

import copy
import os
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from disturbed import Recipe, answers, build, example, inputs, jumps, recipes, unrounded
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx_runs import run

import attnrewrite as ar
from attnrewrite.errors import CheckFailedError, InputError, NothingMatchedError
from attnrewrite.passes.verify import known_error

FUZZ = os.environ.get("ATTNREWRITE_FUZZ")
SEEDS, EXAMPLES = (range(1), 6) if FUZZ is None else (range(int(FUZZ) * 100, int(FUZZ) * 100 + 100), 20)
OPSETS = range(11, 21)
ROUNDING = 1e-3  # of float32 on both sides, by sums in other orders
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink], report_multiple_bugs=False,
)  # fmt: skip


def verdict(recipe: Recipe, opset: int, folder: Path) -> str:
    """What becomes of the file: "not written", "refused", "stopped" or "equal"; or it "jumps" and nobody can tell.

    Raises AssertionError where it is wrong.
    """
    model, given, new = build(recipe), example(recipe), inputs(recipe, 3, seed=1)
    file, arrays = folder / "model.onnx", [tensor.numpy() for tensor in new]
    names = [f"x{place}" for place in range(len(given))]
    axes = {name: {0: f"batch_{name}"} for name in (*names, "y")}
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                copy.deepcopy(model), given, file, dynamo=False, opset_version=opset, input_names=names,
                output_names=["y"], dynamic_axes=axes,
            )  # fmt: skip
        (before,) = run(ir.load(file), *arrays)
    except Exception:  # the exporter lacks operators, drops inputs, and writes what onnxruntime does not take
        return "not written"
    own, allowed = answers(model, new), 5e-2 if unrounded(recipe) != recipe else ROUNDING
    if not known_error(torch.from_numpy(before), own["answer"]) <= allowed:
        return "not written"  # but as another model
    if "answer" in jumps(model, build(unrounded(recipe)), new, own, allowed):
        return "jumps"
    try:
        done = ar.convert(file, variant="softmax")
        written = done.save(folder / "out") / "model.onnx"
    except (InputError, NothingMatchedError):
        return "refused"
    except CheckFailedError:
        return "stopped"
    (after,) = run(ir.load(written), *arrays)
    with torch.no_grad():
        module = done.module(*new)
    for wanted in (before, module[0] if isinstance(module, tuple) else module):
        assert known_error(torch.from_numpy(after), torch.as_tensor(np.asarray(wanted))) <= allowed
    return "equal"


@pytest.mark.parametrize("number", SEEDS)
def test_drawn_disturbances_in_a_file_are_understood_refused_or_stopped(number: int, tmp_path: Path) -> None:
    told, places = [], count()

    @seed(number)
    @PROFILE
    @given(recipe=recipes, opset=st.sampled_from(OPSETS))
    def judge(recipe: Recipe, opset: int) -> None:
        if recipe.layout == "windows":  # a mask of each window has a batch that no file tells from the images'
            recipe = replace(recipe, mask="none")
        folder = tmp_path / str(next(places))
        folder.mkdir()
        told.append(verdict(recipe, opset, folder))

    judge()
    assert "equal" in told
