"""Search under a budget: solve the assignment with predicted losses, measure it, and tighten until the budget holds.

Predicted losses are additive over the sites and true losses are not: their sum is a good prediction while it is small
and a poor one above. So each assignment that the knapsack proposes is converted and measured, and the limit on the
predicted sum moves by bisection.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnrewrite.selection.knapsack import Choice, Table
from attnrewrite.selection.loss_bound import Loss

ROUNDS = 10  # conversions measured, at most
OVERSHOOT = 1.5  # the first limit, as a multiple of the one expected to hold
CONVERGED = 1.2  # bisection ends when the failing limit is within this factor of the holding one
COARSE = 1.3  # and within this one where only the cost is left to lower
SPAN = 100.0  # bisection starts no lower than the failing limit divided by this
NEGLIGIBLE = 1e-4  # nats of a site's loss that are no loss: half a point is a hundred times as much
MIN_STEP = 0.002  # a limit on the cost is lowered by at least this
MISPREDICTED = 1.25  # a true loss above this multiple of the predicted one rejects the prediction


@dataclass(frozen=True)
class Step:
    """A measured choice: predicted loss, loss on held-out images, whether the budget holds, and cost ratio if timed."""

    choice: Choice
    predicted: float
    loss: Loss
    holds: bool
    ratio: float | None = None


Losing = Callable[[Choice], Loss]


@dataclass(frozen=True)
class Bracket:
    """Limits on the predicted loss: the highest that held (0: none did), and the lowest that failed."""

    holds: float
    fails: float

    def narrowed(self, limit: float, step: Step) -> "Bracket":
        """What is left to search when `limit`, one between the two, led to `step`."""
        if step.holds:
            return Bracket(max(limit, step.predicted), self.fails)
        return Bracket(self.holds, min(limit, step.predicted))

    def between(self, times: float) -> float:
        """The next limit: `times` what held while nothing has failed, else the geometric mean of the two."""
        if math.isinf(self.fails):
            return times * self.holds
        return math.sqrt(max(self.holds, self.fails / SPAN) * self.fails)


def within_drop(
    table: Table,
    budget: float,
    expected: float,
    losing: Losing,
    known: Sequence[Step] = (),
    converged: float = CONVERGED,
) -> list[Step]:
    """Minimise the price subject to a loss bound of at most `budget` points.

    `expected` is the predicted loss (in the table's units) at which the budget is expected to be spent; the first limit
    is OVERSHOOT times that. While no choice has held, the limit drops to what remains with the worst site returned to
    softmax, or lower where the bound is far off; the knapsack may then swap candidates instead. Once one holds, it
    goes up in proportion to what is left of the budget; once one fails, too, it is bisected (geometrically) until the
    two are within `converged` of each other. A choice that replaces nothing is not measured.

    Returns every measured choice in order, `known` ones first. It ends, as every limit moves an end of the bracket by
    a factor, even one that leads to a choice that is known already.
    """
    measured = {step.choice: step for step in known}
    held = max((step for step in known if step.holds), key=lambda step: step.predicted, default=None)
    holds = 0.0 if held is None else held.predicted
    bracket = Bracket(holds, min((step.predicted for step in known if step.predicted > holds), default=math.inf))

    def after(step: Step) -> float:
        if step.holds or bracket.holds:
            return bracket.between(max(budget / step.loss.bound, converged))
        return _given_back(table, bracket, step, budget)

    first = max(OVERSHOOT * expected, table.least_loss) or math.inf
    limit = after(held) if held is not None and bracket.holds else first
    everything = table.cheapest(math.inf)
    most = math.inf if everything is None else table.total_loss(everything)
    while len(measured) < len(known) + ROUNDS and bracket.fails > converged * bracket.holds:
        choice = table.cheapest(limit)
        if choice is None or not any(choice):
            break
        if choice not in measured:
            loss = losing(choice)
            measured[choice] = Step(choice, table.total_loss(choice), loss, loss.bound <= budget)
        step = measured[choice]
        bracket = bracket.narrowed(limit, step)
        if step.holds and bracket.holds >= most:
            break
        limit = after(step)
    return list(measured.values())


def _given_back(table: Table, bracket: Bracket, step: Step, budget: float) -> float:
    """The next limit after a failing choice while none has held: 0 where not even the least loss has."""
    if bracket.fails <= table.least_loss:
        return 0.0
    kept = min(max(budget / step.loss.bound, 1 / 2), 1 - 1 / len(table.sites))  # the worst of n takes an n-th or more
    return max(min(table.without_worst(step.choice), kept * bracket.fails), table.least_loss)


def most_sites(table: Table) -> Table:
    """The same losses with prices that maximise the number of replaced sites, ties broken by the lower loss. A loss of
    at most NEGLIGIBLE is worth a lower price.
    """
    possible = [prices[number] for site, prices in enumerate(table.price) for number in table.possible(site)]
    lowest, highest = min(possible, default=0.0), max(possible, default=0.0)
    worth = NEGLIGIBLE / (highest - lowest) if highest > lowest else 0.0

    def rank(loss: float, price: float) -> float:
        return loss + worth * (price - lowest) if math.isfinite(loss + price) else 0.0

    most = 1 + NEGLIGIBLE * len(table.sites) + sum(max(filter(math.isfinite, column)) for column in table.loss)
    price = tuple(
        (0.0, *(rank(*each) / (2 * most) - 1.0 for each in zip(losses[1:], prices[1:], strict=True)))
        for losses, prices in zip(table.loss, table.price, strict=True)
    )
    return Table(table.sites, table.loss, price)


def cheapest_that_holds(table: Table, steps: list[Step]) -> Step | None:
    """The holding choice of the lowest price."""
    return min((step for step in steps if step.holds), key=lambda step: table.total_price(step.choice), default=None)


def within_price(
    table: Table, ratio: float, losing: Losing, timed: Callable[[Choice], float]
) -> tuple[list[Step], float]:
    """Minimise the loss subject to a measured cost of at most `ratio` of the original's.

    Prices are fractions of the original's cost, negative where a choice saves. `timed` measures the whole model's cost
    ratio; the limit on the predicted price is lowered by what the measurement exceeds it. Where a true loss is more
    than MISPREDICTED times the predicted one, the candidate of its worst site is removed, and the search continues
    while it finds a closer choice.

    Returns every measured choice in order, and the lowest cost ratio measured.
    """
    steps: list[Step] = []
    limit, lowest = ratio - 1, math.inf
    for _ in range(ROUNDS):
        choice = table.closest(limit)
        if choice is None or any(step.choice == choice for step in steps):
            break
        found = timed(choice)
        lowest = min(lowest, found)
        if found > ratio:
            limit = table.total_price(choice) - max(found - ratio, MIN_STEP)
            continue
        loss, predicted = losing(choice), table.total_loss(choice)
        better = all(loss.kl < step.loss.kl for step in steps)
        steps.append(Step(choice, predicted, loss, True, found))
        if not better or loss.kl <= MISPREDICTED * predicted:
            break
        table = _without(table, choice)
    return steps, lowest


def closest(steps: list[Step]) -> Step | None:
    """The choice of the lowest divergence from the original."""
    return min(steps, key=lambda step: step.loss.kl, default=None)


def _without(table: Table, choice: Choice) -> Table:
    """The table without the choice's worst candidate."""
    worst = max(range(len(choice)), key=lambda site: table.loss[site][choice[site]])
    column = list(table.loss[worst])
    column[choice[worst]] = math.inf
    loss = (*table.loss[:worst], tuple(column), *table.loss[worst + 1 :])
    return Table(table.sites, loss, table.price)
