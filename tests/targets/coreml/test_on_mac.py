"""What a Mac says of a package, by the types in which coremltools says it; no Mac was at hand."""

from collections.abc import Sequence

import pytest

from attnrewrite.targets.coreml import on_mac

pytest.importorskip("coremltools", reason="coremltools is not installed")

from coremltools.models import compute_device as device
from coremltools.models import compute_plan as api

ENGINE, CPU = device.MLNeuralEngineComputeDevice, device.MLCPUComputeDevice


class Recorded(api.MLComputePlan):
    """A plan as the system tells it: each operator's processor and share of the cost, None for constants."""

    def __init__(self, block: api.MLModelStructureProgramBlock, told: dict[str, tuple[type, float | None]]) -> None:
        self.block, self.told = block, told

    @property
    def model_structure(self) -> api.MLModelStructure:
        function = api.MLModelStructureProgramFunction([], self.block)
        program = api.MLModelStructureProgram({"main": function})
        return api.MLModelStructure(neuralnetwork=None, program=program, pipeline=None)

    def get_compute_device_usage_for_mlprogram_operation(self, operation: api.MLModelStructureProgramOperation):
        if operation.operator_name not in self.told:
            return None
        kind, _ = self.told[operation.operator_name]
        preferred = kind.__new__(kind)  # only a Mac makes one
        return api.MLComputePlanDeviceUsage(preferred, [preferred])

    def get_estimated_cost_for_mlprogram_operation(self, operation: api.MLModelStructureProgramOperation):
        weight = self.told[operation.operator_name][1]
        return None if weight is None else api.MLComputePlanCost(weight)


def block(names: Sequence[str], inner: Sequence[api.MLModelStructureProgramBlock] = ()):
    operations = [api.MLModelStructureProgramOperation({}, name, [], list(inner), None) for name in names]
    return api.MLModelStructureProgramBlock([], operations, [])


def test_operators_are_counted_by_the_processor_that_is_planned_for_them() -> None:
    told = {"conv": (ENGINE, 0.75), "softmax": (ENGINE, 0.125), "gather": (CPU, 0.125), "reshape": (ENGINE, None)}
    plan = on_mac.read(Recorded(block(["const", "conv", "softmax", "reshape", "gather", "const"]), told))
    assert plan == on_mac.Plan({"the Neural Engine": 3, "the CPU": 1}, {"the Neural Engine": 0.875, "the CPU": 0.125})
    assert plan.sentence() == (
        "Core ML plans 3 operators on the Neural Engine (88% of the expected cost) and 1 operator on the CPU (12% of "
        "the expected cost)"
    )


def test_operators_of_branches_are_counted_too() -> None:
    told = {"cond": (CPU, 0.5), "conv": (ENGINE, 0.5)}
    plan = on_mac.read(Recorded(block(["cond"], [block(["conv"]), block(["conv"])]), told))
    assert plan.operators == {"the CPU": 1, "the Neural Engine": 2}


def test_a_system_without_plans_says_why() -> None:
    class Model:
        compute_unit = None

        def get_compiled_model_path(self) -> str:
            raise ValueError("MLComputePlan is not supported.\nmore")

    found = on_mac.planned(Model())
    assert str(found) == "MLComputePlan is not supported."
