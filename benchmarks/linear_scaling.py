"""How each attention form grows with the tokens: time, peak memory, and the exponents fitted above 1,000 tokens.

    python benchmarks/linear_scaling.py [--variants l1,masked] [--json scaling.json]

One thread, float32; a square grid and a class token, so that the exact prefix row is in the figures. Every size has as
many images as make TOKENS tokens in all, so that each lies in the same caches, and what grows is the form's own work:
figures are for one image of them. Time is the thread's own, of the quickest call. Memory is what the operators hold at
most beyond their inputs, from torch's profiler. `softmax` is torch's fused kernel, whose time is quadratic and whose
memory is not; `explicit` writes softmax(q k^T) v out. A form that took SLOWEST at a size is not tried at the next.
"""

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from attnrewrite.site import AttentionSite, Core, Grid, Layout, Operand, Untraced
from attnrewrite.variants.base import Form
from attnrewrite.variants.registry import get_variant, variants

SIDES = (8, 16, 32, 64, 128)
TOKENS = SIDES[-1] ** 2
HEADS, HEAD_DIM = 6, 64
FIT_ABOVE = 1000
LINEAR_BELOW = 1.1
SECONDS_PER_POINT, FEWEST_REPEATS, MOST_REPEATS = 0.3, 3, 50
SLOWEST = 0.7  # seconds
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's mallopt

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    """One form at one size, for one image: tokens, the quickest call's milliseconds, peak bytes beyond the inputs."""

    tokens: int
    milliseconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Growth:
    """A form's points, and the exponents of its time and memory in the number of tokens above FIT_ABOVE."""

    form: str
    points: tuple[Point, ...]
    time_exponent: float
    memory_exponent: float


def site_of(side: int) -> AttentionSite:
    """A self-attention site over a class token and side x side patches, in no model."""
    operand = Operand("none", Layout((), (), (), (), (), ()))
    untraced = Untraced("benchmark", "no model around it")
    grid, scale = Grid(side, side, prefix=1), HEAD_DIM**-0.5
    return AttentionSite(
        id="site", name="benchmark", frontend="fx", anchor="softmax", kind="self", axis="token", heads=HEADS,
        kv_heads=HEADS, head_dim=HEAD_DIM, value_dim=HEAD_DIM, n_queries=grid.tokens, n_keys=grid.tokens, windows=1,
        scale=scale, bias="none", core=Core(operand, operand, operand, operand, scale), query=untraced, key=untraced,
        value=untraced, output=untraced, grid=grid,
    )  # fmt: skip


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(2, 3) * HEAD_DIM**-0.5, dim=3) @ value


def build(name: str, side: int) -> Attention:
    if name == "explicit":
        return explicit
    form: Form = get_variant(name).build(site_of(side)).eval()
    return form


def peak_bytes(attention: Attention, heads: tuple[Tensor, ...]) -> int:
    """The most memory that lives at once inside one call."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        attention(*heads)
    held = most = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@torch.no_grad()
def measure(name: str, side: int) -> Point:
    torch.manual_seed(0)
    attention = build(name, side)
    tokens = side * side + 1
    images = TOKENS // side**2
    heads = tuple(torch.randn(images, HEADS, tokens, HEAD_DIM) for _ in range(3))
    attention(*heads)
    times: list[float] = []
    while len(times) < FEWEST_REPEATS or (sum(times) < SECONDS_PER_POINT and len(times) < MOST_REPEATS):
        start = time.process_time()
        attention(*heads)
        times.append(time.process_time() - start)
    return Point(tokens, 1e3 * min(times) / images, peak_bytes(attention, heads) // images)


def exponent(points: tuple[Point, ...], value: Callable[[Point], float]) -> float:
    """The slope of log(value) against log(tokens), by least squares, above FIT_ABOVE tokens."""
    chosen = [(math.log(p.tokens), math.log(value(p))) for p in points if p.tokens > FIT_ABOVE]
    xs, ys = zip(*chosen, strict=True)
    return statistics.linear_regression(xs, ys).slope


def grow(name: str) -> Growth:
    points: tuple[Point, ...] = ()
    for side in SIDES:
        if not points or points[-1].milliseconds < 1e3 * SLOWEST:
            points = (*points, measure(name, side))
    growth = [exponent(points, value) for value in (lambda p: p.milliseconds, lambda p: p.peak_bytes)]
    return Growth(name, points, *growth)


def row(growth: Growth) -> str:
    cells = [f"{p.milliseconds:9.2f} {p.peak_bytes / 2**20:8.1f}" for p in growth.points]
    cells += [f"{'-':>9} {'-':>8}"] * (len(SIDES) - len(cells))
    linear = growth.time_exponent < LINEAR_BELOW and growth.memory_exponent < LINEAR_BELOW
    return (
        f"{growth.form:12} {' '.join(cells)}  {growth.time_exponent:5.2f} {growth.memory_exponent:6.2f}"
        f"  {'linear' if linear else ''}"
    )


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: fresh pages for every large tensor would be timed with the form."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for option, size in ((MMAP_THRESHOLD, 2**30), (TRIM_THRESHOLD, 2**31 - 1)):
            if mallopt is not None:
                mallopt(option, size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and peak memory of every attention form against the tokens.")
    parser.add_argument("--variants", default=",".join(["explicit", *variants()]), help="names, comma-separated")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{'ms, MiB':12} " + " ".join(f"{f'N = {side * side + 1}':>18}" for side in SIDES) + "   time memory")
    found = []
    for name in arguments.variants.split(","):
        found.append(grow(name))
        print(row(found[-1]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(growth) for growth in found], file, indent=1)


if __name__ == "__main__":
    main()
