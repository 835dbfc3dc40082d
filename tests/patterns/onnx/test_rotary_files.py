"""Rotary attention as torch's older exporter writes it: tables expanded to a shape that is computed from the input."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.frontends.onnx.compared import difference
from attnrewrite.patterns.onnx.files import read_model

WIDTH, HEADS, TOKENS = 8, 2, 6


class Rotary(nn.Module):
    """One attention whose queries and keys are turned by angles that `repeat` doubles."""

    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.repeat, self.qkv, self.out = repeat, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        angles = self.repeat(torch.arange(tokens)[:, None] * self.frequencies)
        cos, sin = (table[None, None].expand(x.shape[0], HEADS, -1, -1) for table in (angles.cos(), angles.sin()))

        def turned(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat((-second, first), -1) * sin

        heads = (turned(q) @ turned(k).transpose(-2, -1) * 0.5).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).reshape(batch, tokens, WIDTH))


def exported(model: nn.Module, file: Path) -> Path:
    x = torch.randn(1, TOKENS, WIDTH)
    torch.onnx.export(
        model, (x,), file, dynamo=False, opset_version=17, dynamic_axes={"x": {0: "b"}}, input_names=["x"]
    )
    return file


def test_tables_expanded_to_a_computed_shape_are_followed(tmp_path: Path) -> None:
    model = Rotary(lambda angles: angles.repeat(1, 2)).eval()
    file = exported(model, tmp_path / "rotary.onnx")
    ops = [node.op_type for node in read_model(file).graph]
    assert "Expand" in ops
    (site,) = ar.explain(file).sites
    assert (site.rope, site.core_reason) == (True, None)
    done = ar.convert(file, variant="softmax")
    with torch.no_grad():
        assert difference(read_model(file), done.module, (torch.randn(3, TOKENS, WIDTH),)) < 1e-5


def test_a_file_that_the_exporter_spoiled_names_the_way_out(tmp_path: Path) -> None:
    """torch writes other axes and sizes than -1 after repeat_interleave; onnxruntime refuses the file as well."""
    file = exported(Rotary(lambda angles: angles.repeat_interleave(2, -1)).eval(), tmp_path / "spoiled.onnx")
    with pytest.raises(InputError, match=r"does not take its operands .* with dynamo=True"):
        ar.explain(file)
