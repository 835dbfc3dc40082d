"""What report.json says of a selection: the budget and how it was held to, the table, and the frontier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attnrewrite.selection.costs import Costs
from attnrewrite.selection.knapsack import Choice, Table
from attnrewrite.selection.loss_bound import CONFIDENCE
from attnrewrite.selection.measurements import Measurements
from attnrewrite.selection.problem import DEFAULT, described
from attnrewrite.selection.search import Step

Scanned = Mapping[str, Sequence[Mapping[str, Any]]]


def report(found: Measurements, table: Table, steps: Sequence[Step], best: Step) -> dict[str, Any]:
    """The selection as plain data; infinities are None."""
    budget, costs, scanned = found.auto.budget, found.costs, found.scanned
    each = points_per_loss(scanned)
    names = ["softmax", *map(described, found.auto.candidates)]

    def facts(choice: Choice) -> dict[str, Any]:
        chosen = dict(zip(table.sites, choice, strict=True))
        return {
            "cost_ratio": costs.ratio(chosen),
            "replaced": sum(map(bool, choice)),
            "sites": {site: names[number] for site, number in chosen.items()},
        }

    predicted = [
        {"kind": "predicted", "points": each * table.total_loss(choice), "kl": table.total_loss(choice),
         **facts(choice)}
        for choice in table.frontier()
    ]  # fmt: skip
    measured = [
        {"kind": "measured", **asdict(step.loss), "predicted_points": each * step.predicted, "holds": step.holds,
         "chosen": step is best, "timed_ratio": step.ratio, **facts(step.choice)}
        for step in steps
    ]  # fmt: skip
    return {
        "max_drop": budget.max_drop,
        "max_latency": budget.max_latency,
        "target": budget.target,
        "candidates": list(budget.candidates or DEFAULT),
        "measure": found.meter.measure,
        "confidence": CONFIDENCE,
        "cost": {"status": costs.status, "unit": costs.unit, "how": costs.how, "original": costs.whole},
        "sites": [_site(site, names, scanned, costs) for site in table.sites],
        "frontier": [*predicted, *measured],
        "promise": {**asdict(best.loss), **facts(best.choice), "timed_ratio": best.ratio},
    }


def points_per_loss(scanned: Scanned) -> float:
    """How many points are lost for a loss of one, over all candidates that stood alone."""
    found = [each["loss"] for row in scanned.values() for each in row if "loss" in each]
    kl = sum(max(0.0, loss["kl"]) for loss in found)
    return sum(loss["points"] for loss in found) / kl if kl else 0.0


def _site(site: str, names: Sequence[str], scanned: Scanned, costs: Costs) -> dict[str, Any]:
    softmax, *rest = costs.sites[site]
    rows = zip(names[1:], scanned[site], rest, strict=True)
    alone = [
        {
            "candidate": name,
            "kl": found["loss"]["kl"] if "loss" in found else None,
            "points": found["loss"]["points"] if "loss" in found else None,
            "cost": cost if math.isfinite(cost) else None,
            "reason": found.get("reason"),
        }
        for name, found, cost in rows
    ]
    return {"id": site, "softmax_cost": softmax, "candidates": alone}
