"""Every reason that matching may give, each met by a model: a table over all codes that the source holds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from head_loops import APART
from onnx_spellings import proto
from refusal_codes import codes_in
from spellings import (
    HEADS,
    MIXED,
    NEAR,
    NEAR_MISSES,
    SCALE,
    TOKENS,
    WIDTH,
    Spelling,
    attend,
    build,
    heads,
    merged,
    packed,
    separate,
    unpacked,
    with_parameters,
)
from torch import Tensor, nn

from attnrewrite.errors import Refusal
from attnrewrite.frontends.capture import capture
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.fused import write_out
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.sizes import advance, input_sizes, start
from attnrewrite.patterns.provenance import layout_of
from attnrewrite.site import Scan

ROOT = Path(__file__).parents[2]
Case = Callable[[], set[str]]  # the codes that one model leads to


def codes(found: Scan) -> set[str]:
    """The codes of everything that a scan refuses."""
    refused: list[object] = [*found.near_misses]
    for site in found.sites:
        refused += [site.core_reason, *site.projections, site.output]
    return {each.code for each in refused if isinstance(each, Refusal)}


def of_module(spelling: Spelling) -> set[str]:
    module, x = build(spelling)
    return codes(scan(FxGraph(capture(spelling.name, module, (x,)).module), spelling.name))


def fx(parts: Callable[[], dict[str, Any]], run: Callable[[Any, Tensor], Tensor]) -> Case:
    return lambda: of_module(Spelling("case", parts, run))


def with_scores(change: Callable[[Tensor], Tensor]) -> Case:
    """Attention whose scores are changed before the softmax."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(change(q @ k.mT * SCALE).softmax(-1) @ v))

    return fx(packed, run)


def with_probabilities(change: Callable[[Tensor], Tensor]) -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(change((q @ k.mT * SCALE).softmax(-1)) @ v))

    return fx(packed, run)


def with_operands(change: Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor], parts: Any = packed) -> Case:
    return fx(parts, lambda m, x: change(m, x, *unpacked(m, x)))


def fused_layer() -> set[str]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias
            return torch._native_multi_head_attention(x, x, x, WIDTH, HEADS, *weights, need_weights=False)[0]

    module = capture("layer", Layer().eval(), (torch.randn(2, TOKENS, WIDTH),)).module
    return codes(scan(FxGraph(module), "layer"))


def some_heads(m: Any, x: Tensor) -> Tensor:
    """Four heads of the first tokens, two of the others: lead entries that are no batch times heads."""
    parts = [part.unflatten(2, (2, -1)).permute(0, 2, 1, 3, 4) for part in unpacked(m, x)]
    q, k, v = (torch.cat([part[:, 0], part[:, 1, :2]], dim=1) for part in parts)
    return attend(q, k, v)


def crowd(m: Any, x: Tensor) -> Tensor:
    """Images and heads folded into one axis, and shuffled there."""
    order = [0, 3, 1, 2, 4, 6, 5, 7]
    q, k, v = (part.flatten(0, 1)[order] for part in unpacked(m, x))
    return attend(q, k, v)


def skewed(m: Any, x: Tensor) -> Tensor:
    """Each token's channels start one further."""
    place = (torch.arange(TOKENS)[:, None] + torch.arange(WIDTH)) % WIDTH
    query = m.q(x).gather(2, place.expand(2, -1, -1))
    return m.proj(merged(attend(heads(query), heads(m.k(x)), heads(m.v(x)))))


def shifted(m: Any, x: Tensor) -> Tensor:
    """Half of a token's channels are those of the token before."""
    query = m.q(x)
    query = torch.cat([query[..., :12], query[..., 12:].roll(1, 1)], dim=2)
    return m.proj(merged(attend(heads(query), heads(m.k(x)), heads(m.v(x)))))


