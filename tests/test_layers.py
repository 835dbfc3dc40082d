"""Rules that no type checker sees: imports point downward, heavy packages stay behind doors, folders have one name."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "attnrewrite": ROOT / "attnrewrite",
    "attnrewrite.variants": ROOT / "attnrewrite" / "variants",
    "attnrewrite.patterns": ROOT / "patterns",
    "attnrewrite.passes": ROOT / "passes",
    "attnrewrite.targets": ROOT / "targets",
}
MODULES = {
    f"{package}.{path.stem}".removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.py"))
}
# Lowest first. A module may import its own floor and those below; what is not listed is the workflow's.
FLOORS = (
    ("attnrewrite.errors", "attnrewrite.site", "attnrewrite._torchvision"),
    ("attnrewrite.patterns",),
    ("attnrewrite.variants",),
    ("attnrewrite.einsum", "attnrewrite.capture", "attnrewrite.plan", "attnrewrite.passes"),
    ("attnrewrite.targets",),
    (),
    ("attnrewrite.cli", "attnrewrite.__main__"),
)
WORKFLOW = len(FLOORS) - 2
HEAVY = {
    "coremltools",
    "jinja2",
    "matplotlib",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "timm",
    "torchvision",
    "transformers",
    "tvm",
}
# Packages whose names change between releases have one door each: these modules, or names that begin so.
DOORS = {
    "tvm": ("attnrewrite.targets.tvm_compat",),
    "coremltools": ("attnrewrite.targets.coreml", "attnrewrite.targets.mil", "attnrewrite.passes.coreml"),
}
# What these are named after is all they are about: they import it at their top, and others import them in functions.
DEVOTED = {
    "onnx": ("attnrewrite.patterns.onnx", "attnrewrite.passes.onnx", "attnrewrite.onnx_"),
    "onnx_ir": ("attnrewrite.patterns.onnx", "attnrewrite.passes.onnx", "attnrewrite.onnx_"),
}


def floor(module: str) -> int:
    for level, names in enumerate(FLOORS):
        if any(module == name or module.startswith((f"{name}.", f"{name}_")) for name in names):
            return level
    return WORKFLOW


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that the code imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


def loaded(tree: ast.Module) -> Iterator[str]:
    """The packages that importing the module imports."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Try | ast.With):
            yield from (name.split(".")[0] for name in imports(ast.Module([node], [])))


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    # The package itself offers what is above it: its names are fetched when asked for.
    own = WORKFLOW if module == "attnrewrite" else floor(module)
    ours = [name for name in imports(parse(module)) if name.split(".")[0] == "attnrewrite" and name != "attnrewrite"]
    assert [name for name in ours if floor(name) > own] == []


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_imported_inside_functions_and_by_their_own_door(module: str) -> None:
    tree = parse(module)
    own = {package for package, modules in DEVOTED.items() if module.startswith(modules)}
    assert HEAVY.intersection(loaded(tree)) <= own
    for package, doors in DOORS.items():
        if package in {name.split(".")[0] for name in imports(tree)}:
            assert module.startswith(doors), f"{package} is reached only through {', '.join(doors)}"


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_one_idea_a_file(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, attnrewrite; print(*{name.split('.')[0] for name in sys.modules})"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert HEAVY.intersection(printed.split()) == set()


def test_the_wheel_lists_every_package_and_every_data_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(project["packages"]) == sorted(FOLDERS)
    for package, folder in FOLDERS.items():
        assert [path.parent.name for path in folder.glob("*/__init__.py") if not path.parent.is_symlink()] == (
            ["variants"] if package == "attnrewrite" else []
        ), f"{package} has a subpackage that the wheel would miss"
        data = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
        listed = {path.name for pattern in project["package-data"].get(package, ()) for path in folder.glob(pattern)}
        assert data == listed, f"package-data of {package}"


@pytest.mark.parametrize("name", ["patterns", "passes", "targets"])
def test_a_folder_has_one_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"import attnrewrite.{name}, not {name}"):
        importlib.import_module(name)
