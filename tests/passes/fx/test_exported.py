"""An exported program goes in and one comes out: the same signature, and what the rewritten graph computes."""

import io

import pytest
import torch
from tiny_vits import IMAGE, Vit
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes import ExportedRewrite, FxRewrite, PassResult, Pipeline, rewrite
from attnrewrite.passes.fx.rewrite import scan_graph
from attnrewrite.passes.verify import relative_error
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant, variants

TOLERANCE = 1e-6
SHAPES = {
    "any batch": {0: Dim("batch")},
    "up to eight": {0: Dim("batch", min=1, max=8)},
    "from three": {0: Dim("batch", min=3)},
    "fixed": None,
}


class Named(nn.Module):
    """Inputs in a dictionary and by keyword, outputs in a dictionary, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = Vit()
        self.register_buffer("offset", torch.arange(5.0), persistent=False)

    def forward(self, batch: dict[str, Tensor], *, gain: Tensor) -> dict[str, object]:
        logits = self.vit(batch["image"]) * gain + self.offset
        return {"logits": logits, "also": [logits.argmax(-1), batch["image"].mean()]}


def program_of(shapes: dict[int, object] | None) -> ExportedProgram:
    torch.manual_seed(0)
    given = ({"image": torch.randn(4, *IMAGE[1:])},), {"gain": torch.tensor(2.0)}
    return torch.export.export(Named().eval(), *given, dynamic_shapes={"batch": {"image": shapes}, "gain": None})


def plan_for(graph: GraphModule, variant: str = "l1") -> Plan:
    chosen = get_variant(variant)
    found = scan_graph(graph, "named").scan
    return Plan("named", tuple(Placement.at(s, chosen) for s in found.sites if chosen.refuse(s) is None))


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return program_of(SHAPES["any batch"])


@pytest.fixture(scope="module")
def graph(program: ExportedProgram) -> GraphModule:
    return capture("named", program, ()).module


@pytest.fixture(scope="module")
def plan(graph: GraphModule) -> Plan:
    return plan_for(graph)


@pytest.fixture(scope="module")
def rewritten(program: ExportedProgram, plan: Plan) -> ExportedProgram:
    return rewrite(program, plan)


def inputs(batch: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"image": torch.randn(batch, *IMAGE[1:])}, torch.tensor(0.5)


@pytest.mark.parametrize("variant", variants())
def test_the_program_computes_what_the_rewritten_graph_computes(
    program: ExportedProgram, graph: GraphModule, variant: str
) -> None:
    plan = plan_for(graph, variant)
    assert len(plan.placements) == 2
    batch, gain = inputs(3)
    with torch.no_grad():
        wanted, found = FxRewrite(plan)(graph)(batch, gain=gain), rewrite(program, plan).module()(batch, gain=gain)
    assert relative_error(found["logits"], wanted["logits"]) < TOLERANCE
    assert torch.equal(found["also"][0], wanted["also"][0])


@pytest.mark.parametrize("shapes", SHAPES)
def test_names_structure_and_open_shapes_are_kept(shapes: str, plan: Plan) -> None:
    program = program_of(SHAPES[shapes])
    before = str(program)
    result = rewrite(program, plan)
    assert result.graph_signature.user_inputs == program.graph_signature.user_inputs == ("batch_image", "gain")
    assert result.call_spec == program.call_spec
    taken = {batch: _takes(result, batch) for batch in (1, 2, 3, 4, 8, 9)}
    assert taken == {batch: _takes(program, batch) for batch in taken}
    assert str(program) == before


def _takes(program: ExportedProgram, batch: int) -> bool:
    given, gain = inputs(batch)
    try:
        return program.module()(given, gain=gain)["logits"].shape == (batch, 5)
    except (AssertionError, RuntimeError):  # torch's way to refuse a shape
        return False


def test_parameters_are_in_the_state_dict(program: ExportedProgram, rewritten: ExportedProgram) -> None:
    outside = {name: tensor for name, tensor in program.state_dict.items() if "blocks" not in name}
    kept = {name: tensor for name, tensor in rewritten.state_dict.items() if not name.startswith("attention_site")}
    assert {name for name in kept if name.startswith("vit.")} == set(outside)
    assert all(torch.equal(kept[name], tensor) for name, tensor in outside.items())
    weights = {name: tensor for name, tensor in rewritten.state_dict.items() if isinstance(tensor, nn.Parameter)}
    inside = sum(tensor.numel() for name, tensor in weights.items() if ".form." not in name)  # which has its own
    assert inside == sum(tensor.numel() for tensor in program.state_dict.values())


def test_a_program_saved_and_loaded_is_rewritten_and_saved(
    program: ExportedProgram, plan: Plan, rewritten: ExportedProgram
) -> None:
    def reloaded(given: ExportedProgram) -> ExportedProgram:
        held = io.BytesIO()
        torch.export.save(given, held)
        held.seek(0)
        return torch.export.load(held)

    result = rewrite(reloaded(program), plan)
    again, (batch, gain) = reloaded(result), inputs(5)
    with torch.no_grad():
        wanted = rewritten.module()(batch, gain=gain)["logits"]
        for each in (result, again):
            assert relative_error(each.module()(batch, gain=gain)["logits"], wanted) < TOLERANCE


def test_what_was_fitted_comes_along(program: ExportedProgram, plan: Plan) -> None:
    bias = torch.full_like(program.state_dict["vit.head.bias"], 3.0)
    result, edits = ExportedRewrite(Plan("named", plan.placements, {"vit.head.bias": bias})).apply(program)
    assert torch.equal(result.state_dict["vit.head.bias"], bias)
    assert {"vit.head.bias", "site0", "site1"} <= {edit.replaced for edit in edits}


def test_a_plan_of_nothing_gives_the_program_back(program: ExportedProgram) -> None:
    result = ExportedRewrite(Plan("named", ())).apply(program)
    assert result.graph is program
    assert not result.modified


def test_the_pass_stands_in_a_pipeline_of_programs(program: ExportedProgram, plan: Plan) -> None:
    stages: list[str] = []
    pipeline = Pipeline((ExportedRewrite(plan),), lambda stage: stages.append(stage.ran.name))
    assert pipeline.apply(program).modified
    assert stages == ["exported-rewrite"]


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    torch.manual_seed(1)
    given = ({"image": torch.randn(4, *IMAGE[1:])},), {"gain": torch.tensor(2.0)}
    other = torch.export.export(Named().eval(), *given)
    with pytest.raises(InputError, match=r"the plan does not fit named: site0 \(vit.blocks.0\) has fingerprint"):
        rewrite(other, plan)


def test_a_program_without_an_example_is_refused(plan: Plan) -> None:
    bare = program_of(None)
    bare._example_inputs = None
    with pytest.raises(InputError, match=r"the graph has no example inputs: export it again with torch.export.export"):
        rewrite(bare, plan)


def test_a_result_of_other_shapes_is_refused(program: ExportedProgram, plan: Plan) -> None:
    fixed = rewrite(program_of(None), plan)
    refusal = ExportedRewrite(plan).ensures(program, PassResult(fixed))
    assert refusal is not None
    assert refusal.code == "other-shapes"
    assert "takes batch_image as [4, 3, 16, 16], not [2 to any, 3, 16, 16]" in refusal.sentence
