"""A model from the user's own Python file, given as path/file.py:factory. This runs the file."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch import nn

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.files import as_path, check_file
from attnrewrite.frontends.libraries import fixed_seed


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
    """A module to be filled from `path`; what lies beside the file can be imported, as when Python runs it."""
    spec = importlib.util.spec_from_file_location(f"attnrewrite_source_{path.stem}", path.absolute())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        yield module
    finally:
        sys.path.remove(str(path.parent.absolute()))


def _located(error: BaseException, path: Path) -> str:
    """The class, message and line of an error that user code raised, in one line."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path.absolute():
            line = trace.tb_lineno
        trace = trace.tb_next
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
