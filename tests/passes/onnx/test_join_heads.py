"""Heads of a loop in an ONNX file: joined where the plan says so, one softmax for all, the same numbers."""

from pathlib import Path

import onnx
import pytest
import torch
from head_loops import HEADS, JOINED, TOKENS, WIDTH, Loop

import attnrewrite as ar
from attnrewrite.frontends.onnx.compared import difference
from attnrewrite.patterns.onnx.files import read_model

TOLERANCE = 1e-6


@pytest.mark.parametrize("name", ["slices, concatenated", "a packed projection for each"])
def test_a_converted_file_has_one_softmax_for_all_heads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = Loop(*JOINED[name]).eval(), tmp_path / "loop.onnx"
    torch.onnx.export(model, (torch.randn(2, TOKENS, WIDTH),), file, dynamic_shapes=({0: torch.export.Dim("b")},))
    found = ar.explain(file)
    assert [group.members for group in found.groups] == [tuple(site.id for site in found)]
    done = ar.convert(file, variant="softmax")
    done.save(tmp_path / "out")
    written = onnx.load(tmp_path / "out" / "model.onnx")
    assert [node.op_type for node in written.graph.node].count("Softmax") == 1
    assert [(placed.members, placed.heads) for placed in done.plan.placements] == [(found.groups[0].members, HEADS)]
    x = torch.randn(3, TOKENS, WIDTH)
    with torch.no_grad():
        assert difference(read_model(tmp_path / "out" / "model.onnx"), model, (x,)) < TOLERANCE
