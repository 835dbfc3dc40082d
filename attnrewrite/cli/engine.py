"""A Core ML package explained: what of it stays on the Neural Engine, by rule."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrewrite.cli.output import Outcome, table
from attnrewrite.errors import InputError

if TYPE_CHECKING:
    from attnrewrite.targets.coreml.engine_rules import EngineReport


def explain_package(source: str) -> Outcome:
    """The package held against the rules. InputError where it cannot be read."""
    from attnrewrite.targets.coreml import interpreter, package
    from attnrewrite.targets.coreml.engine_rules import lint

    path = Path(source)
    if not path.is_dir():
        raise InputError(f"there is no package {source}: give a .mlpackage folder that coremltools or lower wrote")
    with package.quiet():
        report = lint(interpreter.load(path))
    return Outcome(engine_data(path.name, report), engine_table(path.name, report))


def engine_data(name: str, report: "EngineReport") -> dict[str, Any]:
    """The report as `explain --json` prints it; shares are from 0 to 1."""
    from attnrewrite.targets.coreml.engine_rules import RULES

    adds, operators = report.staying()
    return {
        "model": name,
        "frontend": "coreml",
        "operators": len(report.operators),
        "multiply_adds": report.multiply_adds,
        "staying": {"operators": operators, "multiply_adds": adds},
        "rules": [
            {key: getattr(rule, key) for key in ("id", "what", "why", "source", "cost")}
            | {
                "operators": [each.name for each in report.breaking(rule.id)],
                "multiply_adds": sum(each.multiply_adds for each in report.breaking(rule.id)),
            }
            for rule in RULES
        ],
    }


def engine_table(name: str, report: "EngineReport") -> Any:
    """The rules that the package breaks, a line each, and in the title what stays."""
    from rich.console import Group

    from attnrewrite.targets.coreml.engine_rules import RULES

    rows = []
    for rule in RULES:
        broken = report.breaking(rule.id)
        if broken:
            kinds = ", ".join(dict.fromkeys(each.kind for each in broken))
            adds = sum(each.multiply_adds for each in broken) / max(report.multiply_adds, 1)
            rows.append([rule.id, _COST[rule.cost], str(len(broken)), f"{adds:.1%}", kinds, broken[0].name, rule.what])
    columns = {
        "rule": "left", "what it does": "left", "operators": "right", "multiply-adds": "right", "kinds": "left",
        "first": "left", "what it is": "left",
    }  # fmt: skip
    title = f"{name}: {report.sentence()}"
    return Group(title, "", table(None, columns, rows)) if rows else title


_COST = {"leaves": "leaves the engine", "newer": "stays on newer engines", "slow": "slow there"}
