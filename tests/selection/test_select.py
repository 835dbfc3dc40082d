"""Choosing a variant for each site: the integer program, the search on artificial losses, the promise, the budget."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variant_sites import make_site

from attnrewrite.errors import InputError
from attnrewrite.request import Budget
from attnrewrite.selection.knapsack import Choice, Columns, Table, solve, total
from attnrewrite.selection.loss_bound import AGREEMENT, TOP1, Loss, LossMeter, most_of, most_on_average
from attnrewrite.selection.problem import PUBLISHED, Auto, candidates, described, requested
from attnrewrite.selection.search import (
    Bracket,
    Step,
    cheapest_that_holds,
    closest,
    most_sites,
    within_drop,
    within_price,
)
from attnrewrite.site import Grid
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, variants

NUMBERS = st.one_of(st.floats(0, 10), st.floats(1e-6, 1e-3), st.just(math.inf))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Columns, Columns, float]:
    """What is minimised, what is limited (never infinite in the first place of a site), and the limit."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))

    def columns() -> Columns:
        return tuple((draw(st.floats(0, 5)), *(draw(NUMBERS) for _ in range(size - 1))) for size in sizes)

    return columns(), columns(), draw(st.floats(0, 20))


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_program_finds_what_trying_everything_finds(problem: tuple[Columns, Columns, float]) -> None:
    minimised, limited, limit = problem
    every = itertools.product(*(range(len(column)) for column in minimised))
    found = solve(minimised, limited, limit)
    slack = 1e-5 * max(1.0, *(value for column in limited for value in column if math.isfinite(value)))
    allowed = [
        choice for choice in every if total(limited, choice) <= limit and math.isfinite(total(minimised, choice))
    ]
    if found is None:
        assert all(total(limited, choice) > limit - slack for choice in allowed)
        return
    assert total(limited, found) <= limit + slack
    largest = max(value for column in minimised for value in column if math.isfinite(value))
    if allowed:
        best = min(total(minimised, choice) for choice in allowed)
        assert total(minimised, found) <= best + 1e-5 * max(largest, 1e-9)


# Three sites: a form that is close and dear, one that is far off and cheap. The last site is the delicate one.
TABLE = Table(
    ("a", "b", "c"),
    ((0.0, 0.01, 0.02), (0.0, 0.02, 0.04), (0.0, 0.2, 0.4)),
    ((0.0, -1.1, -1.2), (0.0, -1.1, -1.2), (0.0, -1.1, -1.2)),
)


def oracle(points: Callable[[float], float], table: Table = TABLE) -> Callable[[Choice], Loss]:
    """What is measured, as a function of the predicted loss."""

    def measured(choice: Choice) -> Loss:
        lost = points(table.total_loss(choice))
        return Loss("points", lost, lost, None, 100 - lost, lost / 10, 1000)

    return measured


ORACLES: dict[str, tuple[Callable[[float], float], float, float, Choice | None]] = {
    # name: (points for a predicted loss, budget, expected limit, the choice that is right)
    "as predicted, everything fits": (lambda loss: 10 * loss, 5.0, 0.5, (2, 2, 2)),
    "as predicted, the delicate site does not": (lambda loss: 10 * loss, 0.65, 0.065, (2, 2, 0)),
    "better than predicted: it goes further": (lambda loss: 1 * loss, 0.3, 0.03, (2, 2, 1)),
    "ten times worse: it gives back": (lambda loss: 100 * loss, 3.5, 0.35, (1, 1, 0)),
    "one site is all there is": (lambda loss: 10 * loss, 0.15, 0.015, (1, 0, 0)),
    "nothing fits": (lambda loss: 5.0, 0.5, 0.05, None),
}


@pytest.mark.parametrize("case", ORACLES)
def test_sites_are_given_back_until_the_budget_holds(case: str) -> None:
    points, budget, expected, wanted = ORACLES[case]
    steps = within_drop(TABLE, budget, expected, oracle(points))
    best = cheapest_that_holds(TABLE, steps)
    assert (best and best.choice) == wanted
    assert len({step.choice for step in steps}) == len(steps)
    assert all(step.holds == (step.loss.bound <= budget) for step in steps)
    assert all(any(step.choice) for step in steps)


def test_the_first_thing_given_back_is_the_worst_site() -> None:
    steps = within_drop(TABLE, 2.0, 0.4, oracle(lambda loss: 100 * loss if loss > 0.1 else loss))
    assert steps[0].choice[2]
    assert steps[1].choice == (2, 2, 0)


