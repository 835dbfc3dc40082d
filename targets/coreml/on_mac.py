"""What a Mac, or an iPhone at one, says of a package: the processor planned for each operator, and loading times.

The engine's rules (`engine_rules.py`) are what others found out; this is what the system itself plans.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrewrite.errors import Refusal, first_line
from attnrewrite.targets.coreml import package

NAMES = {
    "MLNeuralEngineComputeDevice": "the Neural Engine",
    "MLGPUComputeDevice": "the GPU",
    "MLCPUComputeDevice": "the CPU",
}  # coremltools' classes of processors


@dataclass(frozen=True)
class Plan:
    """How many operators Core ML prefers to run on each processor, and their share of the cost that it expects, 0 to 1.

    Constants, which run nowhere, are left out.
    """

    operators: Mapping[str, int]
    cost: Mapping[str, float]

    def sentence(self) -> str:
        """Processor by processor, the one of most operators first."""
        parts = [
            f"{count} operator{'s' if count > 1 else ''} on {name} ({self.cost[name]:.0%} of the expected cost)"
            for name, count in sorted(self.operators.items(), key=lambda each: -each[1])
        ]
        return f"Core ML plans {' and '.join(parts)}" if parts else "Core ML plans no operator"


@dataclass(frozen=True)
class Loaded:
    """How long a model took to load for the first time and again, and Core ML's plan for it."""

    first_ms: float
    again_ms: float
    plan: Plan | Refusal

    def sentence(self) -> str:
        told = self.plan.sentence() if isinstance(self.plan, Plan) else f"no plan: {self.plan.sentence}"
        return f"loaded in {self.first_ms:.0f} ms, again in {self.again_ms:.0f} ms; {told}"


def load(path: Path) -> tuple[Any, Loaded]:
    """The package at `path` as Core ML runs it on this Mac; the first load compiles it for the processors."""
    _, first = _timed(path)
    model, again = _timed(path)
    return model, Loaded(first, again, planned(model))


def _timed(path: Path) -> tuple[Any, float]:
    begin = time.perf_counter()
    model = package.loaded(path)
    return model, 1e3 * (time.perf_counter() - begin)


def planned(model: Any) -> Plan | Refusal:
    """Core ML's plan for a loaded model, or why this system has none (plans are told from macOS 14.4 on)."""
    from coremltools.models.compute_plan import MLComputePlan

    try:
        return read(MLComputePlan.load_from_path(model.get_compiled_model_path(), model.compute_unit))
    except Exception as error:  # coremltools raises what the system raises
        return Refusal("no-plan", first_line(error))


def read(plan: Any) -> Plan:
    """An MLComputePlan, summed up."""
    operators: Counter[str] = Counter()
    cost: dict[str, float] = {}
    for operation in _operations(plan.model_structure.program.functions["main"].block):
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is None:
            continue
        kind = type(usage.preferred_compute_device).__name__
        name = NAMES.get(kind, kind)
        operators[name] += 1
        expected = plan.get_estimated_cost_for_mlprogram_operation(operation)
        cost[name] = cost.get(name, 0.0) + (0.0 if expected is None else expected.weight)
    return Plan(operators, cost)


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)
