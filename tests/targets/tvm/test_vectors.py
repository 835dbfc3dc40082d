"""Arithmetic and loads on vectors, compiled for this machine; how rows of numbers are cut into them."""

from collections.abc import Callable

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import HOST, Shape, erf

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import each, function
from attnrewrite.targets.tvm.schedules.cpu.register_tile import best_bands
from attnrewrite.targets.tvm.schedules.profile import cores, profile
from attnrewrite.targets.tvm.schedules.rule import Argument


def run(x: np.ndarray, shape: Shape, body: Callable[..., None]) -> np.ndarray:
    """What `body` writes into a tensor of a shape, reading `x`."""
    arguments = [Argument(x.shape, "float32"), Argument(shape, "float32")]
    kernel = function(arguments, body).with_attr("global_symbol", "main")
    compiled = tvm.compile(tvm.IRModule({"main": kernel}), target=tvm.target.Target(dict(HOST.target)))["main"]
    found = tvm.runtime.tensor(np.zeros(shape, np.float32))
    compiled(tvm.runtime.tensor(x), found)
    return found.numpy()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *[("exp", -87.3, 88.7), ("exp", -2, 2), ("falling_exp", -87.3, 0), ("falling_exp", -2, 0)],
        *[("erf", -5, 5), ("erf", -1e-3, 1e-3), ("gelu", -1, 1), ("gelu", -20, 90)],
    ],
)
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_functions_are_within_few_units_in_the_last_place(name: str, low: float, high: float, lanes: int) -> None:
    x = np.linspace(low, high, 1 << 14).astype(np.float32)

    def body(read: object, written: object) -> None:
        with each((x.size // lanes,), 0) as (index,):
            value = getattr(vectors, name)(vectors.name(vectors.load(read, index * lanes, lanes)))
            vectors.store(written, index * lanes, value, lanes)

    found = run(x, x.shape, body)
    wide = x.astype(np.float64)
    expected = {"exp": np.exp, "falling_exp": np.exp, "erf": erf, "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2}[name]
    # What gelu leaves of a negative number is a difference: its units are its argument's, as in every float32 gelu.
    units = np.spacing(np.abs(x if name == "gelu" else expected(wide)).astype(np.float32)).astype(np.float64)
    assert np.abs((found - expected(wide)) / units).max() <= (4 if name == "gelu" else 2)


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
def test_numbers_apart_become_neighbours(lanes: int, stride: int) -> None:
    x = np.arange(3 + (lanes - 1) * stride + 1, dtype=np.float32)  # the last one read is the last there is

    def body(read: object, written: object) -> None:
        vectors.store(written, 0, vectors.load(read, 3, lanes, stride), lanes)

    assert run(x, (lanes,), body).tolist() == [3 + lane * stride for lane in range(lanes)]


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_vectors_of_one_width_cover_a_row(lanes: int) -> None:
    for length in range(1, 70):
        found = vectors.covering(length, lanes)
        assert {place for begin, width in found for place in range(begin, begin + width)} == set(range(length))
        assert {width for _, width in found} == {found[0][1]}
        assert len(found) == -(-length // found[0][1])
        assert found[0][1] == lanes or found[0][1] * 2 > length


@pytest.mark.parametrize("core", cores())
def test_bands_hold_every_column_and_whole_vectors(core: str) -> None:
    processor = profile(core)
    for columns in range(1, 300):
        bands = best_bands(processor, 64, columns)
        assert {place for band in bands for place in range(band.first, band.first + band.columns)} == set(
            range(columns)
        )
        assert all(band.columns >= min(columns, processor.lanes) for band in bands)
    assert len(best_bands(processor, 64, 16 * 48)) == 1
