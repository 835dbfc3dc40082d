"""The integer program where losses lie orders of magnitude apart, as they do when one candidate has diverged."""

import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrewrite.selection import knapsack
from attnrewrite.selection.knapsack import ROUNDING, Choice, Columns, Table, solve, total

WIDE = st.one_of(st.just(0.0), st.floats(-5, 5).map(lambda power: 10**power))  # over ten orders of magnitude
PRECISION = 1e-5  # what the solver's own tolerances may cost


def with_one_diverged(loss: float) -> Table:
    losses = ((0.0, 1e-3, loss), (0.0, 2e-3, 3e-3), (0.0, 4e-4, 5e-3))
    return Table(("a", "b", "c"), losses, ((0.0, -1.2, -2.0), (0.0, -1.0, -1.5), (0.0, -1.0, -1.1)))


@pytest.mark.parametrize("loss", [1e3, 1e4, 1e5, 1e8, 1e12])
def test_one_diverged_candidate_leaves_the_others_as_they_are(loss: float) -> None:
    table = with_one_diverged(loss)
    assert table.cheapest(5e-4) == (0, 0, 1)
    assert table.cheapest(2.5e-3) == (1, 0, 1)
    assert [table.closest(price) for price in (0.0, -1.0, -2.0, -3.0)] == [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)]
    assert table.cheapest(math.inf) == (2, 2, 2)


@st.composite
def wide_problems(draw: st.DrawFn) -> tuple[Columns, Columns, float]:
    """What is minimised, what is limited, and a limit about which there is something to choose."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    minimised, limited = (tuple(tuple(draw(WIDE) for _ in range(size)) for size in sizes) for _ in range(2))
    return minimised, limited, draw(st.sampled_from([value for column in limited for value in column])) + draw(WIDE)


@given(wide_problems(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_ten_orders_of_magnitude_are_told_apart(problem: tuple[Columns, Columns, float], saves: bool) -> None:
    """Within rounding of the limit, and of what any other choice within it costs; savings are limited from below."""
    minimised, limited, limit = problem
    if saves:
        highest = [max(column) for column in limited]
        limited = tuple(tuple(value - most for value in column) for column, most in zip(limited, highest, strict=True))
        limit -= sum(highest)

    def lowest(at_most: float) -> float:
        every = itertools.product(*(range(len(column)) for column in minimised))
        return min((total(minimised, each) for each in every if total(limited, each) <= at_most), default=math.inf)

    found = solve(minimised, limited, limit)
    if found is None:
        assert lowest(limit - 4 * ROUNDING * abs(limit)) == math.inf
        return
    least = sum(map(min, limited))
    assert total(limited, found) <= limit + 4 * ROUNDING * max(abs(limit), abs(least))
    spared = limit - PRECISION * (limit - least)
    assert total(minimised, found) <= lowest(spared) * (1 + PRECISION)


@pytest.mark.parametrize("sharp", [knapsack.SHARP, 1.0])
def test_a_choice_that_the_solver_lets_over_the_limit_is_not_taken(
    sharp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1, the solver's tolerance is far above what separates these sums."""
    monkeypatch.setattr(knapsack, "SHARP", sharp)
    losses = ((0.0, 1.0), *((0.0, small) for small in (1e-7, 1e-8, 2e-9)))
    table = Table(tuple("abcd"), losses, ((0.0, -9.0), (0.0, -3.0), (0.0, -2.0), (0.0, -1.0)))
    assert table.cheapest(1.0) == (1, 0, 0, 0)
    assert table.cheapest(1.0 + 1.05e-8) == (1, 0, 1, 0)


def test_nothing_is_asked_of_the_solver_where_no_choice_is_within_the_limit() -> None:
    with patch.object(scipy.optimize, "milp", side_effect=AssertionError):
        assert solve(((0.0, 1.0),), ((1.0, 2.0),), 0.5) is None
        assert solve(((0.0, math.inf),), ((math.inf, 0.0),), 9.0) is None


def test_many_candidates_at_many_sites_are_chosen_alike_with_and_without_a_diverged_one() -> None:
    draws = np.random.default_rng(0)
    loss, price = draws.uniform(1e-4, 1e-2, (6, 12)), -draws.uniform(0.1, 1.0, (6, 12))

    def chosen(diverged: float) -> tuple[Choice | None, Choice | None]:
        losses = np.concatenate([np.zeros((6, 1)), loss, np.full((6, 1), diverged)], axis=1)
        prices = np.concatenate([np.zeros((6, 1)), price, np.full((6, 1), -2.0)], axis=1)
        table = Table(tuple("abcdef"), tuple(map(tuple, losses.tolist())), tuple(map(tuple, prices.tolist())))
        return table.cheapest(0.01), table.closest(-3.0)

    assert chosen(1e6) == chosen(math.inf)