FROM_FX: dict[str, Case] = {
    **{reason: lambda case=case: of_module(case) for reason, _, case in NEAR_MISSES},  # type: ignore[misc]
    "fused-layer": fused_layer,
    "mixed-heads": with_operands(lambda m, x, q, k, v: (q @ k.mT).softmax(-1)[:, :2] @ v[:, :2]),
    "unfolded-heads": fx(packed, some_heads),
    "not-a-view": fx(packed, crowd),
    "rearranged-scores": with_scores(lambda s: s.roll(1, -1)),
    "partial-softmax": with_operands(
        lambda m, x, q, k, v: (q @ k.mT).unflatten(3, (2, 6)).softmax(-1).flatten(3) @ v,
    ),
    "scores-multiplied": with_scores(lambda s: s * NEAR),
    "weak-mask": with_scores(lambda s: s.masked_fill(~NEAR, -1e4) / 100),
    "several-fillings": with_scores(lambda s: s.masked_fill(~NEAR, -1e5).masked_fill(~NEAR.mT.tril(), -1e4)),
    "biased-filling": with_scores(lambda s: s.masked_fill(~NEAR, -1e5) + NEAR),
    "unaligned-values": with_operands(lambda m, x, q, k, v: attend(q, k, v.flip(2))),
    "active-dropout": with_operands(lambda m, x, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)),
    "talking-heads": lambda: of_module(MIXED[0]),
    "causal-mask": with_operands(lambda m, x, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "joined-scores": with_operands(
        lambda m, x, q, k, v: torch.cat([q[:, :, 1:] @ k.mT, m.row.expand(2, -1, -1, -1)], 2).softmax(-1) @ v,
        with_parameters(packed(), row=(HEADS, 1, TOKENS)),
    ),
    "picked-scores": with_scores(lambda s: s[:, :, s[0, 0, 0].argsort()]),
    "changed-scores": with_scores(torch.tanh),
    "picked-probabilities": with_probabilities(lambda p: p[:, :, p[0, 0, 0].argsort()]),
    "changed-probabilities": with_probabilities(torch.square),
    "normalised-probabilities": with_probabilities(lambda p: F.layer_norm(p, (TOKENS,))),
    "several-sources": fx(
        lambda: separate() | {"other": nn.Linear(WIDTH, WIDTH)},
        lambda m, x: attend(heads(torch.cat([m.q(x[:, :6]), m.other(x[:, 6:])], 1)), heads(m.k(x)), heads(m.v(x))),
    ),
    "no-projection": fx(separate, lambda m, x: attend(heads(x), heads(m.k(x)), heads(m.v(x)))),
    "mixed-channels": fx(separate, skewed),
    "mixed-tokens": fx(separate, shifted),
    "mixed-output": fx(
        lambda: packed() | {"all": nn.Linear(TOKENS * WIDTH, 4)},
        lambda m, x: m.all(merged(attend(*unpacked(m, x))).flatten(1)),
    ),
    "read-twice": with_operands(lambda m, x, q, k, v: (lambda out: out.sum(1) + out.amax(1))(attend(q, k, v))),
    "no-output-map": with_operands(lambda m, x, q, k, v: attend(q, k, v)),
}


def position(*rows: list[int]) -> np.ndarray:
    return np.array(rows)[None, None]


def refused_layout(read: np.ndarray, shape: tuple[int, ...], batch_axes: frozenset[int] = frozenset()) -> Case:
    def case() -> set[str]:
        found = layout_of(read, shape, batch_axes)
        assert isinstance(found, Refusal)
        return {found.code}

    return case


LAYOUTS: dict[str, Case] = {
    "not-whole": refused_layout(position([0, 1], [2, 3]), (2, 2, 2)),
    "not-strided": refused_layout(position([0, 2, 1]), (3,)),
    "batch-inside": refused_layout(position([0, 1], [2, 3]), (2, 2), frozenset({0})),
}

_SCORES = "kt = Transpose<perm=[0, 2, 1]>(x)\n s = MatMul(x, kt)\n"


