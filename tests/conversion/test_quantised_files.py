"""Files as onnxruntime quantises them: their attention is converted in float, and all else stays as it is quantised."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_quantised import DYNAMIC, STATIC, quantised_file
from onnx_runs import exported_vit
from tiny_vits import IMAGE, Vit

import attnrewrite as ar
from attnrewrite.frontends.onnx_import.compared import TOLERANCE, difference
from attnrewrite.passes.onnx.diff import difference as model_difference
from attnrewrite.patterns.onnx.graph import OnnxGraph

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