def test_what_is_left_of_the_budget_is_gone_on_to_at_once() -> None:
    """From a choice that spends a third of the budget to a limit three times as high, in one step."""
    table = Table(("a",), ((0.0, 0.01, 0.02, 0.03, 0.1),), ((0.0, -1.0, -1.1, -1.2, -1.3),))
    points = oracle(lambda loss: 10 * loss, table)
    known = [Step((1,), 0.01, points((1,)), True)]
    assert [step.choice for step in within_drop(table, 0.31, 0.031, points, known)] == [(1,), (3,), (4,)]


class Stuck(Table):
    """One whose program gives the same choice for every limit."""

    def cheapest(self, limit: float) -> Choice | None:
        return (1, 1, 1)


@pytest.mark.parametrize("known", [[], [((2, 0, 0), True)], [((2, 2, 2), False)]])
@pytest.mark.parametrize("lost", [0.1, 1.0, 1 + 1e-12, 9.0])
def test_a_choice_that_comes_again_and_again_ends_the_search(lost: float, known: list[tuple[Choice, bool]]) -> None:
    """Whether it held or failed: each limit halves, or else bisects, what is left."""
    asked: list[Choice] = []

    def losing(choice: Choice) -> Loss:
        assert len(asked) < 2
        asked.append(choice)
        return oracle(lambda loss: lost)(choice)

    table = Stuck(TABLE.sites, TABLE.loss, TABLE.price)
    steps = [Step(choice, table.total_loss(choice), losing(choice), holds) for choice, holds in known]
    found = within_drop(table, 1.0, 0.1, losing, steps)
    assert [step.choice for step in found] == [*(step.choice for step in steps), (1, 1, 1)]


def test_a_choice_that_is_to_lose_nothing_and_holds_is_gone_on_from() -> None:
    table = Table(("a",), ((0.0, 0.0, 0.002, 0.02),), ((0.0, -1.0, -1.1, -1.2),))
    steps = within_drop(table, 1.0, 0.015, oracle(lambda loss: 100 * loss + 0.1, table))
    assert [step.choice for step in steps] == [(3,), (1,), (2,)]


def test_what_is_left_between_limits_is_narrowed_by_both_a_limit_and_what_it_led_to() -> None:
    bracket, loss = Bracket(0.1, 0.8), oracle(lambda loss: 1.0)((1, 0, 0))
    assert bracket.narrowed(0.4, Step((1, 0, 0), 0.3, loss, True)) == Bracket(0.4, 0.8)
    assert bracket.narrowed(0.4, Step((1, 0, 0), 0.3, loss, False)) == Bracket(0.1, 0.3)
    assert bracket.narrowed(0.4, Step((1, 0, 0), 0.5, loss, False)) == Bracket(0.1, 0.4)


def test_most_sites_come_first_then_the_lowest_loss_and_a_lower_price_where_none_is_lost() -> None:
    losses = ((0.0, 0.01, 0.02), (0.0, 0.0, 2e-5), (0.0, math.inf, 0.3))
    table = Table(("a", "b", "c"), losses, ((0.0, -1.0, -1.5), (0.0, -1.0, -1.5), (0.0, -1.9, -1.0)))
    assert most_sites(table).cheapest(math.inf) == (1, 2, 2)
    assert most_sites(table).cheapest(0.05) == (1, 2, 0)


def test_a_limit_on_the_cost_is_lowered_by_what_the_whole_model_is_over() -> None:
    table = Table(("a", "b"), ((0.0, 0.1), (0.0, 0.2)), ((0.0, -0.3), (0.0, -0.3)))

    def timed(choice: Choice) -> float:
        return 1 - 0.2 * sum(choice)

    steps, lowest = within_price(table, 0.75, oracle(lambda loss: 10 * loss, table), timed)
    assert [(step.choice, step.ratio) for step in steps[:1]] == [((1, 1), pytest.approx(0.6))]
    assert lowest == pytest.approx(0.6)
    none, lowest = within_price(table, 0.5, oracle(lambda loss: 10 * loss, table), timed)
    assert none == []
    assert lowest == pytest.approx(0.6)


