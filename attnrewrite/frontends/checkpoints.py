"""Weights and programs from files: nothing pickled in them runs; weights are unwrapped and loaded strictly."""

import argparse
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from attnrewrite.errors import InputError, first_line
from attnrewrite.files import check_file

WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Copy the tensors of the checkpoint at `path` into `model`, every one of them and nothing else.

    Raises InputError naming what is missing, unexpected or of another shape; `model` is then as it was.
    """
    expected = model.state_dict()
    given = _strip_prefixes(read_checkpoint(path), expected)
    missing = [name for name in expected if name not in given]
    unexpected = [name for name in given if name not in expected]
    reshaped = [
        f"{name} is {_shape(given[name])} in the file and {_shape(expected[name])} in the model"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    problems = [("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped)]
    mismatch = "; ".join(f"{len(names)} {what} ({_first(names)})" for what, names in problems if names)
    if mismatch:
        raise InputError(
            f"{path} does not fit the model: {mismatch}. Build the model as the checkpoint was trained "
            "(its size, classes and input size), for instance in your own file.py:factory"
        )
    model.load_state_dict(given, strict=True)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth, .pt, .bin or .ckpt file by name, on the CPU, wrappers removed."""
    check_file(path, "checkpoint")
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: a checkpoint is a file ending in {', '.join(SUFFIXES)}")
    return _unwrap(_read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path), path)


def read_program(path: Path) -> ExportedProgram:
    """The program that torch.export.save wrote to `path`, without unpickling anything but tensors."""
    check_file(path, "exported program")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is truncated or is not an exported program: save it with torch.export.save")
    objects = [name for name in _names(path) if re.match("(opaque|custom)_obj", name.rpartition("/")[2])]
    if objects:
        raise InputError(f"{path} was not loaded: it holds pickled objects, which may run code ({objects[0]})")
    try:
        with _tensors_only():
            return torch.export.load(path)
    except Exception as error:  # each kind of damage has its own class
        reason = first_line(error, 160)
        raise InputError(f"{path} could not be read as an exported program ({reason}): save it again") from error


def _names(path: Path) -> list[str]:
    """What the archive at `path` says that it holds. Raises InputError where it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} is damaged ({first_line(error, 160)}): save it again") from error


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Every torch.load inside reads with weights_only, whatever it asks for; failed attempts are not logged."""
    variable, logger = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", logging.getLogger("torch.export")
    before, disabled = os.environ.get(variable), logger.disabled
    os.environ[variable], logger.disabled = "1", True
    try:
        yield
    finally:
        logger.disabled = disabled
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"{path} is truncated or is not a safetensors file ({_line(error)}): fetch it again"
        ) from error


def _read_pickle(path: Path) -> Any:
    # Training scripts store their arguments beside the weights; a Namespace only holds values.
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            refused = re.search(r"GLOBAL (\S+)", str(error))
            if refused is None:
                raise InputError(
                    f"{path} is damaged, or a pickle that torch.save did not write; nothing in it ran: fetch it again"
                ) from error
            raise InputError(
                f"{path} was not loaded: it would run code ({refused[1]}) and only tensors are read. "
                "Ask its author for a state dict, or for safetensors"
            ) from error
        except Exception as error:  # torch raises a different class for each way a file can be damaged
            if "TorchScript" in str(error):
                raise InputError(f"{path} is a TorchScript program, not a checkpoint: save its state_dict()") from error
            raise InputError(
                f"{path} is truncated or is not a PyTorch checkpoint ({_line(error)}): fetch it again"
            ) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a {type(content).__name__}, not a state dict: save model.state_dict()")
    others = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        raise InputError(
            f"{path} is not a state dict: {len(others)} of its {len(content)} entries are no tensors "
            f"({_first(others)}), and it has none called {', '.join(WRAPPERS)}"
        )
    return dict(content)


def _strip_prefixes(given: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop what DataParallel and torch.compile put before every name, unless the model's own names have it."""
    while prefix := next((p for p in PREFIXES if given and all(name.startswith(p) for name in given)), None):
        if any(name.startswith(prefix) for name in expected):
            break
        given = {name.removeprefix(prefix): value for name, value in given.items()}
    return given


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _first(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _line(error: Exception) -> str:
    return first_line(error, 160).rstrip(".")
