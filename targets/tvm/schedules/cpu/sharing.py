"""How kernels of tiles share their work among threads: so that each has as much to do, and reads what it wrote itself.

A line of memory that another core wrote last takes many times as long to read as one's own. Threads take tasks that
follow each other; so these go in the order in which results lie in memory, rows first: in one kernel after the other
each of two threads has the same half of the rows.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import each
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position
from attnrewrite.targets.tvm.schedules.view import Layout

TASKS = 8  # at least, where there are as many tiles: four threads, say, then have two each


@dataclass(frozen=True)
class Share:
    """A task: at `z` of the batch, the `panel` of columns, and so many tiles along the rows from the `first` on."""

    z: list[Position]
    panel: Position
    first: Position
    tiles: Position


def parts(tiles: int, others: int, halved: bool, most: float = math.inf) -> int:
    """How many parts make tasks of `tiles` along the rows, `others` beside them: a power of two, if there are as many.

    `halved`: two at least, which are the halves of whatever else is cut so. `most`: the tiles of a part, but for one.
    """
    count = 2 if halved else 1
    while count * others < TASKS or (count < tiles and count * most < tiles):
        count *= 2
    return min(count, tiles)


def taken(part: Position, tiles: int, cut: int) -> tuple[Position, Position]:
    """The first of the tiles that a part of so many takes, and how many."""
    if cut == tiles:
        return part, 1
    first = vectors.name(part * tiles // cut)
    return first, vectors.name((part + 1) * tiles // cut - first)


@contextmanager
def shares(out: Layout, rows: int, tiles: int, cut: int, across: int, work: int) -> Iterator[Share]:
    """A loop over tasks, of `work` numbers in all: of the matrices of `out`, each in `across` panels of columns, and
    the tiles along its rows, which the axis `rows` and those behind it make, in as many parts as `cut` says.
    """
    outer, strides = out.shape[:rows], out.strides[: rows + 1]
    with each((*outer, cut, across), work, (*strides, 0)) as (*z, part, panel):
        yield Share(z, panel, *taken(part, tiles, cut))
