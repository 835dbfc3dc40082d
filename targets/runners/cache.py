"""What runners build or fetch once for a user and keep: in XDG_CACHE_HOME, or in ~/.cache."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """The folder called `name` in the user's cache; on first use `make` fills it. It appears whole or not at all."""
    home = os.environ.get("XDG_CACHE_HOME")
    target = (Path(home) if home else Path.home() / ".cache") / "attnrewrite" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        make(made)
        try:
            made.rename(target)
        except OSError:
            # Another process was faster.
            if not target.is_dir():
                raise
    return target
