"""Each pass over ONNX models alone: how much it edits, that the result computes the same, and what it refuses."""

import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_runs import exported_vit, run
from tiny_vits import IMAGE, Vit
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.passes.base import Edit, PassResult, Pipeline
from attnrewrite.passes.onnx.downgrade import Downgrade
from attnrewrite.passes.onnx.fold_constants import FoldConstants
from attnrewrite.passes.onnx.ir_pass import IrPass
from attnrewrite.passes.onnx.relu_for_gelu import ReluForGelu
from attnrewrite.passes.onnx.rewrite import ModelRewrite, OnnxRewrite
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant

X = torch.randn(2, 3, 4)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight)


def exported(function: Callable[[Tensor], Tensor]) -> ir.Model:
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(Apply(function).eval(), (X,), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    return ir.serde.deserialize_model(program.model_proto)


SPELLINGS: dict[str, tuple[Callable[[Tensor], Tensor], int, tuple[str, ...]]] = {
    "a mean": (lambda x: x.mean(1), 11, ("ReduceMean",)),
    "a mean, as it is from 18 on": (lambda x: x.mean(1), 18, ()),
    "a sum": (lambda x: x.sum(2), 12, ("ReduceSum",)),
    "a sum, as it is from 13 on": (lambda x: x.sum(2), 13, ()),
    "another axis": (lambda x: x.unsqueeze(1), 12, ("Unsqueeze",)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_downgrade_respells_what_the_version_lacks(spelling: str) -> None:
    function, version, respelled = SPELLINGS[spelling]
    model = exported(function)
    wanted = run(model, X.numpy())[0]
    result = Downgrade(version).apply(model)
    operators = tuple(f"{name} of opset {version}" for name in respelled)
    stood = () if version == 18 else (f"opset {version}",)
    assert tuple(edit.by for edit in result.edits) == (*operators, *stood)
    assert result.graph.opset_imports[""] == version
    result.graph.ir_version = 8
    onnx.checker.check_model(ir.serde.serialize_model(result.graph), full_check=True)
    np.testing.assert_allclose(run(result.graph, X.numpy())[0], wanted, rtol=1e-6, atol=1e-6)
    assert not Downgrade(version).apply(result.graph).modified


def test_downgrade_refuses_what_it_does_not_know() -> None:
    model = exported(lambda x: x.mean(1))
    with pytest.raises(
        InputError, match=r"downgrade cannot be applied: the graph has opset 10, and rewriting needs 11"
    ):
        Downgrade(10)(model)
    model.opset_imports[""] = 21
    with pytest.raises(InputError, match=r"the graph has opset 21, and is respelled from 18: export it with that"):
        Downgrade(13)(model)


def test_what_an_earlier_version_lacks_is_named() -> None:
    model = exported(lambda x: nn.functional.layer_norm(x, (4,)))
    with pytest.raises(InputError, match=r"needs LayerNormalization of opset 18, the model uses 16: convert it with"):
        Downgrade(16)(model)


def test_fold_constants_stores_what_follows_from_weights() -> None:
    model = exported(lambda x: x)
    (product,) = model.graph
    (weight,) = (value for value in product.inputs if value is not None and value.is_initializer())
    turned = ir.node("Transpose", [weight], {"perm": [1, 0]}, name="turned")
    negative = ir.node("Neg", [turned.outputs[0]], name="negative")
    turned.outputs[0].name, negative.outputs[0].name = "t", "n"
    model.graph.insert_before(product, [turned, negative])
    product.replace_input_with(1, negative.outputs[0])
    wanted, name = run(model, X.numpy())[0], weight.name
    result = FoldConstants().apply(model)
    assert result.edits == (Edit("t", "t_folded"), Edit("n", "n_folded"), Edit(str(name)), Edit("t_folded"))
    assert [node.op_type for node in result.graph.graph] == ["MatMul"]
    np.testing.assert_array_equal(run(result.graph, X.numpy())[0], wanted)
    assert FoldConstants().apply(result.graph) == PassResult(result.graph)


def test_relu_for_gelu_behind_a_value() -> None:
    model = exported(nn.functional.gelu)
    start = str(next(node for node in model.graph if node.op_type == "MatMul").outputs[0].name)
    result = ReluForGelu(start).apply(model)
    assert len(result.edits) == 1
    assert [node.op_type for node in model.graph] == ["MatMul", "Relu"]
    assert (run(model, X.numpy())[0] >= 0).all()
    assert not ReluForGelu(start).apply(model).modified
    with pytest.raises(InputError, match="relu-for-gelu cannot be applied: the graph has no value 'nowhere'"):
        ReluForGelu("nowhere")(model)


@pytest.fixture(scope="module")
def file() -> ir.Model:
    torch.manual_seed(0)
    return exported_vit(Vit().eval())


@pytest.fixture(scope="module")
def plan(file: ir.Model) -> Plan:
    found = scan_onnx(OnnxGraph(file), "vit")
    return Plan("vit", tuple(Placement.at(site, get_variant("l1")) for site in found.sites))


def test_the_rewrite_is_a_pass_of_ours_and_of_onnx_ir(file: ir.Model, plan: Plan) -> None:
    ours = Pipeline((ModelRewrite(plan), FoldConstants())).apply(file)
    theirs = ir.passes.PassManager([OnnxRewrite(plan), IrPass(FoldConstants())])(file)
    assert theirs.modified
    image = torch.randn(3, *IMAGE[1:]).numpy()
    np.testing.assert_array_equal(run(ours.graph, image)[0], run(theirs.model, image)[0])


def test_the_rewrite_takes_the_scan_that_was_made(file: ir.Model, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = ModelRewrite(plan).scan(file)
    scans: list[str] = []
    monkeypatch.setattr(ModelRewrite, "scan", lambda *_: scans.append("scan") or scanned)
    with_it = ModelRewrite(plan, scanned).apply(file)
    assert scans == []
    assert ModelRewrite(plan).apply(file).edits == with_it.edits
    assert scans == ["scan"]
    assert [edit.by for edit in with_it.edits] == ["attention_site0", "attention_site1"]


def test_nothing_changed_is_told_to_onnx_ir(file: ir.Model) -> None:
    passed = ir.passes.PassManager([OnnxRewrite(Plan("vit", ()))])(file)
    assert not passed.modified
    assert passed.model is not file


def test_refitted_weights_alone_are_a_change(file: ir.Model) -> None:
    passed = OnnxRewrite(Plan("vit", (), {"head.bias": torch.ones(5)}))(file)
    assert passed.modified
    np.testing.assert_array_equal(passed.model.graph.initializers["head.bias"].const_value.numpy(), np.ones(5))


def test_an_opset_too_old_is_refused(file: ir.Model, plan: Plan) -> None:
    old = file.clone()
    old.opset_imports[""] = 9
    refusal = ModelRewrite(plan).requires(old)
    assert refusal is not None
    assert refusal.code == "opset"
    assert refusal.sentence.startswith("has opset 9, and rewriting needs 11 or later: convert it with onnx.version")


def test_results_without_what_is_ensured_are_told(file: ir.Model, plan: Plan) -> None:
    rewriting = ModelRewrite(plan)
    result = rewriting.apply(file)
    graph, edits = result.graph.clone(), result.edits
    graph.graph.inputs[0].name = "other"
    cases = {"other-inputs": PassResult(graph, edits), "site-not-made": PassResult(file, edits)}
    made = next(node for node in file.graph if node.outputs[0].name == edits[0].replaced).outputs[0]
    name, made.name = made.name, "renamed"
    told = {code: rewriting.ensures(file, case) for code, case in cases.items()}
    made.name = name
    assert {code: refusal and refusal.code for code, refusal in told.items()} == {code: code for code in cases}
