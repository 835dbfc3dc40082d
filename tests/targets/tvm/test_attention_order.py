"""In which order attention goes over blocks of keys: what of it the caches hold, and that the numbers do not tell."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import DRAWN, HOST, PROCESSORS, close, scheduled, softmax, values, wide
from tvm import relax

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.attention.order import Order, Tile, order_for, panels_in_block
from attnrewrite.targets.tvm.schedules.cpu.function import function
from attnrewrite.targets.tvm.schedules.cpu.operands import panels
from attnrewrite.targets.tvm.schedules.cpu.sharing import TASKS
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, FLOAT32, SIZES, Profile, cores, profile
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import contiguous

HEADS, CHANNELS, ROWS, WIDTH = 3, 64, 8, 24
# Caches so small that a few dozen keys are several blocks, and their queries several groups.
SMALL = [replace(each, l1=2**11, l2=2**14) for each in PROCESSORS]


@pytest.mark.parametrize("stored", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("core", cores())
@pytest.mark.parametrize("tokens", [50, 197, 1025, 4097, 16385])
def test_what_is_read_again_stays_in_the_caches(tokens: int, core: str, stored: str) -> None:
    processor, size = profile(core).storing(stored), SIZES[stored]
    key = panels(0, (HEADS,), CHANNELS, tokens, WIDTH)
    order = order_for(processor, HEADS, tokens, ROWS, key, (tokens, CHANNELS))
    assert SIZES[FLOAT32] * ROWS * order.panels * WIDTH <= processor.l1 // 2
    pair, tile = 2 * size * CHANNELS, ROWS * CHANNELS * (size + SIZES[FLOAT32])
    if tokens * pair <= processor.l2:
        assert order.groups == order.tiles
    else:
        assert pair * order.length <= processor.l2 // 2
        assert order.group * tile <= processor.l2 // 2
        assert order.group > 1
        assert order.groups * HEADS >= TASKS


@pytest.mark.parametrize("most", [1, 2, 3, 13, 42, 85])
def test_no_panel_of_keys_makes_a_block_alone(most: int) -> None:
    for count in range(1, 2500):
        block = panels_in_block(count, most)
        assert count == 1 or (block > 1 and count % block != 1)
        assert block <= max(most, 13)


@pytest.mark.parametrize(
    "order",
    [
        Order(queries=23, rows=4, groups=6, keys=30, width=8, panels=4),  # as it fits
        Order(queries=23, rows=4, groups=6, keys=30, width=8, panels=2),
        Order(queries=23, rows=4, groups=4, keys=33, width=8, panels=2),
        Order(queries=24, rows=4, groups=2, keys=32, width=8, panels=1),
        Order(queries=4, rows=4, groups=1, keys=7, width=8, panels=1),
    ],
)
def test_a_group_has_a_block_before_the_next_one(order: Order) -> None:
    matrices, space = 2, contiguous((2, order.tiles, order.blocks + 1, 2))

    def body(found: object) -> None:
        def note(z: list[Position], tile: Tile, block: Position, keys: int) -> None:
            """The turn, and how many keys it was for; that of the end stands behind the blocks."""
            place = sum(at * step for at, step in zip((*z, tile.number, block), space.strides, strict=False))
            turn = vectors.name(vectors.load(found, space.size, 1) + vectors.splat(1.0, 1))
            vectors.store(found, space.size, turn, 1)
            vectors.store(found, place, vectors.load(found, place, 1) + turn, 1)
            vectors.store(found, place + 1, vectors.load(found, place + 1, 1) + vectors.splat(float(keys), 1), 1)

        with order.over((matrices,), 0) as (z, group):
            group.go(lambda tile, block, keys: note(z, tile, block, keys), lambda tile: note(z, tile, order.blocks, 0))

    kernel = function([Argument((space.size + 1,), "float32")], body).with_attr("global_symbol", "main")
    compiled = tvm.compile(tvm.IRModule({"main": kernel}), target=tvm.target.Target(dict(HOST.target)))["main"]
    found = tvm.runtime.tensor(np.zeros(space.size + 1, np.float32))
    compiled(found)
    turns, keys = np.moveaxis(found.numpy()[:-1].reshape(space.shape), -1, 0)
    assert sorted(turns.ravel()) == list(range(1, turns.size + 1))
    assert (keys.sum(-1) == order.keys).all()
    first = [group * order.tiles // order.groups for group in range(order.groups)]
    for group in np.split(turns, first[1:], axis=1):
        if order.blocks == 1:
            assert (np.diff(group, axis=2) == 1).all()
        else:  # by blocks, the tiles of the group within
            assert (np.diff(group.swapaxes(1, 2).reshape(matrices, -1), axis=1) == 1).all()


def lengths() -> st.SearchStrategy[int]:
    """Tokens at, below and above what blocks and panels of all the processors end with."""
    return st.builds(
        lambda count, width, more: count * width + more,
        st.integers(1, 9),
        st.sampled_from([8, 12, 16, 32, 48]),
        st.integers(-1, 1),
    )


def nothing(queries: int, keys: int) -> np.ndarray:
    return np.zeros((queries, keys))


def hidden(queries: int, keys: int) -> np.ndarray:
    """All keys but one of each query: whole blocks, the first and the last ones too."""
    return np.where(np.arange(keys) == np.arange(queries)[:, None] * 7 % keys, 0, -np.inf)


def padded(queries: int, keys: int) -> np.ndarray:
    """The second half of the keys, for every query."""
    return np.broadcast_to(np.where(np.arange(keys) > keys // 2, -np.inf, 0), (queries, keys))


def rising(queries: int, keys: int) -> np.ndarray:
    """Each key so far above those before it that they count for nothing."""
    return np.broadcast_to(60.0 * np.arange(keys), (queries, keys))


def falling(queries: int, keys: int) -> np.ndarray:
    return -rising(queries, keys)


def drawn(queries: int, keys: int) -> np.ndarray:
    """A bias of each pair."""
    return np.random.default_rng(keys).standard_normal((queries, keys)) * 3


BESIDE = [nothing, hidden, padded, rising, falling, drawn]


@DRAWN
@given(
    batch=st.integers(1, 2), queries=st.integers(1, 90), keys=lengths(), channels=st.integers(1, 40),
    beside=st.sampled_from(BESIDE), turned=st.booleans(), scale=st.sampled_from([1e-6, 1.0, 30.0]),
    processor=st.sampled_from(SMALL),
)  # fmt: skip
@example(2, 90, 97, 40, hidden, False, 1.0, SMALL[0])
@example(2, 90, 97, 40, hidden, True, 1.0, SMALL[1])
@example(2, 90, 97, 40, hidden, False, 1.0, SMALL[2])
@example(1, 90, 192, 33, rising, True, 1.0, SMALL[0])
@example(1, 90, 191, 33, rising, True, 1.0, SMALL[1])
@example(1, 90, 193, 33, falling, True, 1.0, SMALL[1])
def test_attention_by_groups(
    batch: int, queries: int, keys: int, channels: int, beside: object, turned: bool, scale: float, processor: Profile
) -> None:
    """`turned`: what stands beside the scores has queries as neighbours, as kernels for lanes want it."""
    heads = 2
    q, k, v = values((batch, heads, queries, channels), *2 * ((batch, heads, keys, channels),))
    q *= np.float32(scale)
    bias = np.asarray(beside(queries, keys), np.float32)

    def attention(q: object, k: object, v: object, bias: object) -> object:
        pairs = relax.op.permute_dims(bias, (1, 0)) if turned else bias
        scores = relax.op.add(relax.op.matmul(q, relax.op.permute_dims(k, (0, 1, 3, 2))), pairs)
        mixed = relax.op.matmul(relax.op.nn.softmax(scores), v)
        return relax.op.reshape(relax.op.permute_dims(mixed, (0, 2, 1, 3)), (batch, queries, heads * channels))

    rules, run = scheduled([q, k, v, bias.T.copy() if turned else bias], attention, processor=processor)
    assert rules == ["attention"]
    first, second, third, fourth = wide(q, k, v, bias)
    scores = first @ second.swapaxes(2, 3) + fourth
    mixed = softmax(scores) @ third
    rounding = 1 + np.abs(np.where(np.isfinite(scores), scores, 0)).max()
    close(run(), mixed.swapaxes(1, 2).reshape(batch, queries, -1), np.abs(third).max() * rounding)