def test_a_loss_that_is_far_from_predicted_sends_the_search_on_and_the_closest_is_kept() -> None:
    table = Table(("a",), ((0.0, 0.1, 0.2),), ((0.0, -0.5, -0.5),))
    true = {(1,): 0.3, (2,): 0.2}

    def losing(choice: Choice) -> Loss:
        return Loss("points", 1.0, 1.0, None, 99.0, true[choice], 100)

    steps, _ = within_price(table, 0.6, losing, lambda choice: 0.5)
    best = closest(steps)
    assert [step.choice for step in steps] == [(1,), (2,)]
    assert best is not None
    assert best.choice == (2,)


def test_the_frontier_runs_from_nothing_replaced_to_the_lowest_price() -> None:
    choices = TABLE.frontier()
    assert choices[0] == (0, 0, 0)
    assert choices[-1] == (2, 2, 2)
    prices = [TABLE.total_price(choice) for choice in choices]
    assert prices == sorted(prices, reverse=True)


def logits(classes: list[int], confidence: float) -> torch.Tensor:
    """Logits whose class has the given probability, of three."""
    rest = (1 - confidence) / 2
    return torch.tensor([[confidence if i == c else rest for i in range(3)] for c in classes]).double().log()


def test_without_labels_the_promise_is_the_exact_bound_of_a_share() -> None:
    judge = LossMeter.of(logits([0] * 1000, 0.9), None)
    loss = judge.loss(logits([1] * 2 + [0] * 998, 0.9))
    assert loss.measure == AGREEMENT
    assert (loss.points, loss.counted) == (pytest.approx(0.2), None)
    assert loss.bound == pytest.approx(100 * most_of(2, 1000))
    assert judge.least_bound == pytest.approx(100 * (1 - 0.05 ** (1 / 1000)))  # the rule of three


def test_with_labels_a_change_costs_the_difference_of_the_chances() -> None:
    # The original gives its class 0.8 and is right eight times in ten, so that nothing has to be tempered.
    labels = np.array(([0] * 8 + [1, 2]) * 100)
    judge = LossMeter.of(logits([0] * 1000, 0.8), labels)
    assert judge.temperature == pytest.approx(1.0, abs=1e-3)
    loss = judge.loss(logits([1] * 10 + [0] * 990, 0.8))
    assert loss.measure == TOP1
    assert loss.points == pytest.approx(100 * 10 / 1000 * (0.8 - 0.1), abs=1e-2)
    assert loss.counted == pytest.approx(0.7)
    assert loss.points < loss.bound < loss.points + 1


def test_logits_that_are_no_number_are_infinitely_far_off() -> None:
    loss = LossMeter.of(logits([0] * 10, 0.9), None).loss(torch.full((10, 3), math.nan).double())
    assert loss.kl == math.inf
    assert loss.points == 100.0
    steps = [Step((number,), 0.1, replace(loss, kl=kl), True) for number, kl in enumerate((loss.kl, 0.3))]
    assert closest(steps) is steps[1]


def test_a_count_that_contradicts_the_chances_raises_the_bound() -> None:
    # The original is right where it is unsure, so that its chances take the student's errors lightly.
    original = torch.cat([logits([0] * 900, 0.98), logits([1] * 100, 0.34)])
    labels = np.array([0] * 900 + [1] * 100)
    given_up = torch.cat([logits([0] * 900, 0.98), logits([2] * 100, 0.34)])
    loss = LossMeter(original, labels).loss(given_up)
    assert loss.counted == pytest.approx(10.0)
    assert loss.points < 0.5
    assert loss.bound > 8


@pytest.mark.parametrize("images", [125, 1000])
@pytest.mark.parametrize("share", [0.002, 0.01, 0.04])
def test_the_bound_holds_about_as_often_as_it_says(images: int, share: float) -> None:
    draws, size = np.random.default_rng(0), 0.3
    values = np.where(draws.random((2000, images)) < share, 2 * size * draws.random((2000, images)), 0.0)
    held = np.mean([most_on_average(sample, size) >= share * size for sample in values])
    assert held >= 0.92  # 0.95 in the limit of many images


def test_candidates_are_sets_names_and_names_with_options() -> None:
    assert tuple(described(variant) for variant in candidates(["published"])) == PUBLISHED
    assert {variant.name for variant in candidates(["all"])} == set(variants()) - {"softmax"}
    chosen = candidates(["masked:heads=0,2,size=3", "l1", "published"])
    assert [described(variant) for variant in chosen[:2]] == ["masked:size=3,heads=[0,2]", "l1"]
    assert len(chosen) == len(set(chosen)) == 1 + len(PUBLISHED)
    assert all(
        candidates([described(variant)]) == (variant,) for variant in candidates(["all", *map(described, chosen)])
    )


