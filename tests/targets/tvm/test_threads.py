"""TVM's thread pool: as many threads as asked for, which leave the caller's own where it was."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import nn

pytest.importorskip("tvm")

from attnrewrite.errors import InputError
from attnrewrite.targets.prepare import specialise
from attnrewrite.targets.tvm import compat
from attnrewrite.targets.tvm.importer import import_program

Found = TypeVar("Found")
INPUTS = (torch.randn(4, 64),)


@pytest.fixture(scope="module")
def executable() -> object:
    return compat.build_for_cpu(import_program(specialise(nn.Linear(64, 64), INPUTS)), "host").executable


def in_new_thread(work: Callable[[], Found]) -> Found:
    """What `work` gives in a thread that has no pool yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_so_many_threads_work_on_any_processor(executable: object, threads: int) -> None:
    def bound() -> tuple[int, object, object]:
        import tvm

        before = processors()
        compat.bind(executable, INPUTS, threads)()
        return tvm.get_global_func("runtime.NumThreads")(), before, processors()

    found, before, after = in_new_thread(bound)
    assert found == threads
    assert before == after


def test_a_pool_does_not_grow(executable: object) -> None:
    most = (os.cpu_count() or 1) + 1

    def bound() -> None:
        compat.bind(executable, INPUTS, 1)
        compat.bind(executable, INPUTS, most)

    with pytest.raises(InputError, match=f"does not grow to {most}: start a process for it"):
        in_new_thread(bound)


def processors() -> object:
    return os.sched_getaffinity(0) if sys.platform == "linux" else None
