"""The multiple-choice knapsack: one candidate for each site, the least of one quantity within a limit on another."""

from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

Choice = tuple[int, ...]  # for each site, the number of its candidate; 0 is softmax
Columns = tuple[tuple[float, ...], ...]  # a number for each site's candidates

GRID, RANGE = 16, 1e4  # limits tried along the frontier, and the largest over the smallest
ROUNDING = 1e-9  # what a sum may be over a limit by, as a part of both
SHARP = 1e3  # what a limit is scaled to: the solver lets any sum be over by about 1e-6


@dataclass(frozen=True)
class Table:
    """What each candidate costs at each site: `loss` what it takes from the model's output (softmax: 0; not possible:
    infinite), `price` what is to be saved. Sums over the sites stand for the model.
    """

    sites: tuple[str, ...]
    loss: Columns
    price: Columns

    def possible(self, site: int) -> list[int]:
        """The candidates that can stand at a site, softmax apart."""
        pairs = zip(self.loss[site], self.price[site], strict=True)
        return [number for number, pair in enumerate(pairs) if number and all(map(isfinite, pair))]

    def cheapest(self, limit: float) -> Choice | None:
        """The lowest price with a loss of at most `limit`; of equal ones, any."""
        return solve(self.price, self.loss, limit)

    def closest(self, limit: float) -> Choice | None:
        """The lowest loss with a price of at most `limit`; None where there is none."""
        return solve(self.loss, self.price, limit)

    def total_loss(self, choice: Choice) -> float:
        return total(self.loss, choice)

    def total_price(self, choice: Choice) -> float:
        return total(self.price, choice)

    def without_worst(self, choice: Choice) -> float:
        """The loss that would be left of `choice` were its worst site given back to softmax."""
        losses = [self.loss[site][candidate] for site, candidate in enumerate(choice)]
        return sum(losses) - max(losses)

    @property
    def least_loss(self) -> float:
        """The lowest loss of any candidate anywhere; 0 where there is none."""
        return min((value for column in self.loss for value in column[1:] if isfinite(value)), default=0.0)

    def frontier(self) -> tuple[Choice, ...]:
        """The choices that lower limits on the loss lead to, from none replaced to the lowest price of all."""
        losses = [value for column in self.loss for value in column if isfinite(value) and value > 0]
        if not losses:
            return (tuple(0 for _ in self.sites),)
        most = sum(max(filter(isfinite, column)) for column in self.loss)
        limits = [0.0, *np.geomspace(max(min(losses), most / RANGE), most, GRID), inf]
        return tuple(dict.fromkeys(choice for limit in limits if (choice := self.cheapest(limit)) is not None))


def total(columns: Columns, choice: Choice) -> float:
    return sum(column[candidate] for column, candidate in zip(columns, choice, strict=True))


def solve(minimised: Columns, limited: Columns, limit: float) -> Choice | None:
    """One candidate for each site, with the least sum of `minimised` whose sum of `limited` is at most `limit`.

    A candidate that is infinite in either is not chosen. None where no choice stays within the limit.

    The solver is exact to a part of the largest number it is given. So it is not given what alone is over the limit,
    nor what alone costs more than a choice that is known; and it is asked again until it knows no better.
    """
    goal, weight = _table(minimised), _table(limited)
    possible = np.isfinite(goal) & np.isfinite(weight)
    if not possible.any(axis=1).all():
        return None
    least = np.where(possible, weight, inf).min(axis=1, keepdims=True)
    room = limit - float(least.sum()) + ROUNDING * (abs(limit) + float(np.abs(least).sum()))
    if room < 0:
        return None
    weight = weight - least
    possible &= weight <= room
    goal = goal - np.where(possible, goal, inf).min(axis=1, keepdims=True)
    best = _choice(-np.where(possible, weight, inf))
    while True:
        possible &= goal <= _sum(goal, best)
        better = _solved(goal, weight, room, possible)
        if better is None or _sum(goal, better) >= _sum(goal, best):
            return best
        best = better


def _solved(goal: np.ndarray, weight: np.ndarray, room: float, possible: np.ndarray) -> Choice | None:
    """The least sum of `goal` [sites, candidates] whose sum of `weight` is at most `room`; none of what is `possible`
    is below 0 in either, or alone above `room`.

    An integer program (scipy's HiGHS) over a zero or one for each candidate, which sum to one at each site.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    cost, used = goal[possible], SHARP * weight[possible] / (room or 1.0)
    owner = np.nonzero(possible)[0]
    one_each = LinearConstraint((owner == np.arange(len(goal))[:, None]).astype(float), 1, 1)
    constraints = [one_each, LinearConstraint(used[None], -np.inf, SHARP)]
    while True:
        found = milp(
            cost / (cost.max() or 1.0), integrality=np.ones(len(cost)), bounds=Bounds(0, 1), constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )  # fmt: skip
        if found.x is None:
            return None
        values = np.zeros(goal.shape)
        values[possible] = found.x
        if _sum(weight, choice := _choice(values)) <= room:
            return choice
        # It is over by less than the solver can tell: any but this one.
        constraints.append(LinearConstraint(found.x.round()[None], -np.inf, len(goal) - 1))


def _choice(values: np.ndarray) -> Choice:
    """Each site's candidate of the highest value."""
    return tuple(map(int, values.argmax(axis=1)))


def _sum(values: np.ndarray, choice: Choice) -> float:
    return float(values[np.arange(len(choice)), choice].sum())


def _table(columns: Columns) -> np.ndarray:
    """The columns as [sites, candidates], infinite where a site has fewer candidates."""
    most = max(map(len, columns))
    return np.array([(*column, *[inf] * (most - len(column))) for column in columns])
