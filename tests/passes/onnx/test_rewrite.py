"""The ONNX pass: only the sites' nodes change, the result is sound, and it computes what the torch module computes."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_runs import exported_vit, run
from onnx_spellings import NOT_ON_PROCESSORS, spelled
from tiny_vits import IMAGE, Vit
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.importer import import_graph
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.onnx.diff import difference
from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, variants

REWRITTEN = (  # each kind of node that is taken apart, and each way to spell an older opset
    "plain", "opset 11", "bias after the heads are split", "einsum, weights of three axes", "Attention on three axes",
    "MultiHeadAttention with its own bias", "MultiHeadAttention, packed", "a branch that is always taken",
)  # fmt: skip


def plan_for(found: Scan, variant: Variant) -> Plan:
    return Plan(found.model, tuple(Placement.at(site, variant) for site in found.sites if not variant.refuse(site)))


def tokens(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).normal(size=(batch, 10, 16)).astype(np.float32)


@pytest.mark.parametrize("name", REWRITTEN)
def test_softmax_written_again_computes_the_same_and_touches_nothing_else(name: str) -> None:
    model = spelled(name)
    before = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    extra = ir.node("Relu", [model.graph.inputs[0]], name="elsewhere")
    model.graph.append(extra)
    extra.outputs[0].name = "z"
    extra.outputs[0].shape, extra.outputs[0].dtype = ir.Shape(["B", 10, 16]), ir.DataType.FLOAT
    model.graph.outputs.append(extra.outputs[0])
    result, edits = OnnxRewrite(plan_for(scan_onnx(OnnxGraph(model), "model"), get_variant("softmax"))).apply(model)
    onnx.checker.check_model(ir.serde.serialize_model(result), full_check=True)
    assert [(edit.site, edit.replaced) for edit in edits] == [("site0", "y" if name[0] != "e" else edits[0].replaced)]
    found = difference(model, result)
    assert found.signature == ()
    assert found.initialisers_changed == ()
    assert "z" not in (*found.removed, *found.changed)
    assert all(name.startswith("attention_site0/") for name in (*found.added, *found.initialisers_added))
    assert found.changed in ((), ("y",))  # the value of the site keeps its name
    for batch in (1, 3):
        wanted = run(spelled("plain"), tokens(batch))[0] if name in NOT_ON_PROCESSORS else run(model, tokens(batch))[0]
        np.testing.assert_allclose(run(result, tokens(batch))[0], wanted, rtol=1e-4, atol=1e-5)
    model.graph.outputs.pop()
    model.graph.remove(extra)
    assert ir.serde.serialize_model(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("variant", [name for name in variants() if name != "softmax"])
def test_a_form_in_onnx_is_its_torch_module(variant: str) -> None:
    model = spelled("plain")
    plan = plan_for(scan_onnx(OnnxGraph(model), "model"), get_variant(variant))
    if not plan.placements:
        pytest.skip(f"{variant} cannot stand at this site")
    module, inputs = import_graph(OnnxGraph(model))
    original = capture("model", module, inputs).module
    rewritten = FxRewrite(plan_for(scan(FxGraph(original), "model"), get_variant(variant)))(original)
    with torch.no_grad():
        wanted = rewritten(torch.from_numpy(tokens(3)))
    result, _ = OnnxRewrite(plan).apply(model)
    onnx.checker.check_model(ir.serde.serialize_model(result), full_check=True)
    np.testing.assert_allclose(run(result, tokens(3))[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def exported() -> tuple[Vit, ir.Model]:
    torch.manual_seed(0)
    model = Vit().eval()
    return model, exported_vit(model)


@pytest.fixture(scope="module")
def deep() -> tuple[GraphModule, ir.Model]:
    torch.manual_seed(0)
    model = Vit(depth=4).eval()
    return capture("vit", model, (torch.randn(IMAGE),)).module, exported_vit(model)


@pytest.fixture(scope="module")
def half() -> tuple[GraphModule, ir.Model]:
    """A model in float64, and its file in float16."""
    torch.manual_seed(0)
    model = Vit().eval().half()
    file = exported_vit(model)
    return capture("vit", model.double(), (torch.randn(IMAGE, dtype=torch.float64),)).module, file


def test_a_plan_made_from_torch_applies_to_the_export_and_back(exported: tuple[Vit, ir.Model]) -> None:
    model, file = exported
    original = capture("vit", model, (torch.randn(IMAGE),)).module
    in_torch, in_onnx = scan(FxGraph(original), "vit"), scan_onnx(OnnxGraph(file), "vit")
    assert [site.name for site in in_onnx.sites] == [site.name for site in in_torch.sites]
    images = torch.randn(3, *IMAGE[1:])
    for found in (in_torch, in_onnx):
        plan = plan_for(found, get_variant("l1"))
        rewritten = FxRewrite(plan)(original)
        with torch.no_grad():
            wanted, before = rewritten(images), model(images)
        passed = ir.passes.PassManager([OnnxRewrite(plan)])(file)
        assert passed.modified
        result = run(passed.model, images.numpy())[0]
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
        assert float((before - wanted).abs().max()) > 1e-3  # the form is another, and it shows


def test_weights_of_the_plan_stand_in_the_file(exported: tuple[Vit, ir.Model]) -> None:
    model, file = exported
    original = capture("vit", model, (torch.randn(IMAGE),)).module
    plan = plan_for(scan(FxGraph(original), "vit"), get_variant("l1"))
    student = FxRewrite(plan)(original)
    sites = {m.site_id: m for m in student.modules() if hasattr(m, "site_id")}
    with torch.no_grad():
        sites["site1"].value.weight.mul_(0.5)
        weights = {name: dict(module.state_dict()) for name, module in sites.items()}
        head = {"head.bias": torch.full_like(dict(model.named_parameters())["head.bias"], 3.0)}
    placements = tuple(Placement(**{**vars(p), "weights": weights[p.site]}) for p in plan.placements)
    plan = Plan("vit", placements, head)
    images = torch.randn(3, *IMAGE[1:])
    with torch.no_grad():
        wanted = FxRewrite(plan)(original)(images)
    np.testing.assert_allclose(run(OnnxRewrite(plan).apply(file)[0], images.numpy())[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_plan_of_other_weights_is_refused(exported: tuple[Vit, ir.Model]) -> None:
    _, file = exported
    torch.manual_seed(1)
    other = capture("vit", Vit().eval(), (torch.randn(IMAGE),)).module
    with pytest.raises(InputError, match=r"plan does not fit vit: site0 .* has fingerprint"):
        OnnxRewrite(plan_for(scan(FxGraph(other), "vit"), get_variant("l1"))).apply(file)
    plan = Plan("vit", (), {"nowhere.weight": torch.zeros(3)})
    with pytest.raises(InputError, match=r"the plan refits nowhere.weight, which the model does not store"):
        OnnxRewrite(plan).apply(file)


def in_turn(model: ir.Model, monkeypatch: pytest.MonkeyPatch, *variants: Variant) -> tuple[ir.Model, int]:
    """The model with the variants at its sites in turn, and how often torch's exporter ran for it."""
    found = scan_onnx(OnnxGraph(model), "vit")
    placed = [Placement.at(site, variants[n % len(variants)]) for n, site in enumerate(found.sites)]
    exports: list[object] = []
    plain = torch.onnx.export

    def counted(program: torch.export.ExportedProgram, **options: Any) -> Any:
        exports.append(program)
        return plain(program, **options)

    monkeypatch.setattr(torch.onnx, "export", counted)
    return OnnxRewrite(Plan("vit", tuple(placed))).apply(model)[0], len(exports)


