"""Python files that make models: what lies beside a file is that file's own, also where two folders hold one name."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.frontends.factories import call_factory

X = torch.ones(1)
LAYERS = """
from torch import nn


class Layer(nn.Module):
    def forward(self, x):
        return x * {factor}
"""
NET = """
import {name}
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = {name}.Layer()

    def forward(self, x):
        return self.layer(x)


make = Net
"""
LATER = """
import {name}
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        import {name}

        return {name}.Layer()(x)


make = Net
"""


def written(folder: Path, net: str, layers: str, factor: float) -> str:
    """A folder of net.py, and of the layers that it imports by the name `layers` ("a.b" is a file in a folder)."""
    beside = folder / f"{layers.replace('.', '/')}.py"
    beside.parent.mkdir(parents=True)
    beside.write_text(LAYERS.format(factor=factor))
    (folder / "net.py").write_text(net.format(name=layers))
    return f"{folder / 'net.py'}:make"


def made(spec: str) -> nn.Module:
    return call_factory(spec)[2]


@pytest.mark.parametrize("layers", ["own_layers", "own_parts.layers"])
def test_two_files_of_one_name_import_what_lies_beside_each(tmp_path: Path, layers: str) -> None:
    specs = [written(tmp_path / name, NET, layers, factor) for name, factor in (("old", 2.0), ("new", 3.0))]
    models = [made(spec) for spec in (*specs, specs[0])]
    assert [model(X).item() for model in models] == [2.0, 3.0, 2.0]


def test_a_file_that_changed_is_imported_anew(tmp_path: Path) -> None:
    spec = written(tmp_path / "net", NET, "changing_layers", 2.0)
    assert made(spec)(X) == 2
    (tmp_path / "net" / "changing_layers.py").write_text(LAYERS.format(factor=30.0))
    assert made(spec)(X) == 30


def test_a_model_that_imports_as_it_runs_gets_its_own_or_nothing(tmp_path: Path) -> None:
    one, other = (written(tmp_path / name, LATER, "late_layers", 2.0) for name in ("one", "other"))
    alone = made(one)
    assert made(one)(X) == alone(X) == 2
    both = (alone, made(other))
    for model in (*both, made(one)):
        with pytest.raises(ModuleNotFoundError, match="late_layers"):
            model(X)


def test_what_was_imported_before_and_what_comes_from_elsewhere_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "net" / "site-packages"  # of an environment that lies in the folder
    packages.mkdir(parents=True)
    (packages / "installed_here.py").write_text("")
    (tmp_path / "net" / "before.py").write_text("")
    (tmp_path / "net" / "net.py").write_text(
        "import before, installed_here\nfrom torch import nn\n\n\ndef make():\n    return nn.ReLU()\n"
    )
    monkeypatch.syspath_prepend(packages)
    monkeypatch.syspath_prepend(tmp_path / "net")
    import before  # type: ignore[import-not-found]

    made(f"{tmp_path / 'net' / 'net.py'}:make")
    installed = sys.modules["installed_here"]
    made(f"{tmp_path / 'net' / 'net.py'}:make")
    assert (sys.modules["before"], sys.modules["installed_here"]) == (before, installed)


def test_models_of_two_files_of_one_name_are_pickled_as_their_own(tmp_path: Path) -> None:
    specs = [written(tmp_path / name, NET, f"{name}_layers", factor) for name, factor in (("a", 2.0), ("b", 3.0))]
    models = [made(spec) for spec in specs]
    found: list[Tensor] = [pickle.loads(pickle.dumps(model))(X) for model in models]
    assert [float(each) for each in found] == [2.0, 3.0]
