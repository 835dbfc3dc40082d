"""Running over a zoo: what builds its models, and a process of its own for each, so that one that hangs costs nothing
but its own row.
"""

import importlib.util
import math
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import zoo
from attnrewrite.errors import Refusal, unknown_name

SHARED = ("coremltools", "onnxruntime", "onnxscript", "timm", "torchvision", "transformers", "tvm", "vit_pytorch")
PATIENCE = 10


def builder(folder: Path | None) -> tuple[Sequence[str], Callable[[str], Any]]:
    """The names of a zoo and what builds them: this folder's, or that of `folder`/zoo.py."""
    if folder is None:
        return zoo.names(), zoo.build
    sys.path.append(str(folder))  # for what lies beside it
    spec = importlib.util.spec_from_file_location("given_zoo", folder / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.REG), module.build


def chosen(what: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The names asked for, in the order of `known`; a library's name stands for all of its models."""
    if not names:
        return list(known)
    for name in names:
        if name not in known and not any(each.startswith(f"{name}/") for each in known):
            raise unknown_name(what, name, known)
    return [each for each in known if each in names or each.partition("/")[0] in names]


def in_own_process(work: Callable[[], Any], seconds: float, gigabytes: float | None = None) -> Any:
    """What `work` gives in a fork of this process that prints nothing, or the refusal that says how it ended.

    `seconds` are the processor's, so that other jobs on the machine do not end it; a hang ends after `PATIENCE` times
    as many of the clock's.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, work, seconds, gigabytes))
    process.start()
    theirs.close()
    late = Refusal("late", f"took longer than {seconds:.0f} s")
    try:
        return ours.recv() if ours.poll(PATIENCE * seconds) else late
    except EOFError:
        process.join()
        died = Refusal("died", "the process ended without an answer")
        return late if process.exitcode == -signal.SIGXCPU else died
    finally:
        process.kill()
        process.join()


def _work(told: Connection, work: Callable[[], Any], seconds: float, gigabytes: float | None) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
    if gigabytes is not None:
        most = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    told.send(work())