@pytest.mark.parametrize(
    ("forms", "expected"),
    [(("polynomial",), 1), (("l1", "masked"), 2), (("softmax", "l1", "l1"), 2)],
    ids=str,
)
def test_alike_sites_are_exported_once(
    forms: tuple[str, ...], expected: int, deep: tuple[GraphModule, ir.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sites of one size: what torch exports is each form once, and every site computes with its own weights."""
    original, file = deep
    chosen = [get_variant(form) for form in forms]
    result, exports = in_turn(file, monkeypatch, *chosen)
    assert exports == expected
    found = scan(FxGraph(original), "vit")
    plan = Plan("vit", tuple(Placement.at(site, chosen[n % len(chosen)]) for n, site in enumerate(found.sites)))
    images = torch.randn(3, *IMAGE[1:])
    with torch.no_grad():
        wanted = FxRewrite(plan)(original)(images)
    onnx.checker.check_model(ir.serde.serialize_model(result), full_check=True)
    np.testing.assert_allclose(run(result, images.numpy())[0], wanted, rtol=1e-4, atol=1e-5)


def test_sites_of_other_sizes_or_options_are_exported_themselves(
    deep: tuple[GraphModule, ir.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [get_variant("l1"), get_variant("l1", {"centred": False}), get_variant("l1", {"order": "qk"})]
    assert in_turn(deep[1], monkeypatch, *forms)[1] == 3


@pytest.mark.parametrize("form", ["softmax", "l1", "masked", "polynomial"])
def test_a_site_is_written_in_the_precision_of_its_model(form: str, half: tuple[GraphModule, ir.Model]) -> None:
    """A file in float16, against the torch module in float64."""
    original, file = half
    images = torch.randn(3, *IMAGE[1:]).half()
    result, _ = OnnxRewrite(plan_for(scan_onnx(OnnxGraph(file), "vit"), get_variant(form))).apply(file)
    onnx.checker.check_model(ir.serde.serialize_model(result), full_check=True)
    exact = FxRewrite(plan_for(scan(FxGraph(original), "vit"), get_variant(form)))(original).double()
    found = run(result, images.numpy())[0]
    assert found.dtype == np.float16
    with torch.no_grad():
        np.testing.assert_allclose(found, exact(images.double()), rtol=0, atol=2e-3)
