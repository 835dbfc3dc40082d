"""Weights of few bits are read as the numbers that onnxruntime multiplies with, and sites are found as without."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_runs import exported_vit
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from tiny_vits import IMAGE, Vit

import attnrewrite as ar
from attnrewrite.frontends.onnx.compared import difference
from attnrewrite.frontends.onnx.importer import import_graph
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.weights import projection_weights
from attnrewrite.site import Projection

IMAGES = torch.randn(64, *IMAGE[1:], generator=torch.Generator().manual_seed(0))


def _integers(**how: object) -> Callable[[onnx.ModelProto], object]:
    return lambda model: MatMulNBitsQuantizer(model, **how)


def _levels(kind: int) -> Callable[[onnx.ModelProto], object]:
    return lambda model: MatMulBnb4Quantizer(model, kind, 16)


# name: (onnxruntime's quantiser, the largest error of a weight over the largest of all)
PACKED = {
    "four bits": (_integers(block_size=16, is_symmetric=True), 1 / 8),
    "four bits with zero points": (_integers(block_size=16, is_symmetric=False), 1 / 8),
    "four bits in blocks longer than the row": (_integers(block_size=64, is_symmetric=False), 1 / 8),
    "two bits": (_integers(block_size=16, is_symmetric=False, bits=2), 1 / 2),
    "eight bits": (_integers(block_size=16, is_symmetric=False, bits=8), 1 / 200),
    "four bits that are multiplied with bytes": (_integers(block_size=16, is_symmetric=True, accuracy_level=4), 1 / 8),
    "levels of a float": (_levels(0), 1 / 5),
    "levels of a normal distribution": (_levels(1), 1 / 5),
}


@pytest.fixture(scope="module")
def plain() -> onnx.ModelProto:
    torch.manual_seed(0)
    return ir.serde.serialize_model(exported_vit(Vit().eval()))


def packed(plain: onnx.ModelProto, name: str) -> ir.Model:
    quantiser = PACKED[name][0](onnx.ModelProto.FromString(plain.SerializeToString()))
    quantiser.process()  # type: ignore[attr-defined]
    return ir.serde.deserialize_model(quantiser.model.model)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_are_read_as_what_they_stand_for(plain: onnx.ModelProto, name: str) -> None:
    graph, model = OnnxGraph(ir.serde.deserialize_model(plain)), packed(plain, name)
    assert sum(node.domain == "com.microsoft" for node in model.graph) >= 4
    view = OnnxGraph(model)
    found, wanted = scan_onnx(view, "packed"), scan_onnx(graph, "plain")
    assert not found.near_misses
    assert len(found.sites) == len(wanted.sites) == 2
    for mine, known in zip(found.sites, wanted.sites, strict=True):
        assert (mine.heads, mine.core_reason, mine.output) == (known.heads, None, mine.output)
        for part, plainly in zip(mine.projections, known.projections, strict=True):
            assert isinstance(part, Projection)
            assert isinstance(plainly, Projection)
            assert (part.direct, part.rows) == (plainly.direct, plainly.rows)
            weight = projection_weights(graph, plainly)[0]
            off = np.abs(projection_weights(view, part)[0] - weight).max() / np.abs(weight).max()
            assert 0 < off < PACKED[name][1]
    module, _ = import_graph(view)  # which has compared it with onnxruntime
    assert difference(model, module, (IMAGES,)) < 1e-5


@pytest.mark.parametrize("name", ["four bits", "levels of a normal distribution"])
def test_what_stands_outside_the_sites_keeps_its_packed_weights(
    plain: onnx.ModelProto, name: str, tmp_path: Path
) -> None:
    ir.save(packed(plain, name), tmp_path / "file.onnx")
    before = {node.name for node in ir.load(tmp_path / "file.onnx").graph if node.domain == "com.microsoft"}
    done = ar.convert(tmp_path / "file.onnx", variant="l1", keep=["site1"], calibration=[IMAGES])
    after = ir.load(done.save(tmp_path / "out") / "model.onnx")
    left = {node.name for node in after.graph if node.domain == "com.microsoft"}
    assert left < before
    assert len(before) - len(left) == 2  # the packed projection, and the output's
    copied, fitted = done.report["calibration"]["stages"]
    assert fitted["error_after"] < copied["error_after"]


def test_a_packing_that_is_not_known_names_the_way_out(plain: onnx.ModelProto) -> None:
    model = packed(plain, "four bits")
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["bits"] = ir.AttrInt64("bits", 3)
    found = scan_onnx(OnnxGraph(model), "model")
    assert not found.sites
    assert {miss.code for miss in found.near_misses} == {"quantized"}
    assert "MatMulNBits" in found.near_misses[0].sentence
    assert "give the model before quantization" in found.near_misses[0].sentence
