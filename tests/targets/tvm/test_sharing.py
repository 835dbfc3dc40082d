"""How kernels share their tiles among threads: every tile once, halves of rows to halves of threads."""

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import HOST, Shape

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import function, steps
from attnrewrite.targets.tvm.schedules.cpu.sharing import TASKS, parts, shares
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, contiguous


def turns(out: Layout, tiles: int, cut: int, across: int) -> np.ndarray:
    """For each tile [outer..., tiles, across] of matrices of `out`, as the how manieth it is visited by one thread."""
    outer = out.shape[:-2]
    space = contiguous((*outer, tiles, across))

    def body(found: object) -> None:
        with shares(out, len(outer), tiles, cut, across, 0) as share, steps(share.tiles) as step:
            place = sum(
                index * stride
                for index, stride in zip((*share.z, share.first + step, share.panel), space.strides, strict=True)
            )
            count = vectors.name(vectors.load(found, space.size, 1) + vectors.splat(1.0, 1))
            vectors.store(found, space.size, count, 1)
            vectors.store(found, place, vectors.load(found, place, 1) + count, 1)

    kernel = function([Argument((space.size + 1,), "float32")], body).with_attr("global_symbol", "main")
    compiled = tvm.compile(tvm.IRModule({"main": kernel}), target=tvm.target.Target(dict(HOST.target)))["main"]
    found = tvm.runtime.tensor(np.zeros(space.size + 1, np.float32))
    compiled(found)
    return found.numpy()[:-1].reshape(space.shape) - 1


@pytest.mark.parametrize(
    ("shape", "strides", "tiles", "across"),
    [
        ((197, 192), (192, 1), 22, 4),
        ((197, 30), (30, 1), 7, 1),
        ((20, 64), (64, 1), 1, 9),
        ((2, 3, 197, 64), (37824, 64, 192, 1), 18, 1),  # heads beside each other in rows
        ((2, 3, 197, 64), (37824, 12608, 64, 1), 18, 2),
    ],
)
def test_tiles_are_visited_once_in_the_order_of_their_memory(
    shape: Shape, strides: Shape, tiles: int, across: int
) -> None:
    out = Layout(shape, strides)
    cut = parts(tiles, across * int(np.prod(shape[:-2])), halved=True)
    found = turns(out, tiles, cut, across)
    assert sorted(found.ravel()) == list(range(found.size))
    # A part is visited as a whole, matrix by matrix: by what lies farthest apart first.
    first = [part * tiles // cut for part in range(cut)]
    begins = np.maximum.reduceat(found, first, axis=-2)
    order = sorted(range(len(shape) - 1), key=lambda axis: -strides[axis])
    visited = begins.transpose(*order, -1).ravel()
    assert visited.tolist() == sorted(visited)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 22, 200])
@pytest.mark.parametrize("others", [1, 3, 4, 12])
def test_parts_are_enough_tasks_and_can_be_halved(tiles: int, others: int) -> None:
    cut = parts(tiles, others, halved=True)
    assert cut == tiles or (cut % 2 == 0 and cut <= tiles)
    assert cut * others >= min(TASKS, tiles * others)
    assert parts(tiles, TASKS, halved=False) == 1


@pytest.mark.parametrize("tiles", [1, 3, 22, 200])
@pytest.mark.parametrize("most", [0, 1, 3, 16, 500])
def test_parts_have_no_more_tiles_than_they_may(tiles: int, most: int) -> None:
    cut = parts(tiles, 1, halved=True, most=most)
    assert -(-tiles // cut) <= max(most, 1)
    assert cut == tiles or cut == 2 or cut // 2 < TASKS or tiles > cut // 2 * most  # no more of them than that takes
