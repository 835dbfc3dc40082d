"""Names and options: what is accepted, and what the error says when it is not; variants of other packages."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from foreign import lay_down, site_folder

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import load_source
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.plan import Plan
from attnrewrite.variants.registry import BUILT_IN, REGISTRY, get_variant, option_values, unusable, variants

PACKAGE = Path(__file__).with_name("third_party_variant")
ACCEPTED = [
    ("l1", {}, {"centred": True, "order": "auto"}),
    ("l1", {"centred": "false", "order": "kv"}, {"centred": False, "order": "kv"}),
    ("l1", {"centred": False, "exact_prefix": "off"}, {"centred": False, "exact_prefix": False}),
    ("relu-linear", {"local": "true"}, {"local": True}),
    ("masked", {"heads": "0, 2"}, {"heads": [0, 2]}),
]
REFUSED = [
    ("l2", {}, "did you mean 'l1'"),
    ("l1", {"centered": "true"}, "did you mean 'centred'"),
    ("l1", {"order": "vk"}, "l1: order='vk' is not auto or qk or kv"),
    ("l1", {"centred": "maybe"}, "l1: centred='maybe' is not true or false"),
    ("masked", {"size": "3.5"}, "masked: size='3.5' is not a whole number"),
    ("masked", {"size": 4}, "masked: size=4 must be odd and at least 3"),
    ("additive", {"queries": -1}, "additive: queries=-1 must be at least 1, or 0 for one per head"),
    ("masked", {"heads": "0,first"}, "or a whole number or a comma-separated list of whole numbers"),
]


@pytest.mark.parametrize(("name", "options", "expected"), ACCEPTED)
def test_options_are_parsed_by_the_type_of_their_field(name: str, options: dict, expected: dict) -> None:
    values = option_values(get_variant(name, options))
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_errors_name_the_option_and_the_way_out(name: str, options: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        get_variant(name, options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", sorted(variants()))
def test_every_variant_describes_itself_and_its_options_survive_a_round_trip(name: str) -> None:
    variant = get_variant(name)
    assert variant.name == name
    assert variant.summary
    assert variant.source
    assert get_variant(name, option_values(variant)) == variant


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder on the path in which packages can be laid down as pip would, and that is forgotten afterwards."""
    with site_folder(tmp_path / "site", REGISTRY) as folder:
        yield folder


def lay_down_pooled(site: Path) -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copy(PACKAGE / "pooled_attention.py", site)
    lay_down(site, project["name"], REGISTRY.group, project["entry-points"][REGISTRY.group])


def test_a_package_makes_its_variant_known_to_every_command(site: Path, tmp_path: Path, models_file: Path) -> None:
    lay_down_pooled(site)

    def attnrewrite(*arguments: str | Path) -> dict:
        command = [sys.executable, "-m", "attnrewrite", *map(str, arguments), "--json"]
        path = os.pathsep.join((str(site), str(Path(__file__).parents[2])))
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    listed = {each["name"]: each for each in attnrewrite("variants")["variants"]}
    assert list(listed) == [*(variant.name for variant in BUILT_IN), "pooled"]
    assert listed["pooled"]["options"] == {
        "exact_prefix": True,
        "local": False,
        "approximate": False,
        "bias_rank": 8,
        "grid": None,
        "own": 0.25,
    }
    how = (f"{models_file}:vit", "--input-size", "3x16x16", "--variant", "pooled", "--option", "own=0.5")
    told = attnrewrite("convert", *how, "--out", tmp_path / "out")
    assert [(each["variant"], each["options"]["own"]) for each in told["sites"]] == [("pooled", 0.5)] * 2


def test_a_plan_with_it_is_read_and_applied_where_the_package_is_installed(
    site: Path, tmp_path: Path, models_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down_pooled(site)
    source = load_source(f"{models_file}:vit", input_size="3x16x16")
    done = ar.convert(source, variant="pooled", options={"own": "0.5"}, keep=["site1"])
    done.save(tmp_path / "out")
    x = torch.randn(2, 3, 16, 16)
    again, _ = FxRewrite(Plan.load(tmp_path / "out")).apply(capture("vit", source.model, source.example_inputs).module)
    with torch.no_grad():
        assert torch.equal(again(x), done.module(x))
    REGISTRY.forget()
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(site)])  # as if uninstalled
    with pytest.raises(InputError, match="unknown variant 'pooled'"):
        Plan.load(tmp_path / "out")
    program = load_source(tmp_path / "out").program  # holds plain operators, and needs no package
    assert program is not None
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), done.module(x))


