"""Arithmetic and loads on vectors, compiled for this machine; how rows of numbers are cut into them."""

from collections.abc import Callable

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

# ruff: noqa: E402
from kernels import HOST, Shape, erf

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import each, function
from attnrewrite.targets.tvm.schedules.cpu.register_tile import bands_beside, best_bands, packed_bands
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


FUNCTIONS = {"falling_power": lambda x: vectors.falling_power(x, -126.0)}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *[("exp", -87.3, 88.7), ("exp", -2, 2), ("falling_exp", -87.3, 0), ("falling_exp", -2, 0)],
        *[("falling_power", -126, 0), ("falling_power", -2, 0)],
        *[("erf", -5, 5), ("erf", -1e-3, 1e-3), ("gelu", -1, 1), ("gelu", -20, 90)],
    ],
)
@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_functions_are_within_few_units_in_the_last_place(name: str, low: float, high: float, lanes: int) -> None:
    x = np.linspace(low, high, 1 << 14).astype(np.float32)

    def body(read: object, written: object) -> None:
        with each((x.size // lanes,), 0) as (index,):
            value = FUNCTIONS.get(name, getattr(vectors, name))(vectors.name(vectors.load(read, index * lanes, lanes)))
            vectors.store(written, index * lanes, value, lanes)

    found = run(x, x.shape, body)
    wide = x.astype(np.float64)
    gelu = {"gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2}
    expected = ({"exp": np.exp, "falling_exp": np.exp, "falling_power": np.exp2, "erf": erf} | gelu)[name]
    # What gelu leaves of a negative number is a difference: its units are its argument's, as in every float32 gelu.
    units = np.spacing(np.abs(x if name == "gelu" else expected(wide)).astype(np.float32)).astype(np.float64)
    assert np.abs((found - expected(wide)) / units).max() <= (4 if name == "gelu" else 2)


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_gelu_is_nothing_or_its_argument_far_from_zero(lanes: int) -> None:
    x = np.array([6, 1e4, 3e38, np.inf] * 4, np.float32)

    def body(read: object, written: object) -> None:
        with each((x.size // lanes,), 0) as (index,):
            value = vectors.name(vectors.load(read, index * lanes, lanes))
            vectors.store(written, index * lanes, vectors.gelu(value), lanes)

    np.testing.assert_array_equal(run(x, x.shape, body), x)
    finite = np.where(np.isinf(x), np.float32(7), x)
    np.testing.assert_array_equal(run(-finite, x.shape, body), np.zeros_like(x))
    assert np.isnan(run(x * np.nan, x.shape, body)).all()


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
def test_numbers_apart_become_neighbours(lanes: int, stride: int) -> None:
    x = np.arange(3 + (lanes - 1) * stride + 1, dtype=np.float32)  # the last one read is the last there is

    def body(read: object, written: object) -> None:
        vectors.store(written, 0, vectors.load(read, 3, lanes, stride), lanes)

    assert run(x, (lanes,), body).tolist() == [3 + lane * stride for lane in range(lanes)]


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_a_square_is_transposed(lanes: int) -> None:
    x = np.arange(lanes * lanes, dtype=np.float32)

    def body(read: object, written: object) -> None:
        for row, vector in enumerate(vectors.transposed([vectors.load(read, i * lanes, lanes) for i in range(lanes)])):
            vectors.store(written, row * lanes, vector, lanes)

    np.testing.assert_array_equal(run(x, (lanes, lanes), body), x.reshape(lanes, lanes).T)


def test_the_larger_of_a_number_and_none_is_the_number() -> None:
    x = np.array([1, 2, np.nan, 2, 2, 1, 2, np.nan], np.float32)

    def body(read: object, written: object) -> None:
        vectors.store(written, 0, vectors.larger(vectors.load(read, 0, 4), vectors.load(read, 4, 4)), 4)

    assert run(x, (4,), body).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_vectors_of_one_width_cover_a_row(lanes: int) -> None:
    for length in range(1, 70):
        found = vectors.covering(length, lanes)
        assert {place for begin, width in found for place in range(begin, begin + width)} == set(range(length))
        assert {width for _, width in found} == {found[0][1]}
        assert len(found) == -(-length // found[0][1])
        assert found[0][1] == lanes or found[0][1] * 2 > length


@pytest.mark.parametrize(
    ("core", "rows", "columns", "packs"),
    [
        *[("cortex-a76", 197, 576, True), ("cortex-a76", 8, 192, True), ("cortex-a76", 7, 576, False)],
        *[("cortex-a76", 197, 8, False), ("haswell", 197, 576, False)],
    ],
)
def test_a_left_operand_is_packed_where_that_pays(core: str, rows: int, columns: int, packs: bool) -> None:
    processor = profile(core)
    assert bool(packed_bands(processor, rows, best_bands(processor, rows, columns), whole=False)) is packs


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


@pytest.mark.parametrize("core", cores())
def test_columns_summed_beside_a_tile_are_those_that_fill_no_vector(core: str) -> None:
    processor = profile(core)
    for columns in range(1, 300):
        for bands in bands_beside(processor, 48, columns):
            ends = [band.first + band.columns for band in bands]
            assert [band.first for band in bands] == [0, *ends[:-1]]
            assert ends[-1] == columns
            assert [band.beside for band in bands] == [0] * (len(bands) - 1) + [columns % processor.lanes]


@pytest.mark.parametrize("core", ["haswell", "cortex-a76"])
@pytest.mark.parametrize(("columns", "beside"), [(49, 1), (48, 0), (55, 0)])
def test_few_columns_left_over_are_summed_beside_a_tile(core: str, columns: int, beside: int) -> None:
    processor = profile(core)
    bands = best_bands(processor, 48, columns)
    found = packed_bands(processor, 48, bands, whole=False, written=True) or bands
    assert found[-1].beside == beside
