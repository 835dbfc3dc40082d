"""What targets there are, and the check that every artifact passes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from foreign import lay_down, site_folder

from attnrewrite.cli.main import main
from attnrewrite.errors import CheckFailedError, InputError, Refusal
from attnrewrite.targets import agreement as check
from attnrewrite.targets import base
from attnrewrite.targets.devices.host import Host


def test_the_built_in_targets_go_by_their_names() -> None:
    found = base.targets()
    assert list(found) == ["host", "arm-cpu", "gpu", "coreml-npu"]
    assert all(target.name == name and target.summary for name, target in found.items())


def test_an_unknown_target_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown target 'arm': did you mean 'arm-cpu'"):
        base.get_target("arm")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder on the path in which packages can be laid down as pip would."""
    with site_folder(tmp_path / "site", base.REGISTRY) as folder:
        yield folder


TOASTER = """
from attnrewrite.targets.base import Availability, Target

class Toaster(Target):
    name = "toaster"
    summary = "makes it warm"

    def availability(self):
        return Availability(None, None)

    def lower(self, name, module, example_inputs, out, *, threads): ...

    def runs(self, name, module, example_inputs, *, threads):
        return ()
"""


def test_installed_packages_add_targets(site: Path) -> None:
    lay_down(site, "toasters", base.GROUP, {"toaster": "toasters:Toaster"}, TOASTER)
    assert list(base.targets()) == [*base.BUILT_IN, "toaster"]
    assert base.get_target("toaster").summary == "makes it warm"
    assert base.unusable() == {}


# What is wrong: (the module's text, what is said of it).
BROKEN = {
    "an import that fails": ("import no_such_module", "does not load, ModuleNotFoundError: No module named"),
    "a module that exits": ("raise SystemExit(1)", "does not load, SystemExit: 1"),
    "another class": ("class Toaster: ...", "is not a subclass of attnrewrite.targets.base.Target"),
    "no summary": (TOASTER.replace("summary", "summery"), "has no summary, which is to be a string"),
    "another name": (TOASTER.replace('"toaster"', '"kettle"'), "calls itself 'kettle'"),
    "no lower": (TOASTER.replace("def lower", "def raise_"), "does not define lower"),
    "no runs": (TOASTER.replace("def runs", "def walks"), "does not define runs"),
    "no availability": (TOASTER.replace("def availability", "def ability"), "does not define availability"),
    "an availability that exits": (
        TOASTER.replace("return Availability(None, None)", "exit(3)"),
        "cannot be made with its defaults, SystemExit: 3",
    ),
    "an availability in words": (
        TOASTER.replace("(None, None)", "(None, 'it is cold')"),
        "has an availability() that is not an Availability of None or Refusal",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_target_is_listed_with_the_reason_and_nothing_else_suffers(
    case: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = BROKEN[case]
    lay_down(site, "toasters", base.GROUP, {"toaster": "toasters:Toaster"}, text)
    assert main(["targets", "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert [each["name"] for each in told["targets"]] == list(base.BUILT_IN)
    assert list(told["unusable"]) == ["toaster"]
    whole = told["unusable"]["toaster"]
    assert whole.startswith("target 'toaster' of toasters (toasters:Toaster) ")
    assert said in whole
    assert printed.err == f"note: left out: {whole}\n"
    with pytest.raises(InputError) as error:
        base.get_target("toaster")
    assert str(error.value) == whole


def test_a_built_in_target_keeps_its_name(site: Path) -> None:
    text = TOASTER.replace('"toaster"', '"host"')
    lay_down(site, "hosts", base.GROUP, {"host": "hosts:Toaster"}, text)
    assert isinstance(base.targets()["host"], Host)
    assert isinstance(base.get_target("host"), Host)
    whole = "target 'host' of hosts (hosts:Toaster) takes a name that is in use by attnrewrite"
    assert base.unusable() == {"host": f"{whole}: mend or uninstall the package"}


def test_the_list_of_targets_says_yes_or_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Host, "availability", lambda self: base.Availability(Refusal("cold", "it is cold"), None))
    assert main(["targets", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    host = told["targets"][0]
    assert (host["name"], host["build"], host["measure"]) == ("host", "it is cold", True)
    assert told["unusable"] == {}


def test_an_artifact_lists_what_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.so").write_bytes(b"12345")
    (tmp_path / "model.mlpackage").mkdir()
    (tmp_path / "model.mlpackage" / "weights.bin").write_bytes(b"123")
    target = base.get_target("host")
    made = target.artifact("vit", tmp_path, check.Agreement(0.5, 1.0), check="looked at it", schedule="none")
    assert made.files == ("artifact.json", "model.mlpackage", "model.so")
    record = (tmp_path / "artifact.json").stat().st_size
    assert (made.size_bytes - record, made.max_abs_error, made.tolerance, made.target) == (8, 0.5, 1.0, "host")


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


def test_errors_below_the_smallest_normal_number_are_none() -> None:
    tiny = np.array([1e-39, 3e-42], np.float32)
    assert check.agree("it", [np.zeros_like(tiny)], [tiny], relative=1e-6).max_abs_error == 0
    with pytest.raises(CheckFailedError, match=r"by 1\.2e-38"):
        check.agree("it", [np.zeros(2, np.float32)], [np.full(2, 1.2e-38, np.float32)], relative=1e-6)


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
