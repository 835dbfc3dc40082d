"""Copies and captures of graphs, without what torch warns and logs of its own."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet_copying() -> Iterator[None]:
    """torch warns of how it copies its own graphs, which is nothing that a caller of ours can change."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        yield


@contextmanager
def without_torch_logs() -> Iterator[None]:
    """torch logs and prints whole graphs and traces before it raises; the error alone is told."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