def test_its_options_are_checked_as_the_built_in_ones_are(site: Path) -> None:
    lay_down_pooled(site)
    for options, message in (
        ({"own": "2"}, "pooled: own=2.0 must lie between 0 and 1"),
        ({"own": "much"}, "pooled: own='much' is not a number"),
        ({"won": "1"}, "unknown option of pooled 'won': did you mean 'own'?"),
    ):
        with pytest.raises(InputError) as error:
            get_variant("pooled", options)
        assert message in str(error.value)


BASE = """
from dataclasses import dataclass
from attnrewrite.variants.base import Variant
from attnrewrite.variants.softmax import Softmax

@dataclass(frozen=True, kw_only=True)
class Broken(Softmax):
    name = "broken"
"""
# What is wrong: (the module, what the entry point names in it, what is said of it).
BROKEN: dict[str, tuple[str, str, str]] = {
    "an import that fails": (
        "import no_such_module",
        "Broken",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "a syntax error": ("def (", "Broken", "does not load, SyntaxError: "),
    "an error in several lines": ("raise OSError('no\\nway')", "Broken", "does not load, OSError: no way"),
    "a module that exits": ("raise SystemExit(1)", "Broken", "does not load, SystemExit: 1"),
    "no such class": (BASE, "Brokn", "does not load, AttributeError: "),
    "an object": (BASE + "made = Broken()", "made", "is not a subclass of attnrewrite.variants.base.Variant"),
    "another class": ("class Broken: ...", "Broken", "is not a subclass of attnrewrite.variants.base.Variant"),
    "another name": (
        BASE.replace('"broken"', '"fixed"'),
        "Broken",
        "calls itself 'fixed', and is found by the name it is registered with",
    ),
    "no name": (BASE.replace("Softmax)", "Variant)").replace("name =", "nom ="), "Broken", "has no name"),
    "no method": (
        BASE.replace("Softmax)", "Variant)") + '    summary = source = "nothing"',
        "Broken",
        "does not define refuse",
    ),
    "no default": (BASE + "    share: float", "Broken", "cannot be made with its defaults, TypeError: "),
    "a default out of its range": (
        BASE + "    def __post_init__(self):\n        raise ValueError('share must be above 0')",
        "Broken",
        "cannot be made with its defaults, ValueError: share must be above 0",
    ),
    "an option of an odd type": (
        BASE + "    share: complex = 1j",
        "Broken",
        "cannot be made with its defaults, InputError: broken: share=1j is not a complex",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_told_in_one_line_and_nothing_else_suffers(
    case: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, value, message = BROKEN[case]
    lay_down(site, "broken-attention", REGISTRY.group, {"broken": f"broken_attention:{value}"}, text)
    lay_down_pooled(site)
    assert main(["variants", "--json"]) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    whose = f"variant 'broken' of broken-attention (broken_attention:{value})"
    assert line.startswith(f"note: left out: {whose} ")
    assert message in line
    assert line.endswith(": mend or uninstall the package")
    told = json.loads(printed.out)
    assert [each["name"] for each in told["variants"]] == [*(variant.name for variant in BUILT_IN), "pooled"]
    assert told["unusable"] == {"broken": line.removeprefix("note: left out: ")}
    with pytest.raises(InputError) as error:
        get_variant("broken")
    assert str(error.value) == told["unusable"]["broken"]


def test_a_name_is_kept_by_whoever_has_it_first(site: Path) -> None:
    shutil.copy(PACKAGE / "pooled_attention.py", site)
    lay_down(site, "a-package", REGISTRY.group, {"l1": "pooled_attention:Pooled", "pooled": "pooled_attention:Pooled"})
    lay_down(site, "b-package", REGISTRY.group, {"pooled": "pooled_attention:Pooled"})
    known = variants()
    assert known["l1"] in BUILT_IN
    assert known["pooled"].__name__ == "Pooled"
    assert {name: told.partition(") ")[2] for name, told in unusable().items()} == {
        "l1": "takes a name that is in use by attnrewrite: mend or uninstall the package",
        "pooled": "takes a name that is in use by a-package: mend or uninstall the package",
    }
    assert get_variant("pooled").name == "pooled"
