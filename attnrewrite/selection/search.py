"""Searching under a budget: what is solved with predicted losses is measured, and changed until the budget holds.

Predicted losses add up over the sites, which true ones do not: sums predict well while they are small, and badly above.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnrewrite.selection.knapsack import Choice, Table
from attnrewrite.selection.loss_bound import Loss

ROUNDS = 10  # conversions that are measured at most
EAGER = 1.5  # how far the first one goes beyond what is predicted to hold
CLOSE = 1.2  # limits nearer than this are not told apart
FAR = 100.0  # a limit that holds is taken to be at least this part of one that fails
LEAST = 0.002  # by how much a limit on the cost is lowered at least
OFF = 1.25  # a true loss so many times the predicted one is not what was predicted


@dataclass(frozen=True)
class Step:
    """A choice that was measured: the loss it was predicted, what it lost on held-out images, and whether it held."""

    choice: Choice
    predicted: float
    loss: Loss
    holds: bool
    ratio: float | None = None


Losing = Callable[[Choice], Loss]


def within_drop(table: Table, budget: float, expected: float, losing: Losing, known: Sequence[Step] = ()) -> list[Step]:
    """Look for the lowest price whose bound is at most `budget` points; every choice that was measured, in order, after
    those `known`.

    `expected` is the loss (as the table has it) at which the budget is expected to be spent. The first choice goes a
    little beyond. While none has held, the next is allowed at most the loss that would be left were the worst site
    given back to softmax, and less where the bound is far off; the program may then swap candidates instead. Between
    one that holds and one that does not, the limit is halved until they are close. No choice that replaces nothing is
    measured.
    """
    measured = {step.choice: step for step in known}
    holding = max((step.predicted for step in known if step.holds), default=0.0)
    failing = min((step.predicted for step in known if step.predicted > holding), default=math.inf)
    limit = _between(holding, failing) if holding else max(EAGER * expected, table.least_loss)
    everything = table.cheapest(math.inf)
    while len(measured) < len(known) + ROUNDS and failing > CLOSE * holding:
        choice = table.cheapest(limit)
        if choice is None or not any(choice):
            break
        if choice not in measured:
            loss = losing(choice)
            measured[choice] = Step(choice, table.total_loss(choice), loss, loss.bound <= budget)
        step = measured[choice]
        if step.holds:
            holding = max(limit, step.predicted)
        else:
            failing = step.predicted
        if step.holds and choice == everything:
            break
        limit = _between(holding, failing) if holding else _given_back(table, step, budget)
    return list(measured.values())


def _between(holding: float, failing: float) -> float:
    """The next limit to try: twice what holds while nothing fails, else between the two."""
    return 2 * holding if math.isinf(failing) else math.sqrt(max(holding, failing / FAR) * failing)


def _given_back(table: Table, step: Step, budget: float) -> float:
    """The next limit after a choice that fails, while none has held."""
    at_most = max(step.predicted * budget / step.loss.bound, step.predicted / 2)
    less = min(table.without_worst(step.choice), at_most)
    return max(less, table.least_loss) if table.least_loss < step.predicted else less


def most_sites(table: Table) -> Table:
    """The same losses with other prices: the more sites are replaced the better, and then the closer."""
    most = 1 + sum(max(filter(math.isfinite, column)) for column in table.loss)
    price = tuple(
        tuple((-1.0 if number else 0.0) + (loss / (2 * most) if math.isfinite(loss) else 0.0)
              for number, loss in enumerate(column))
        for column in table.loss
    )  # fmt: skip
    return Table(table.sites, table.loss, price)


def cheapest_that_holds(table: Table, steps: list[Step]) -> Step | None:
    """Of the choices that hold, the one of the lowest price."""
    return min((step for step in steps if step.holds), key=lambda step: table.total_price(step.choice), default=None)


def within_price(
    table: Table, ratio: float, losing: Losing, timed: Callable[[Choice], float]
) -> tuple[list[Step], float]:
    """Look for the lowest loss at a measured cost of at most `ratio` of the original's; every choice that was measured,
    and the lowest cost that was seen.

    Prices are parts of the original's cost, saved where they are negative; `timed` measures the whole model's ratio,
    and the limit is lowered by what that is over. Where a true loss is more than OFF times the predicted one, its worst
    site's candidate is left out, and the search goes on while that finds something closer.
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
            limit = table.total_price(choice) - max(found - ratio, LEAST)
            continue
        loss, predicted = losing(choice), table.total_loss(choice)
        better = all(loss.kl < step.loss.kl for step in steps)
        steps.append(Step(choice, predicted, loss, True, found))
        if not better or loss.kl <= OFF * predicted:
            break
        table = _without(table, choice)
    return steps, lowest


def closest(steps: list[Step]) -> Step | None:
    """The choice that changes the output least."""
    return min(steps, key=lambda step: step.loss.kl, default=None)


def _without(table: Table, choice: Choice) -> Table:
    """The table without the candidate of the choice that loses most."""
    worst = max(range(len(choice)), key=lambda site: table.loss[site][choice[site]])
    column = list(table.loss[worst])
    column[choice[worst]] = math.inf
    loss = (*table.loss[:worst], tuple(column), *table.loss[worst + 1 :])
    return Table(table.sites, loss, table.price)
