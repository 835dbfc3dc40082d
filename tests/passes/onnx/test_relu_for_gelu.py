"""GELU in any spelling is known in ONNX, and gives way to ReLU behind the rewritten site alone."""

import math
import warnings
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx_runs import run
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.importer import import_graph
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.gelu import gelu_argument
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant

# how exporters and people write it, in ONNX's own text; the kind, or None where it is no GELU
SPELLED = {
    "half first": ("none", "a = Mul (x, half) b = Mul (x, root) c = Erf (b) d = Add (c, one) y = Mul (a, d)"),
    "half last": ("none", "a = Div (x, two_root) b = Erf (a) c = Add (one, b) d = Mul (x, c) y = Mul (d, half)"),
    "by a tanh": (
        "tanh",
        """a = Pow (x, three) b = Mul (cube, a) c = Add (x, b) d = Mul (pi, c) e = Tanh (d) f = Add (one, e)
        g = Mul (half, x) y = Mul (g, f)""",
    ),
    "of a sum": (
        "none",
        "z = Add (x, half) a = Div (z, two_root) b = Erf (a) c = Add (one, b) d = Mul (half, c) y = Mul (z, d)",
    ),
    "another width": (None, "a = Mul (x, half) b = Mul (x, half) c = Erf (b) d = Add (c, one) y = Mul (a, d)"),
    "gated by another": (
        None,
        "s = Sin (x) a = Mul (x, half) b = Mul (s, root) c = Erf (b) d = Add (c, one) y = Mul (a, d)",
    ),
}
CONSTANTS = {"half": 0.5, "one": 1.0, "three": 3.0, "root": 0.5**0.5, "two_root": 2**0.5, "cube": 0.044715,
             "pi": (2 / math.pi) ** 0.5}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_gelu_is_known_by_what_it_computes(name: str) -> None:
    kind, nodes = SPELLED[name]
    stored = ", ".join(f"float {constant} = {{{value}}}" for constant, value in CONSTANTS.items())
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[8] x) => (float[8] y) <{stored}> {{ {nodes} }}'
    graph = ir.serde.deserialize_model(onnx.parser.parse_model(text)).graph
    *inner, last = [gelu_argument(node, {"": 18}) for node in graph]
    assert inner == [None] * len(inner)
    assert (last and (last[0].name, last[1])) == (kind and ("z" if name == "of a sum" else "x", kind))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate=self.kind))


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("kind", ["none", "tanh"])
def test_relu_takes_the_place_of_gelu_behind_the_rewritten_site_alone(kind: str, opset: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind), Block(kind)).eval()
    x = torch.randn(2, 12, 16)
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            model, (x,), dynamo=True, dynamic_shapes=(({0: torch.export.Dim.DYNAMIC}),), opset_version=opset,
            verbose=False,
        )  # fmt: skip
    assert program is not None
    file = ir.serde.deserialize_model(program.model_proto)
    variant = get_variant("l1", {"relu": True})
    plan = Plan("model", (Placement.at(scan_onnx(OnnxGraph(file), "model").sites[0], variant),))
    result, _ = OnnxRewrite(plan).apply(file)
    counts = [Counter(node.op_type for node in each.graph) for each in (file, result)]
    assert [count["Relu"] for count in counts] == [0, 1]
    for before, after in (("Erf", "Erf"), ("Tanh", "Tanh"), ("Gelu", "Gelu")):
        assert counts[1][after] == counts[0][before] // 2
    imported, _ = import_graph(OnnxGraph(file))
    graph = capture("model", imported, (x,)).module
    rewritten = FxRewrite(Plan("model", (Placement.at(scan(FxGraph(graph), "model").sites[0], variant),)))(graph)
    names = [str(node.target) for node in rewritten.graph.nodes if node.op == "call_function"]
    assert [sum(each in name for name in names) for each in ("relu", "gelu")] == [1, 1]
    with torch.no_grad():
        np.testing.assert_allclose(run(result, x.numpy())[0], rewritten(x), rtol=1e-4, atol=1e-5)


def test_relu_where_there_is_no_gelu_is_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="relu").eval()
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        program = torch.onnx.export(layer, (torch.randn(2, 12, 16),), dynamo=True, verbose=False)
    assert program is not None
    file = ir.serde.deserialize_model(program.model_proto)
    site = scan_onnx(OnnxGraph(file), "model").sites[0]
    caplog.clear()
    OnnxRewrite(Plan("model", (Placement.at(site, get_variant("l1", {"relu": True})),))).apply(file)
    told = [message for message in caplog.messages if "GELU" in message]
    assert told == ["site0: relu=true finds no GELU behind the attention: no activation is changed there"]
