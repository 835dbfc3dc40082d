"""What is known of the Neural Engine, rule by rule: an operator that breaks it and one that does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnrewrite.cli.main import main
from attnrewrite.targets.coreml import engine_rules

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

HALF = np.float16


def of(shape: tuple[int, ...], build: Callable[[Any], Any], dtype: Any = types.fp16) -> Any:
    """The program of one function on one input."""
    specs = [mb.TensorSpec(shape=shape, dtype=dtype)]
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: build(x))


def weight(*shape: int) -> np.ndarray:
    return np.ones(shape, HALF)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "rank": (
        lambda: of((2, 64), lambda x: mb.relu(x=mb.reshape(x=x, shape=[1, 2, 2, 2, 2, 8]))),
        lambda: of((2, 64), lambda x: mb.relu(x=mb.reshape(x=x, shape=[2, 2, 2, 2, 8]))),
    ),
    "linear-rank": (
        lambda: of((1, 2, 3, 4, 64), lambda x: mb.linear(x=x, weight=weight(32, 64))),
        lambda: of((2, 3, 4, 64), lambda x: mb.linear(x=x, weight=weight(32, 64))),
    ),
    "product-rank": (
        lambda: of((1, 2, 3, 32, 32), lambda x: mb.matmul(x=x, y=x)),
        lambda: of((2, 3, 32, 32), lambda x: mb.matmul(x=x, y=x)),
    ),
    "axis-length": (
        lambda: of((1, 16385), lambda x: mb.relu(x=x)),
        lambda: of((1, 16384), lambda x: mb.relu(x=x)),
    ),
    "kernel-width": (
        lambda: of((1, 8, 32, 64), lambda x: mb.conv(x=x, weight=weight(8, 8, 1, 14))),
        lambda: of((1, 8, 32, 64), lambda x: mb.conv(x=x, weight=weight(8, 8, 14, 13))),
    ),
    "no-path": (
        lambda: of((1, 64), lambda x: mb.band_part(x=x, lower=1, upper=1)),
        lambda: of((1, 64), lambda x: mb.relu(x=x)),
    ),
    "gather": (
        lambda: of((8, 64), lambda x: mb.gather(x=x, indices=np.array([1, 0], np.int32), axis=0)),
        lambda: of((8, 64), lambda x: mb.slice_by_index(x=x, begin=[0, 0], end=[2, 64])),
    ),
    "wide-type": (
        lambda: of((8, 64), lambda x: mb.relu(x=x), types.fp32),
        lambda: of((8, 64), lambda x: mb.relu(x=mb.cast(x=x, dtype="fp16")), types.fp32),
    ),
    "open-shape": (
        lambda: of((mb_symbol(), 64), lambda x: mb.relu(x=x)),
        lambda: of((1, 64), lambda x: mb.relu(x=x)),
    ),
    "epsilon": (
        lambda: of((8, 64), lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=HALF(0))),
        lambda: of((8, 64), lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=HALF(1e-5))),
    ),
    "resize": (
        lambda: of((1, 2, 32, 32), lambda x: mb.upsample_nearest_neighbor(x=x, scale_factor_height=2)),
        lambda: of((1, 2, 32, 32), lambda x: mb.relu(x=x)),
    ),
    "sine": (
        lambda: of((1, 64), lambda x: mb.cos(x=x)),
        lambda: of((1, 64), lambda x: mb.tanh(x=x)),
    ),
    "padding": (
        lambda: of((2**15 + 1, 16), lambda x: mb.relu(x=x)),
        lambda: of((2**15, 16), lambda x: mb.relu(x=x)),  # 2 MB, padding and all
    ),
    "tile": (
        lambda: of((1024, 1025), lambda x: mb.relu(x=x)),
        lambda: of((1, 1024, 1024), lambda x: mb.softmax(x=x, axis=-1)),
    ),
    "transpose": (
        lambda: of((1, 64, 32), lambda x: mb.transpose(x=x, perm=[0, 2, 1])),
        lambda: of((1, 64, 32), lambda x: mb.reshape(x=x, shape=[1, 32, 64])),
    ),
    "transpose-batch": (
        lambda: of((2, 64, 32), lambda x: mb.transpose(x=x, perm=[1, 0, 2])),
        lambda: of((2, 64, 32), lambda x: mb.transpose(x=x, perm=[0, 2, 1])),
    ),
}


def mb_symbol() -> Any:
    from coremltools.converters.mil.mil import get_new_symbol

    return get_new_symbol()


def test_every_rule_has_its_cases() -> None:
    assert list(CASES) == [rule.id for rule in engine_rules.RULES]
    assert all(rule.what and rule.why and rule.source for rule in engine_rules.RULES)


def test_weights_are_no_live_operands() -> None:
    program = of((8, 1024), lambda x: mb.linear(x=x, weight=weight(1025, 1024)))
    assert engine_rules.lint(program).breaking("tile") == ()


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_sees_what_breaks_it_and_nothing_else(rule: str) -> None:
    broken, clean = (engine_rules.lint(make()) for make in CASES[rule])
    assert len(broken.breaking(rule)) >= 1
    assert clean.breaking(rule) == ()


def test_shares_are_of_what_no_rule_takes_away() -> None:
    def build(x: Any) -> Any:
        kept = mb.linear(x=x, weight=weight(32, 64))
        return mb.linear(x=mb.gather(x=kept, indices=np.array([1, 0], np.int32), axis=0), weight=weight(48, 32))

    report = engine_rules.lint(of((8, 64), build))
    assert [each.multiply_adds for each in report.operators] == [8 * 64 * 32, 0, 2 * 32 * 48]
    assert report.staying() == (1.0, 2 / 3)
    assert "a gather or top-k (1)" in report.sentence()


def test_products_and_convolutions_are_counted() -> None:
    def build(x: Any) -> Any:
        made = mb.conv(x=x, weight=weight(6, 2, 3, 3), groups=2, strides=[2, 2], pad_type="same")  # [1, 6, 4, 4]
        return mb.matmul(x=made, y=made, transpose_y=True)

    report = engine_rules.lint(of((1, 4, 8, 8), build))
    assert [each.multiply_adds for each in report.operators] == [6 * 16 * 18, 6 * 64]
    assert report.multiply_adds == 6 * 16 * 18 + 6 * 64


def test_explain_reads_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    program = of((8, 64), lambda x: mb.cos(x=mb.gather(x=x, indices=np.array([1, 0], np.int32), axis=0)))
    path = tmp_path / "some.mlpackage"
    ct.convert(program, minimum_deployment_target=ct.target.iOS17, skip_model_load=True).save(str(path))
    assert main(["explain", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["model", "frontend", "operators", "multiply_adds", "staying", "rules"]
    assert (told["model"], told["frontend"]) == ("some.mlpackage", "coreml")
    found = {rule["id"]: rule for rule in told["rules"] if rule["operators"]}
    assert {"gather", "sine"} <= set(found)
    assert found["gather"]["cost"] == "leaves"
    assert main(["explain", str(path)]) == 0
    assert "stays on newer engines" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["missing.mlpackage"], ["some.mlpackage", "--graph", "graph.html"]])
def test_a_package_that_cannot_be_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
