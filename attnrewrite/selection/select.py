"""Which site gets which variant, under a budget on accuracy or on latency.

1. Every candidate stands alone at each site, fitted in closed form: the divergence of the model's output is its loss.
2. Its price is its time on the target, or multiply-adds where that cannot be measured, in these words.
3. An integer program chooses, with softmax a candidate everywhere. The choice is fitted together and measured, by
   cross-fitting: each half of the images by the model that was fitted to the other half. Until the budget holds, the
   worst site is given back (`search`).
4. A budget on accuracy holds when the upper confidence bound of what is lost stays within it (`loss_bound`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.calibration.processes import Processes
from attnrewrite.errors import CheckFailedError, InputError, NothingMatchedError, Refusal
from attnrewrite.images.pool import Pool
from attnrewrite.request import Execution
from attnrewrite.selection.knapsack import Choice, Columns, Table
from attnrewrite.selection.measurements import Measurements
from attnrewrite.selection.problem import Auto, Extraction, described
from attnrewrite.selection.report import points_per_loss, report
from attnrewrite.selection.search import (
    COARSE,
    Step,
    cheapest_that_holds,
    closest,
    most_sites,
    within_drop,
    within_price,
)
from attnrewrite.variants.base import Variant


@dataclass(frozen=True)
class Selection:
    """The variant of each site that is replaced, why others are not, and what report.json says of it all (None where
    the variant was named and nothing had to be chosen).
    """

    standing: Mapping[str, Variant]
    reasons: Mapping[str, Refusal]
    report: Mapping[str, Any] | None = None


def select(auto: Auto, extraction: Extraction, images: Pool, execution: Execution, processes: Processes) -> Selection:
    """Choose a variant for each site of `extraction` by what `auto` asks, measured on `images`.

    Raises:
        InputError: the model is no classifier, or the images are too few for the promise.
        NothingMatchedError: no candidate can stand anywhere, or nothing can be replaced within --max-drop.
        CheckFailedError: no choice comes down to --max-latency.
    """
    found = Measurements(auto, extraction, images, execution, processes)
    _check_promise(found)
    table = Table(tuple(found.scanned), losses(found.scanned), prices(found))
    _check_possible(found, table)
    steps = _searched(found, table)
    best = cheapest_that_holds(table, steps) if auto.budget.max_drop is not None else closest(steps)
    if best is None or not any(best.choice):
        raise _nothing(found, table, steps)
    return Selection(
        standing(auto, table, best.choice), _reasons(found, table, best.choice), report(found, table, steps, best)
    )


def losses(scanned: Mapping[str, Sequence[Mapping[str, Any]]]) -> Columns:
    """The divergence that softmax (none) and each candidate make at each site; infinite where one cannot stand."""
    return tuple(
        (0.0, *(max(0.0, each["loss"]["kl"]) if "loss" in each else math.inf for each in row))
        for row in scanned.values()
    )


def prices(found: Measurements) -> Columns:
    """Parts of the original's cost, negative where a candidate saves. With no target, a site that is replaced counts
    more than all that could be saved.
    """
    costs = found.costs
    parts = {site: [(cost - row[0]) / costs.whole for cost in row] for site, row in costs.sites.items()}
    if found.auto.budget.target is not None:
        return tuple(tuple(parts[site]) for site in found.scanned)
    most = 1 + 2 * sum(max(abs(part) for part in row if math.isfinite(part)) for row in parts.values())
    return tuple(
        tuple((-1.0 if number else 0.0) + part / most for number, part in enumerate(parts[site]))
        for site in found.scanned
    )


def standing(auto: Auto, table: Table, choice: Choice) -> dict[str, Variant]:
    """The sites that `choice` replaces, with what stands there."""
    return {site: auto.candidates[n - 1] for site, n in zip(table.sites, choice, strict=True) if n}


def _check_promise(found: Measurements) -> None:
    """Raise InputError where even a model that changes nothing could not be promised to."""
    least, budget, count = found.meter.least_bound, found.auto.budget.max_drop, len(found.images.images)
    if budget is not None and least > budget:
        raise InputError(
            f"{count} images cannot tell a loss of {budget:g} points from nothing (they bound it by {least:.2f}): give "
            f"about {math.ceil(1.5 * count * least / budget)} (--calibrate, --samples), or a larger --max-drop"
        )


def _check_possible(found: Measurements, table: Table) -> None:
    """Raise NothingMatchedError where no budget would help."""
    if not any(map(table.possible, range(len(table.sites)))):
        what, why = _obstacle(found, table, 0)
        raise NothingMatchedError(
            f"no candidate can stand at any site of {found.extraction.name} ({what} at {table.sites[0]}: {why}): "
            "give other candidates (--candidates)"
        )


def _searched(found: Measurements, table: Table) -> list[Step]:
    auto, asked = found.auto, found.auto.budget

    def losing(choice: Choice) -> Any:
        return found.loss(standing(auto, table, choice))

    if asked.max_drop is not None:
        each = points_per_loss(found.scanned)
        budget, expected = asked.max_drop, asked.max_drop / each if each else math.inf
        # Without a target, first as many sites as hold by their closest forms; what is then left is spent on the cost.
        if asked.target:
            return within_drop(table, budget, expected, losing)
        known = within_drop(most_sites(table), budget, expected, losing)
        return within_drop(table, budget, expected, losing, known, COARSE)
    assert asked.max_latency is not None
    steps, lowest = within_price(
        table, asked.max_latency, losing, lambda choice: found.ratio(standing(auto, table, choice))
    )
    if steps:
        return steps
    lowest = min(lowest, 1 + sum(min(row) for row in table.price))
    raise CheckFailedError(
        f"no choice of candidates brings {found.extraction.name} down to {asked.max_latency:g} of its cost on "
        f"{asked.target} (the lowest is {lowest:.2f}; {found.costs.how}): allow more, "
        "or other candidates (--candidates)"
    )


def _reasons(found: Measurements, table: Table, choice: Choice) -> dict[str, Refusal]:
    """Why sites are left as they are."""
    return {table.sites[site]: _reason(found, table, site) for site, number in enumerate(choice) if number == 0}


def _reason(found: Measurements, table: Table, site: int) -> Refusal:
    row, possible = table.loss[site], table.possible(site)
    if not possible:
        what, why = _obstacle(found, table, site)
        return Refusal("no-candidate", f"no candidate can stand there ({what}: {why})")
    near = min(possible, key=row.__getitem__)
    what = described(found.auto.candidates[near - 1])
    why = f"the budget is better spent elsewhere (closest there: {what}, {row[near]:.2g} nats)"
    return Refusal("not-selected", why)


def _obstacle(found: Measurements, table: Table, site: int) -> tuple[str, str]:
    """The first candidate, and why it cannot stand at a site where none can."""
    why = found.scanned[table.sites[site]][0].get("reason", f"{found.auto.budget.target} does not take it")
    return described(found.auto.candidates[0]), why


def _nothing(found: Measurements, table: Table, steps: Sequence[Step]) -> NothingMatchedError:
    asked = found.auto.budget
    tried = [step for step in steps if any(step.choice)]
    least = min(tried, key=lambda step: step.loss.bound, default=None)
    seen = "softmax everywhere suits the budget best"
    if least is not None:
        what = f"replacing {sum(map(bool, least.choice))} of {len(table.sites)} sites"
        seen = f"{what} loses {least.loss.points:.2f} points, at most {least.loss.bound:.2f}"
    budget = f"--max-latency {asked.max_latency}" if asked.max_drop is None else f"--max-drop {asked.max_drop:g}"
    return NothingMatchedError(
        f"no site of {found.extraction.name} is to be replaced within {budget} ({seen}); "
        "choose another budget, give more images, or other candidates (--candidates)"
    )
