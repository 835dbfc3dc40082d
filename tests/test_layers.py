"""Rules that no type checker sees: imports point downward, heavy packages stay behind doors, folders have one name."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = ("patterns", "passes", "targets")  # folders at the top of the checkout that install below attnrewrite


def folders(top: Path, package: str) -> Iterator[tuple[str, Path]]:
    """Every package below `top` and its folder; links to the mapped folders are not followed."""
    yield package, top
    for below in sorted(path.parent for path in top.glob("*/__init__.py") if not path.parent.is_symlink()):
        yield from folders(below, f"{package}.{below.name}")


FOLDERS = dict(folders(ROOT / "attnrewrite", "attnrewrite"))
for name in MAPPED:
    FOLDERS |= folders(ROOT / name, f"attnrewrite.{name}")
MODULES = {
    f"{package}.{path.stem}".removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.py"))
}
# Rooms, lowest first: a module may import its own room and those on floors below it. A room is a folder; the files at
# the root of the package are rooms of their own.
FLOORS = (
    ("errors",),
    ("resources",),
    ("request", "site"),
    ("files", "plugins", "patterns"),
    ("outputs",),
    ("images", "patterns.fx", "patterns.onnx", "variants.parts"),
    ("variants",),
    ("plan",),
    ("passes",),
    ("passes.fx", "passes.onnx"),
    ("frontends.onnx", "targets", "targets.coreml.operators"),
    ("targets.coreml.passes",),
    ("frontends", "targets.runners", "targets.coreml", "targets.tvm.schedules"),
    ("targets.tvm.schedules.cpu",),
    (
        "targets.tvm.schedules.cpu.attention",
        "targets.tvm.schedules.cpu.int8",
        "targets.tvm.schedules.cpu.strassen",
        "targets.tvm.schedules.cpu.winograd",
    ),
    ("targets.tvm.schedules.cpu.convolution",),
    ("targets.tvm.schedules.pipelines",),
    ("targets.tvm",),
    ("targets.devices",),
    ("calibration", "evaluation"),
    ("selection", "pages"),
    ("pages.graph", "pages.maps"),
    ("conversion",),
    ("api",),
    ("cli",),
    ("__main__",),
)
LEVEL = {f"attnrewrite.{room}": level for level, rooms in enumerate(FLOORS) for room in rooms}
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
    "tvm": ("attnrewrite.targets.tvm.",),
    "coremltools": ("attnrewrite.targets.coreml.",),
}
ONNX = (
    "attnrewrite.patterns.onnx.",
    "attnrewrite.passes.onnx.",
    "attnrewrite.frontends.onnx",
    "attnrewrite.conversion.onnx_out",
)
# What these are named after is all they are about: they import it at their top, and others import them in functions.
SCHEDULES = ("attnrewrite.targets.tvm.schedules.",)
DEVOTED = {"onnx": ONNX, "onnx_ir": ONNX, "tvm": SCHEDULES}


def room(module: str) -> str:
    """The folder that a module lies in, or the module itself where that is the package's root."""
    package = module if module in FOLDERS else module.rpartition(".")[0]
    return module if package == "attnrewrite" else package


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


def ours(module: str) -> set[str]:
    """The modules of ours that a module imports, wherever in it and for whatever purpose."""
    return {name for name in imports(parse(module)) if name in MODULES} - {module, "attnrewrite"}


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in MODULES} - {"attnrewrite"} == set(LEVEL)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"attnrewrite"}))
def test_imports_point_downward(module: str) -> None:
    """A folder's own __init__ may offer what lies in the folder; nothing else points up."""
    own = room(module)
    door = MODULES[module].name == "__init__.py"
    above = [
        name
        for name in ours(module)
        if room(name) != own and LEVEL[room(name)] >= LEVEL[own] and not (door and name.startswith(f"{module}."))
    ]
    assert above == []


def test_no_two_modules_import_each_other() -> None:
    """Not even by way of others, inside functions or for type checkers only. Raises CycleError naming them."""
    graph = {module: ours(module) for module, path in MODULES.items() if path.name != "__init__.py"}
    order = list(TopologicalSorter(graph).static_order())
    assert set(graph) <= set(order)


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
    assert project["packages"] == sorted(FOLDERS)
    for package, folder in FOLDERS.items():
        data = {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc") and owner(path) == folder
        }
        patterns = project["package-data"].get(package, ())
        assert data == {str(path.relative_to(folder)) for each in patterns for path in folder.glob(each)}, package


def owner(path: Path) -> Path:
    """The folder of the package that a data file belongs to."""
    return next(folder for folder in path.parents if folder in FOLDERS.values())


@pytest.mark.parametrize("name", MAPPED)
def test_a_folder_has_one_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"import attnrewrite.{name}, not {name}"):
        importlib.import_module(name)
