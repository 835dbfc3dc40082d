"""The latency protocol: the candidates take turns, so that whatever else the machine does falls on all of them."""

import gc
import importlib.metadata
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from attnrewrite.errors import InputError
from attnrewrite.resources import physical_memory

PACKAGES = ("attnrewrite", "torch", "onnxruntime", "apache-tvm", "coremltools", "numpy")


@dataclass(frozen=True)
class Latency:
    """Quantiles of one candidate's call, in milliseconds, over `runs` timed calls."""

    p50_ms: float
    p90_ms: float
    runs: int


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 3,
    repeats: int = 30,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Latency]:
    """Time every call `repeats` times, one round after another, each round in an order of its own drawn from `seed`.

    A turn is one call that is not timed, which brings the caches and threads back to this candidate, and one that is.
    `budget_s` ends the rounds early, after no fewer than three, where the calls are slow. Python's garbage collector is
    off meanwhile. `progress` receives the rounds done and the rounds planned.
    """
    if warmup < 0 or repeats < 1:
        raise InputError(f"cannot measure with {warmup} warm-up and {repeats} timed calls: at least 0 and 1 are needed")
    for call in calls.values():
        for _ in range(warmup):
            call()
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    with _no_garbage_collection():
        for done in range(repeats):
            if budget_s is not None and done >= 3 and time.perf_counter() - started > budget_s:
                break
            shuffle(order)
            for name in order:
                times[name].append(_turn(calls[name]))
            if progress is not None:
                progress(done + 1, repeats)
    return {name: quantiles(samples) for name, samples in times.items()}


def environment(threads: int) -> dict[str, object]:
    """What a latency depends on beside the model: the machine, the system, the versions, the threads; and the date."""
    return {
        "processor": _processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": physical_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _turn(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quantiles(seconds: Sequence[float]) -> Latency:
    """The latency that timed calls show."""
    p50, p90 = np.quantile(seconds, (0.5, 0.9)) * 1e3
    return Latency(float(p50), float(p90), len(seconds))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _processor() -> str:
    """The processor's own name: /proc/cpuinfo under Linux, where platform.processor() knows none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
