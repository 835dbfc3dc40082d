"""Files as onnxruntime quantises them: their attention is converted in float, and all else stays as it is quantised."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_quantised import DYNAMIC, STATIC, quantised_file
from onnx_runs import exported_vit
from tiny_vits import IMAGE, Vit

import attnrewrite as ar
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.compared import TOLERANCE, difference
from attnrewrite.frontends.onnx.importer import import_graph
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.passes.onnx.diff import difference as model_difference
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.site import AttentionSite, Untraced

IMAGES = np.random.default_rng(0).normal(size=(16, *IMAGE[1:])).astype(np.float32)
INTEGERS = ("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small transformer with two attentions, quantised in every way."""
    folder = tmp_path_factory.mktemp("quantised")
    torch.manual_seed(0)
    ir.save(exported_vit(Vit().eval()), folder / "float.onnx")
    kinds = {f"{place}": kind for place, kind in enumerate((*STATIC, *DYNAMIC))}
    return {
        kind: quantised_file(folder / "float.onnx", folder / f"file{place}.onnx", IMAGES, kind)
        for place, kind in kinds.items()
    }


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
def test_only_the_sites_of_a_quantised_file_become_float(files: dict[str, Path], kind: str, tmp_path: Path) -> None:
    done = ar.convert(files[kind], variant="l1", keep=["site1"])
    folder = done.save(tmp_path / "out")
    report = json.loads((folder / "report.json").read_text())
    assert [site["variant"] for site in report["sites"]] == ["l1", "softmax"]
    assert report["sites"][0]["identity_error"] < 1e-5
    before, after = ir.load(files[kind]), ir.load(folder / "model.onnx")
    changed = model_difference(before, after)
    assert changed.signature == ()
    assert {name.split("/")[0] for name in changed.added} == {"attention_site0"}
    graph, left = OnnxGraph(before), OnnxGraph(after)
    first = len(graph.roundings) - len(left.roundings)
    assert 0 < first < len(graph.roundings)  # those of the kept site stand in the file still
    assert report["left_out"]["roundings"] == len(graph.roundings)
    assert report["left_out"]["difference"] < 4 * report["left_out"]["drawn"]
    counts = [Counter(node.op_type for node in model.graph) for model in (before, after)]
    assert all(counts[1][operator] <= counts[0][operator] for operator in INTEGERS)
    assert sum(counts[1][operator] for operator in INTEGERS) > 0
    assert difference(left.source, done.module, (torch.from_numpy(IMAGES),)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["every operator", "every product"])
def test_calibration_leaves_the_integers_of_a_file(files: dict[str, Path], kind: str, tmp_path: Path) -> None:
    done = ar.convert(files[kind], variant="l1", calibration=[torch.from_numpy(IMAGES)], steps=2)
    copied, *fitted = done.report["calibration"]["stages"]
    assert fitted[-1]["error_after"] < copied["error_after"]
    after = ir.load(done.save(tmp_path / "out") / "model.onnx")
    stored = {name: value.const_value for name, value in ir.load(files[kind]).graph.initializers.items()}
    for name, value in after.graph.initializers.items():
        if name in stored and value.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
            np.testing.assert_array_equal(value.const_value.numpy(), stored[name].numpy())


MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)},
}


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_file_has_the_sites_of_the_float_one(name: str, tmp_path: Path) -> None:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MODELS[name]).eval()
    image = torch.randn(2, 3, MODELS[name]["img_size"], MODELS[name]["img_size"])
    torch.onnx.export(model, (image,), tmp_path / "float.onnx", dynamo=True, verbose=False)
    wanted = [told(site) for site in ar.explain(tmp_path / "float.onnx")]
    assert len(wanted) == (1 if name.startswith("vit") else 2)
    for place, kind in enumerate(("every operator", "products alone", "every product")):
        file = quantised_file(tmp_path / "float.onnx", tmp_path / f"file{place}.onnx", image.numpy(), kind)
        graph = OnnxGraph(ir.load(file))
        assert [told(site) for site in scan_onnx(graph, kind)] == wanted
        module, inputs = import_graph(graph)
        assert [told(site) for site in scan(FxGraph(capture(kind, module, inputs).module), kind)] == wanted


def told(site: AttentionSite) -> tuple[object, ...]:
    """What a variant asks of a site."""
    parts = (*site.projections, site.output)
    direct = [not isinstance(part, Untraced) and part.direct for part in parts]
    return site.heads, site.n_queries, site.windows, site.grid, round(site.scale or 0, 6), site.bias, direct
