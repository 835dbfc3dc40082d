"""What an interrupted calibration leaves behind, so that the same command goes on from there to the same weights."""

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnrewrite
from attnrewrite.errors import InputError, first_line

log = logging.getLogger("attnrewrite")


@dataclass(frozen=True)
class State:
    """Checkpoints in `folder`, or none kept where it is None.

    A checkpoint is only taken up by a stage that started from the very same weights and images with the very same
    options, in the same version of the code: anything else starts anew.
    """

    folder: Path | None = None

    def save(self, name: str, key: str, content: dict[str, Any]) -> None:
        """Write a checkpoint whole or not at all. Raises InputError where it cannot be written."""
        if self.folder is None:
            return
        fresh = self._file(name).with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"key": key, "content": content}, fresh)
            os.replace(fresh, self._file(name))
        except (OSError, RuntimeError, ValueError) as error:  # torch has its own for a full disk
            raise InputError(f"cannot write {self._file(name)}: {first_line(error)}") from error
        finally:
            fresh.unlink(missing_ok=True)

    def load(self, name: str, key: str) -> dict[str, Any] | None:
        """The checkpoint that was saved under `name` with `key`, if there is one that is whole."""
        if self.folder is None or not self._file(name).exists():
            return None
        try:
            saved = torch.load(self._file(name), weights_only=True)
            return saved["content"] if saved["key"] == key else None
        except Exception as error:  # torch raises a different class for each way a file can be damaged
            log.warning("%s is damaged and left alone: starting anew (%s)", self._file(name), first_line(error))
            return None

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name.replace(' ', '-')}.pt"


def resume_key(tensors: Iterable[Tensor], *options: object) -> str:
    """A hash of tensors, options and the code's version: what a stage starts from."""
    versions = (attnrewrite.__version__, torch.__version__)
    digest = hashlib.blake2b(repr((versions, options)).encode(), digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
