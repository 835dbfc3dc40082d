"""An ONNX file from explain to convert: what is saved computes what the torch module computes."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.passes.onnx_diff import difference
from tests.test_onnx_rewrite import IMAGE, Vit, exported_vit, run

_ATTENDS = {
    "MatMul",
    "Gemm",
    "Add",
    "Mul",
    "Reshape",
    "Transpose",
    "Softmax",
    "Slice",
    "Split",
    "Squeeze",
    "Gather",
    "Concat",
    "Shape",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer as torch's exporter writes it, [B, 3, 16, 16] -> [B, 5], with two attentions."""
    path = tmp_path_factory.mktemp("files") / "vit.onnx"
    torch.manual_seed(0)
    ir.save(exported_vit(Vit().eval()), path)
    return path


def test_a_file_is_explained_without_torch(file: Path) -> None:
    found = ar.explain(file)
    assert (found.frontend, found.model, [site.id for site in found.sites]) == ("onnx", "vit", ["site0", "site1"])


def test_a_file_is_converted_and_calibrated(file: Path, tmp_path: Path) -> None:
    images = [torch.rand(4, *IMAGE[1:]) for _ in range(3)]
    done = ar.convert(file, variant="l1", calibration=images, keep=["site1"])
    folder = done.save(tmp_path / "out")
    report = json.loads((folder / "report.json").read_text())
    assert [site["variant"] for site in report["sites"]] == ["l1", "softmax"]
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    before, after = ir.load(file), ir.load(folder / "model.onnx")
    with torch.no_grad():
        wanted = done.module(images[0])
    np.testing.assert_allclose(run(after, images[0].numpy())[0], wanted, rtol=1e-4, atol=1e-5)
    found = difference(before, after)
    assert found.signature == ()
    assert {name.split("/")[0] for name in found.added} == {"attention_site0"}
    kept = {node.name for node in after.graph} & {node.name for node in before.graph}
    assert {node.op_type for node in before.graph if node.name not in kept} <= _ATTENDS
    assert sum(node.op_type == "Softmax" for node in after.graph) == 1
    again = ar.explain(folder / "model.onnx")
    assert [site.n_queries for site in again.sites] == [16]


def test_a_checkpoint_is_no_use_to_a_file(file: Path) -> None:
    with pytest.raises(InputError, match=r"weights are inside: it takes no --checkpoint"):
        ar.explain(file, checkpoint="weights.pth")
