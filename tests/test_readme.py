"""The README's commands and programs run as they stand, from the root of a checkout, in the order they are read."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnrewrite.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The examples stand for themselves: what is above them, and they, need nothing of each other.
PARTS = README.partition("\n## Examples\n")[::2]
BLOCKS = [re.findall(r"^```(sh|python)\n(.*?)^```", part, re.DOTALL | re.MULTILINE) for part in PARTS]
COMMANDS = [
    [shlex.split(line, comments=True) for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    for blocks in BLOCKS
]
# What takes minutes runs in `make demo`; here the same command does less.
LESS = {
    "examples/digits.py": ["--samples", "40"],
    "convert": ["--samples", "16"],
    "lower": ["--dry-run"],
    "compare": ["--dry-run"],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout, and whose out/ is its own."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(command: list[str]) -> None:
    """A line of the README in this process; what `variants` and `targets` need little for also as it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("examples")
        patch.setattr(sys, "argv", command[command[0] == "python" :])
        if command[0] == "python":
            runpy.run_path(command[1], run_name="__main__")
        else:
            assert main(command[1:]) == 0, shlex.join(command)
    if command[1:] in (["variants"], ["targets"]):
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        subprocess.run(command, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, check=True)


def test_every_verb_is_shown() -> None:
    shown = {command[1] for part in COMMANDS for command in part if command[0] == "attnrewrite"}
    assert shown == {"explain", "convert", "evaluate", "lower", "variants", "targets", "compare"}


@pytest.mark.parametrize("part", range(len(PARTS)), ids=["the road", "the examples"])
def test_commands_then_programs_run_in_order(
    part: int, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    commands = [command for command in COMMANDS[part] if command[0] != "make"]
    for command in commands:
        run(command + (["--dry-run"] if "auto" in command else LESS.get(command[1], [])))
    for number, program in enumerate(block for kind, block in BLOCKS[part] if kind == "python"):
        (tmp_path / f"program{number}.py").write_text(program, encoding="utf-8")
        run(["python", str(tmp_path / f"program{number}.py")])
    assert any((checkout / "out").iterdir())
    assert part or (checkout / "out" / "report.html").is_file()


def test_every_make_target_that_is_named_exists() -> None:
    named = {command[1] for part in COMMANDS for command in part if command[0] == "make"} | set(
        re.findall(r"`make (\w+)", README)
    )
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= targets


def test_every_local_link_leads_somewhere() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "benchmarks/README.md"):
        page = ROOT / name
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{name} links to {link}"


def test_every_variant_and_target_is_named() -> None:
    from attnrewrite.targets.base import BUILT_IN as TARGETS
    from attnrewrite.variants.registry import BUILT_IN as VARIANTS

    quoted = set(re.findall(r"`([a-z0-9-]+)`", README))
    assert {variant.name for variant in VARIANTS} <= quoted
    assert set(TARGETS) <= quoted
