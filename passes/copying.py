"""Copies of graphs, without the warnings that torch gives of its own."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_copying() -> Iterator[None]:
    """torch warns of how it copies its own graphs, which is nothing that a caller of ours can change."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        yield
