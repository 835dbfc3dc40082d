"""A model from the user's own Python file, given as path/file.py:factory. This runs the file."""

import ast
import importlib.util
import sys
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch import nn

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.files import as_path, check_file
from attnrewrite.frontends.libraries import fixed_seed

# What lay beside the files that were run and is imported, by name; None where two folders have one of that name, so
# that neither can be given to code that imports it later.
_BESIDE: dict[str, ModuleType | None] = {}


def call_factory(spec: str) -> tuple[Path, str, nn.Module]:
    """The file, the factory's name, and the module that it returns when called without arguments.

    Random weights that the factory draws are the same every time.

    Raises:
        InputError: the file cannot be used, or fails, and at which line.
    """
    path, name = split_factory(spec)
    known = _functions(path)
    if not name:
        raise InputError(
            f"{path}: say which function makes the model, as {path}:NAME; it defines {', '.join(known) or 'none'}"
        )
    with _importable(path) as module, fixed_seed():
        try:
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
            factory = getattr(module, name, None)
            model = factory() if callable(factory) else None
        except (Exception, SystemExit) as error:  # the user's own code raises what it likes
            raise InputError(f"{path}:{name} raised {_located(error, path)}") from error
    if factory is None:
        raise unknown_name(f"factory in {path}", name, known)
    if not isinstance(model, nn.Module):
        raise InputError(f"{path}:{name} must be a function that returns an nn.Module, not a {type(model).__name__}")
    return path, name, model


def split_factory(spec: str) -> tuple[Path, str]:
    """The file and the factory that `spec` names; an empty name where it names none."""
    file, colon, name = spec.rpartition(".py:")
    return (as_path(file + ".py"), name) if colon else (as_path(spec), "")


def _functions(path: Path) -> list[str]:
    """What a Python file defines at its top level, without running it."""
    check_file(path, "Python file")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path} is not a Python file: {error}") from error
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


@contextmanager
def _importable(path: Path) -> Iterator[ModuleType]:
    """A module to be filled from `path`; what lies beside the file can be imported, as when Python runs it, and nothing
    of that name that another file has imported so.
    """
    folder = path.absolute().parent
    name = f"attnrewrite_source_{path.stem}_{zlib.crc32(bytes(folder)):08x}"  # files of two folders may share theirs
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    for beside, kept in _BESIDE.items():
        if kept is not None and sys.modules.get(beside) is kept:
            del sys.modules[beside]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield module
    finally:
        sys.path.remove(str(folder))
        _keep_beside(folder, before)


def _keep_beside(folder: Path, before: Container[str]) -> None:
    """Leave what was imported right from `folder` since `before`, and from those of earlier files, for code that
    imports as a model runs: what has a name of its own among them. What is installed below `folder` is not of it.
    """
    new = {
        name
        for name, module in sys.modules.items()
        if "." not in name and name not in before and any(Path(place).parent == folder for place in _places(module))
    }
    for name in [name for name in sys.modules if name.partition(".")[0] in new]:
        module = sys.modules.pop(name)
        other = _BESIDE.get(name, module)
        _BESIDE[name] = module if other is not None and _places(other) == _places(module) else None
    for name, kept in _BESIDE.items():
        if kept is not None:
            sys.modules.setdefault(name, kept)


def _places(module: ModuleType) -> tuple[str, ...]:
    """The folders of a package, the file of any other module; nothing where it is in no file."""
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return ()
    return tuple(spec.submodule_search_locations or ((spec.origin,) if spec.has_location else ()))


def _located(error: BaseException, path: Path) -> str:
    """The class, message and line of an error that user code raised, in one line."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path.absolute():
            line = trace.tb_lineno
        trace = trace.tb_next
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