def onnx(body: str, opset: int = 17, inputs: str = "float[B,10,16] x") -> Case:
    def case() -> set[str]:
        graph = OnnxGraph(ir.serde.deserialize_model(proto(body, opset, inputs, "float y")))
        return codes(scan_onnx(graph, "case"))

    return case


def fused(body: str, opset: int = 17, inputs: str = "float[2,10,16] x") -> Case:
    """What `write_out` refuses: the near miss has the same sentence and the code "unsupported-operator"."""

    def case() -> set[str]:
        model = ir.serde.deserialize_model(proto(body, opset, inputs, "float y"))
        sizes = start(model.graph, input_sizes(model.graph, 2))
        refused = set()
        for node in list(model.graph):
            if (why := write_out(model.graph, node, sizes, model.opset_imports)) is not None:
                refused.add(why.code)
            elif node.graph is not None:
                advance(sizes, node, model.opset_imports)
        return refused

    return case


FROM_ONNX: dict[str, Case] = {
    "quantized": onnx(_SCORES + "i = QuantizeLinear(s, root)\n d = DequantizeLinear(i, scale0)\n p = Softmax(d)\n"
                      "y = MatMul(p, x)"),
    "unsupported-operator": onnx("y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>(x, x, x)"),
    "unknown-size": onnx("i = NonZero(x)\n c = Cast<to=1>(i)\n y = Softmax(c)"),
    "control-flow": onnx(
        _SCORES + """yes = ReduceMin<keepdims=0>(x)
        c = Cast<to=9>(yes)
        p = If (c) < then_branch = a () => (i) { i = Softmax(s) }, else_branch = b () => (j) { j = Identity(s) } >
        y = MatMul(p, x)"""
    ),
    "cache-or-scores": fused("y, p, q = Attention<q_num_heads=2, kv_num_heads=2>(x, x, x, m, past, past)", 23,
                             "float[2,10,16] x, float[10,14] m, float[2,2,4,8] past"),
    "softcap": fused("y = Attention<q_num_heads=2, kv_num_heads=2, softcap=9.0>(x, x, x)", 23),
    "unsaid-heads": fused("y = Attention(x, x, x)", 23),
    "padding-or-cache": fused("y = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x, b_packed, mask)", 17,
                              "float[2,10,16] x, int32[2] mask"),
    "packed-bias": fused("y = com.microsoft.MultiHeadAttention<num_heads=2>(x, , , b_packed)", 17,
                         "float[2,10,2,3,8] x"),
    "split-keys": fused("y = com.microsoft.MultiHeadAttention<num_heads=2>(x, k, k)", 17,
                        "float[2,10,16] x, float[2,2,10,8] k"),
    "no-weights": fused("y = com.microsoft.Attention<num_heads=2>(x)"),
    "padding-rotation-or-cache": fused("y = com.microsoft.Attention<num_heads=2>(x, w_packed, b_packed, mask)", 17,
                                       "float[2,10,16] x, int32[2] mask"),
    "computed-weight": fused("y = com.microsoft.MatMulNBits<K=16, N=16, block_size=16>(x, b, s)", 17,
                             "float[2,10,16] x, uint8[16,1,8] b, float[16] s"),
    "other-packing": fused("b = Constant<value = uint8[1,1,6] {0, 0, 0, 0, 0, 0}>() s = Constant<value_floats=[1.0]>() "
                           "y = com.microsoft.MatMulNBits<K=16, N=1, bits=3, block_size=16>(x, b, s)"),
    "not-a-product": fused('y = Einsum<equation="abc->ab">(x)'),
    "unsound-equation": fused('y = Einsum<equation="ab,ab->a">(x, x)'),
}  # fmt: skip
CASES = {**FROM_FX, **LAYOUTS, **FROM_ONNX}


@pytest.mark.parametrize("code", CASES)
def test_a_model_for_every_reason(code: str) -> None:
    assert code in CASES[code]()


def test_every_reason_in_the_source_has_a_case() -> None:
    found = codes_in(ROOT / "patterns")
    assert found == set(CASES) | {case.code for case in APART}  # each of which test_groups.py meets
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in found)
