"""The multiple-choice knapsack: one candidate for each site, the least of one quantity within a limit on another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

Choice = tuple[int, ...]  # for each site, the number of its candidate; 0 is softmax
Columns = tuple[tuple[float, ...], ...]  # a number for each site's candidates

GRID, RANGE = 16, 1e4  # limits tried along the frontier, and the largest over the smallest


@dataclass(frozen=True)
class Table:
    """What each candidate costs at each site: `loss` what it takes from the model's output (softmax: 0; not possible:
    infinite), `price` what is to be saved. Sums over the sites stand for the model.
    """

    sites: tuple[str, ...]
    loss: Columns
    price: Columns

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

    A candidate that is infinite in either is not chosen. None where no choice stays within the limit. An integer
    program (scipy's HiGHS) over a zero or one for each candidate, which sum to one at each site.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    goal, weight = (np.array([value for column in columns for value in column]) for columns in (minimised, limited))
    allowed = np.isfinite(goal) & np.isfinite(weight)
    goal, weight = (_scaled(values, allowed) for values in (goal, weight))
    owner = np.repeat(np.arange(len(minimised)), [len(column) for column in minimised])
    one_each = LinearConstraint((owner == np.arange(len(minimised))[:, None]).astype(float), 1, 1)
    constraints = [one_each]
    if isfinite(limit):
        largest = _largest(np.array([value for column in limited for value in column]), allowed)
        constraints.append(LinearConstraint(weight[None], -np.inf, limit / largest))
    found = milp(
        goal, integrality=np.ones(len(goal)), bounds=Bounds(0, allowed.astype(float)), constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        return None
    return tuple(int(part.argmax()) for part in _by_site(found.x, minimised))


def _largest(values: np.ndarray, allowed: np.ndarray) -> float:
    """What numbers are divided by, so that the solver's absolute tolerances are relative to them."""
    return float(np.abs(values[allowed]).max(initial=0.0)) or 1.0


def _scaled(values: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    return np.where(allowed, values, 0.0) / _largest(values, allowed)


def _by_site(values: np.ndarray, columns: Sequence[Sequence[float]]) -> Iterator[np.ndarray]:
    return iter(np.split(values, np.cumsum([len(column) for column in columns])[:-1]))
