"""The registry of what other packages add: what is taken, what is left out and why, and who keeps a name."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign import lay_down, site_folder

from attnrewrite.errors import InputError, Refusal
from attnrewrite.plugins import Registry, Rules


class Tool:
    """The kind of thing that is registered here."""

    name: str
    summary: str

    def use(self) -> str | None:
        raise NotImplementedError


class PowerTool(Tool):
    """A special kind, whose subclasses define something else."""

    def use(self) -> str | None:
        return self.power()

    def power(self) -> str | None:
        raise NotImplementedError


class Hammer(Tool):
    name = "hammer"
    summary = "drives nails"

    def use(self) -> str | None:
        return None


def try_out(tool: Tool) -> Refusal | None:
    said = tool.use()
    return None if said is None else Refusal("useless", f"says {said!r} when it is used")


GROUP = "attnrewrite.tools"
RULES = Rules(Tool, ("summary",), {PowerTool: ("power",), Tool: ("use",)}, try_out)
# What the modules below begin with: the classes above, by whatever name this file is imported.
HEAD = f"""
import sys
tests = sys.modules[{__name__!r}]

class Saw(tests.Hammer):
    name = "saw"
"""


@pytest.fixture
def registry() -> Registry[Tool]:
    return Registry("tool", GROUP, lambda: {"hammer": Hammer}, RULES)


@pytest.fixture
def site(tmp_path: Path, registry: Registry[Tool]) -> Iterator[Path]:
    with site_folder(tmp_path / "site", registry) as folder:
        yield folder


def test_without_packages_there_is_what_is_built_in(site: Path, registry: Registry[Tool]) -> None:
    assert registry.usable() == {"hammer": Hammer}
    assert registry.unusable() == {}
    assert registry.get("hammer") is Hammer


def test_a_package_adds_to_it(site: Path, registry: Registry[Tool]) -> None:
    lay_down(site, "sharp-tools", GROUP, {"saw": "sharp_tools:Saw"}, HEAD)
    assert list(registry.usable()) == ["hammer", "saw"]
    assert registry.get("saw").__module__ == "sharp_tools"
    assert registry.unusable() == {}


def test_an_unknown_name_suggests_the_nearest(site: Path, registry: Registry[Tool]) -> None:
    lay_down(site, "sharp-tools", GROUP, {"saw": "sharp_tools:Saw"}, HEAD)
    with pytest.raises(InputError, match=r"unknown tool 'hamer': did you mean 'hammer'\? known are hammer, saw"):
        registry.get("hamer")


def test_a_built_in_class_is_found_without_loading_foreign_code(site: Path, registry: Registry[Tool]) -> None:
    lay_down(site, "loud-tools", GROUP, {"saw": "loud_tools:Saw"}, "open(__file__ + '.loaded', 'w')" + HEAD)
    assert registry.get("hammer") is Hammer
    assert not (site / "loud_tools.py.loaded").exists()
    assert registry.get("saw").name == "saw"
    assert (site / "loud_tools.py.loaded").exists()


def test_what_is_installed_later_is_found_when_asked_to_look_again(site: Path, registry: Registry[Tool]) -> None:
    assert "saw" not in registry.usable()
    lay_down(site, "sharp-tools", GROUP, {"saw": "sharp_tools:Saw"}, HEAD)
    assert "saw" not in registry.usable()
    registry.forget()
    assert "saw" in registry.usable()


# What is wrong: (the module's text, what the entry point names in it, what is said).
METHOD = HEAD + "    def {}:\n        {}\n"
BROKEN: dict[str, tuple[str, str, str]] = {
    "an import that fails": ("import no_such_module", "Saw", "does not load, ModuleNotFoundError: No module named"),
    "a syntax error": ("def (", "Saw", "does not load, SyntaxError: "),
    "an error in several lines": ("raise OSError('no\\nway')", "Saw", "does not load, OSError: no way"),
    "an error without a text": ("raise OSError", "Saw", "does not load, OSError: no message"),
    "an error whose text fails": (
        "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd",
        "Saw",
        "does not load, Odd: no message",
    ),
    "a module that exits": ("raise SystemExit(1)", "Saw", "does not load, SystemExit: 1"),
    "a module that raises beyond Exception": ("raise GeneratorExit", "Saw", "does not load, GeneratorExit: no message"),
    "no such class": (HEAD, "Swa", "does not load, AttributeError: "),
    "an object": (HEAD + "made = Saw()", "made", "is not a subclass of "),
    "another class": ("class Saw: ...", "Saw", "is not a subclass of "),
    "a class that cannot be asked": (
        HEAD + "class Meta(type):\n    def __getattribute__(cls, name): raise RuntimeError(name)\n"
        "class Odd(tests.Hammer, metaclass=Meta): name = 'saw'",
        "Odd",
        "cannot be looked at, RuntimeError: ",
    ),
    "another name": (HEAD, "tests.Hammer", "calls itself 'hammer', and is found by the name it is registered with"),
    "no name": (HEAD + "    name = None", "Saw", "has no name, which is to be a string"),
    "no summary": (HEAD + "    summary = 7", "Saw", "has no summary, which is to be a string"),
    "no method": (HEAD.replace("Hammer", "Tool") + "    summary = ''", "Saw", "does not define use"),
    "no method of a special kind": (
        HEAD.replace("Hammer", "PowerTool") + "    summary = ''",
        "Saw",
        "does not define power",
    ),
    "arguments that it needs": (METHOD.format("__init__(self, x)", "pass"), "Saw", "with its defaults, TypeError: "),
    "a constructor that exits": (METHOD.format("__init__(self)", "exit(3)"), "Saw", "its defaults, SystemExit: 3"),
    "a use that fails": (METHOD.format("use(self)", "return self.x"), "Saw", "its defaults, AttributeError: "),
    "a use that refuses": (METHOD.format("use(self)", "return 'no'"), "Saw", "says 'no' when it is used"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_one_is_left_out_with_the_reason_and_nothing_else_suffers(
    case: str, site: Path, registry: Registry[Tool], caplog: pytest.LogCaptureFixture
) -> None:
    text, value, said = BROKEN[case]
    lay_down(site, "broken-tools", GROUP, {"saw": f"broken_tools:{value}"}, text)
    lay_down(site, "sharp-tools", GROUP, {"rasp": "sharp_tools:Rasp"}, HEAD + "class Rasp(Saw): name = 'rasp'")
    with caplog.at_level(logging.WARNING, "attnrewrite"):
        assert list(registry.usable()) == ["hammer", "rasp"]
        told = registry.unusable()
    assert list(told) == ["saw"]
    assert told["saw"].startswith(f"tool 'saw' of broken-tools (broken_tools:{value}) ")
    assert said in told["saw"]
    assert told["saw"].endswith(": mend or uninstall the package")
    assert "\n" not in told["saw"]
    assert [record.getMessage() for record in caplog.records] == [f"left out: {told['saw']}"]
    with pytest.raises(InputError) as error:
        registry.get("saw")
    assert str(error.value) == told["saw"]


def test_an_interrupt_while_foreign_code_loads_is_the_users(site: Path, registry: Registry[Tool]) -> None:
    lay_down(site, "slow-tools", GROUP, {"saw": "slow_tools:Saw"}, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.usable()


def test_a_clash_names_both_owners(site: Path, registry: Registry[Tool]) -> None:
    hammer = HEAD + "class Mallet(tests.Hammer): ..."
    lay_down(site, "b-tools", GROUP, {"saw": "b_tools:Saw"}, HEAD)
    lay_down(site, "a-tools", GROUP, {"hammer": "a_tools:Mallet", "saw": "a_tools:Saw"}, hammer)
    lay_down(site, "c-tools", GROUP, {"saw": "c_tools:Saw"}, HEAD)
    assert registry.usable()["hammer"] is Hammer
    assert registry.usable()["saw"].__module__ == "a_tools"
    end = ": mend or uninstall the package"
    assert registry.unusable() == {
        "hammer": f"tool 'hammer' of a-tools (a_tools:Mallet) takes a name that is in use by attnrewrite{end}",
        "saw": f"tool 'saw' of b-tools (b_tools:Saw) takes a name that is in use by a-tools{end}; "
        f"tool 'saw' of c-tools (c_tools:Saw) takes a name that is in use by a-tools{end}",
    }


def test_a_broken_one_keeps_no_name(site: Path, registry: Registry[Tool]) -> None:
    lay_down(site, "a-tools", GROUP, {"saw": "a_tools:Saw"}, "import no_such_module")
    lay_down(site, "b-tools", GROUP, {"saw": "b_tools:Saw"}, HEAD)
    assert registry.get("saw").__module__ == "b_tools"
    assert "tool 'saw' of a-tools (a_tools:Saw) does not load" in registry.unusable()["saw"]
