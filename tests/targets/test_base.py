"""What targets there are, and the check that every artifact passes."""

import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets import base


def test_the_built_in_targets_go_by_their_names() -> None:
    found = base.targets()
    assert list(found) == ["host", "arm-cpu", "gpu", "coreml-npu"]
    assert all(target.name == name and target.summary for name, target in found.items())


def test_an_unknown_target_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown target 'arm': did you mean 'arm-cpu'"):
        base.get_target("arm")


def test_installed_packages_add_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Toaster(base.Target):
        name = "toaster"

    module = types.ModuleType("toasters")
    module.Toaster = Toaster
    monkeypatch.setitem(sys.modules, "toasters", module)
    points = [EntryPoint("toaster", "toasters:Toaster", base.GROUP), EntryPoint("kettle", "no_such:Kettle", base.GROUP)]
    monkeypatch.setattr(base, "entry_points", lambda group: points if group == base.GROUP else [])
    assert isinstance(base.get_target("toaster"), Toaster)
    with pytest.raises(InputError, match=r"target plug-in 'kettle' \(no_such:Kettle\) cannot be loaded"):
        base.get_target("kettle")


def test_an_artifact_lists_what_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.so").write_bytes(b"12345")
    (tmp_path / "model.mlpackage").mkdir()
    (tmp_path / "model.mlpackage" / "weights.bin").write_bytes(b"123")
    target = base.get_target("host")
    made = target.artifact("vit", tmp_path, check.Agreement(0.5, 1.0), check="looked at it", schedule="none")
    assert made.files == ("model.mlpackage", "model.so")
    assert (made.size_bytes, made.max_abs_error, made.tolerance, made.target) == (8, 0.5, 1.0, "host")


EXPECTED = np.array([[1.0, -4.0, 2.0]], np.float32)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (EXPECTED, 0.0),
        (EXPECTED + np.float32(0.25), 0.25),
    ],
)
def test_agreement_within_the_tolerance(found: np.ndarray, error: float) -> None:
    agreement = check.agree("it", [found], [EXPECTED], relative=0.1)
    assert agreement == check.Agreement(error, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([EXPECTED + 0.5], "it: its output differs from the module's by 0.5 on the same input, more than the 0.4"),
        ([EXPECTED * np.nan], "differs from the module's by inf"),
        ([np.where(EXPECTED < 0, -np.inf, EXPECTED)], "differs from the module's by inf"),
        ([EXPECTED[0]], r"its outputs have the shapes \[\(3,\)\], the module's have \[\(1, 3\)\]"),
        ([], r"its outputs have the shapes \[\]"),
        ([EXPECTED, EXPECTED], "its outputs have the shapes"),
    ],
)
def test_disagreement_names_the_artifact_and_the_error(found: list[np.ndarray], said: str) -> None:
    with pytest.raises(CheckFailedError, match=said):
        check.agree("it", found, [EXPECTED], relative=0.1)


def test_the_worst_output_counts_by_its_own_scale() -> None:
    large, small = np.array([1000.0]), np.array([1.0])
    with pytest.raises(CheckFailedError, match=r"by 0\.5"):
        check.agree("it", [large + 0.9, small + 0.5], [large, small], relative=0.01)
