"""The README's commands and programs run as they stand, from the root of a checkout, in the order they are read."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line, comments=True) for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
# What takes minutes runs in `make demo`; here the same command does less.
LESS = {
    "examples/digits.py": ["--samples", "40"],
    "convert": ["--samples", "16"],
    "lower": ["--dry-run"],
    "compare": ["--dry-run"],
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, and whose out/ is its own."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def run(checkout: Path, command: list[str]) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), str(ROOT), os.environ.get("PATH", "")))
    done = subprocess.run(command, cwd=checkout, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-2000:]}"


def test_commands_then_programs_run_in_order(checkout: Path) -> None:
    run_ = [command for command in COMMANDS if command[0] != "make"]
    assert {command[1] for command in run_ if command[0] == "attnrewrite"} == {
        "explain", "convert", "evaluate", "lower", "variants", "targets", "compare",
    }  # fmt: skip
    for command in run_:
        run(checkout, command + (["--dry-run"] if "auto" in command else LESS.get(command[1], [])))
    for program in (block for kind, block in BLOCKS if kind == "python"):
        run(checkout, [sys.executable, "-c", program])
    assert (checkout / "out" / "report.html").is_file()


def test_every_make_target_that_is_named_exists() -> None:
    named = {command[1] for command in COMMANDS if command[0] == "make"} | set(re.findall(r"`make (\w+)", README))
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
