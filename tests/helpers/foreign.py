"""Packages of others as pip lays them down: a module, and a folder with the name, version and entry points."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnrewrite.plugins import Registry


@contextmanager
def site_folder(folder: Path, registry: Registry) -> Iterator[Path]:
    """`folder` on the path for a while, to lay packages down in; their modules are forgotten afterwards."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        registry.forget()
        yield folder
    registry.forget()
    for name in [name for name, module in sys.modules.items() if str(folder) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def lay_down(site: Path, package: str, group: str, points: Mapping[str, str], text: str | None = None) -> None:
    """A package that registers `points` (name: module:class) in `group`; `text` is its module, called after it."""
    folder = site / f"{package.replace('-', '_')}-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    if text is not None:
        (site / f"{package.replace('-', '_')}.py").write_text(text)