def test_candidates_may_approximate_a_bias_as_what_each_loses_is_measured() -> None:
    auto = Auto(Budget(max_drop=0.5), candidates(["l1", "l1:approximate=true", "masked:size=3"]))
    plain, biased, masked = (make_site(grid=Grid(3, 3), bias=bias) for bias in ("none", "constant", "input"))
    assert auto.among([plain, masked]) is auto
    rough = [described(variant) for variant in auto.among([plain, biased]).candidates]
    assert rough == ["l1:approximate=true", "masked:approximate=true,size=3"]


def test_a_named_variant_needs_no_budget() -> None:
    assert requested("l1", {"centred": False}) == get_variant("l1", {"centred": False})
    auto = requested("auto", budget=Budget(max_drop=0.5, candidates=("published",)))
    assert isinstance(auto, Auto)
    assert (auto.budget.candidates, len(auto.candidates)) == (("published",), len(PUBLISHED))


BAD = {
    "max-drop without auto": (("l1",), {"max_drop": 1.0}, "--max-drop is for --variant auto, and the variant is l1"),
    "for without auto": (("l1",), {"target": "host"}, "--for is for --variant auto"),
    "candidates without auto": (("l1",), {"candidates": ["all"]}, "--candidates is for --variant auto"),
    "no budget": (("auto",), {}, "was given no budget, and takes one: --max-drop 0.5, or --max-latency 0.7 --for host"),
    "two budgets": (("auto",), {"max_drop": 1.0, "max_latency": 0.5, "target": "host"}, "was given two budgets"),
    "no place": (("auto",), {"max_latency": 0.7}, "--max-latency needs to know where: --for host"),
    "no drop": (("auto",), {"max_drop": 0.0}, "--max-drop 0 must lie between 0 and 100"),
    "NaN": (("auto",), {"max_drop": math.nan}, "--max-drop nan must lie between 0 and 100"),
    "slower": (
        ("auto",),
        {"max_latency": 1.2, "target": "host"},
        "--max-latency 1.2 must lie above 0 and be at most 1",
    ),
    "no such target": (("auto",), {"max_latency": 0.7, "target": "hots"}, "unknown target 'hots': did you mean 'host'"),
    "no images": (("auto",), {"max_drop": 1.0, "calibrated": False}, "give --calibrate DATA"),
    "an option": (("auto", {"centred": "false"}), {"max_drop": 1.0}, "such as --candidates l1:centred=false"),
    "no such candidate": (("auto",), {"max_drop": 1.0, "candidates": ["publshed"]}, "did you mean 'published'"),
    "several in one": (("auto",), {"max_drop": 1.0, "candidates": ["l1,mobile"]}, "give each its own --cand"),
    "no such option": (("auto",), {"max_drop": 1.0, "candidates": ["l1:centerd=true"]}, "did you mean 'centred'"),
    "no value": (("auto",), {"max_drop": 1.0, "candidates": ["l1:centred"]}, "'centred' is not KEY=VALUE"),
    "softmax alone": (("auto",), {"max_drop": 1.0, "candidates": ["softmax"]}, "no candidates: give a set"),
    "more than a site": (("auto",), {"max_drop": 1.0, "candidates": ["l1:relu=true"]}, "relu=true changes the MLPs"),
}


def asked(*arguments: Any, calibrated: bool = True, **budget: Any) -> Variant | Auto:
    return requested(*arguments, budget=Budget(**budget), calibrated=calibrated)


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_go_together_is_one_line_before_any_work(case: str) -> None:
    arguments, options, message = BAD[case]
    with pytest.raises(InputError) as raised:
        asked(*arguments, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_a_target_the_number_of_sites_comes_first_and_what_is_left_goes_to_the_cost() -> None:
    table = Table(("a", "b"), ((0.0, 0.001, 0.03), (0.0, 0.01, 0.03)), ((0.0, -0.1, -0.3), (0.0, -0.1, -0.3)))
    losing = oracle(lambda loss: 10 * loss, table)
    assert [most_sites(table).cheapest(limit) for limit in (0.005, 0.05)] == [(1, 0), (1, 1)]
    known = within_drop(most_sites(table), 0.45, 0.03, losing)
    assert [step.choice for step in known] == [(1, 1)]
    steps = within_drop(table, 0.45, 0.03, losing, known)
    best = cheapest_that_holds(table, steps)
    assert best is not None
    assert best.choice in {(2, 1), (1, 2)}
