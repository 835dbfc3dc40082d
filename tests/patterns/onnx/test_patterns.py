"""ONNX graphs: the same attention is found however it is spelled, and what cannot be read is said."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx_spellings import SPELLINGS, proto, spelled, weights

from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.weights import output_weights, projection_weights, same_weights
from attnrewrite.site import OutputProjection, Projection, Scan


def find(model: ir.Model) -> tuple[OnnxGraph, Scan]:
    graph = OnnxGraph(model)
    return graph, scan_onnx(graph, "model")


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_site_with_its_weights(name: str) -> None:
    graph, found = find(spelled(name))
    assert not found.near_misses
    (site,) = found.sites
    assert (site.heads, site.head_dim, site.n_queries, site.n_keys) == (2, 8, 10, 10)
    assert (site.kind, site.axis, site.bias, site.core_reason) == ("self", "token", "none", None)
    assert site.scale == pytest.approx(8**-0.5, rel=1e-6)
    known = weights()
    for role, projection in zip("qkv", site.projections, strict=True):
        assert isinstance(projection, Projection), projection
        assert projection.direct
        weight, bias = projection_weights(graph, projection)
        np.testing.assert_array_equal(weight, known[f"w{role}"].T)
        np.testing.assert_array_equal(bias, known[f"b{role}"])
    assert isinstance(site.output, OutputProjection), site.output
    np.testing.assert_array_equal(output_weights(graph, site.output)[0], known["wo"].T)
    np.testing.assert_array_equal(output_weights(graph, site.output)[1], known["bo"])


def test_every_spelling_has_the_same_fingerprint() -> None:
    fingerprints = [find(spelled(name))[1].sites[0].fingerprint for name in SPELLINGS]
    assert [same_weights(fingerprints[0], other) for other in fingerprints] == [True] * len(SPELLINGS)


_SCORES = (
    "q = MatMul(x, wq)\nk = MatMul(x, wk)\n kt = Transpose<perm=[0, 2, 1]>(k)\n v = MatMul(x, wv)\n s = MatMul(q, kt)\n"
)
NEAR_MISSES = {
    "two axes at once": (11, _SCORES + "p = Softmax<axis=1>(s)\n y = MatMul(p, v)", "wrong-axis"),
    "a gate": (17, "g = MatMul(x, wq)\n p = Softmax(g)\n y = Mul(p, x)", "no-product"),
    "keys and values of earlier calls": (
        23,
        "y, a, b = Attention<q_num_heads=2, kv_num_heads=2>(x, x, x, , past, past)",
        "unsupported-operator",
    ),
    "an operator that nobody wrote out": (
        17,
        "y = com.microsoft.SparseAttention<num_heads=2>(x)",
        "unsupported-operator",
    ),
    "a quantized softmax": (17, "y = com.microsoft.QLinearSoftmax<opset=13>(x, root, root)", "quantized"),
    "scores rounded by one scale and read by another": (
        17,
        _SCORES + "i = QuantizeLinear(s, root)\n d = DequantizeLinear(i, scale0)\n p = Softmax(d)\n y = MatMul(p, v)",
        "quantized",
    ),
    "whole numbers": (
        17,
        "i, s1, z = DynamicQuantizeLinear(x)\n it = Transpose<perm=[0, 2, 1]>(i)\n p0 = MatMulInteger(i, it)\n"
        "p1 = Cast<to=1>(p0)\n p = Softmax(p1)\n y = MatMul(p, x)",
        "quantized",
    ),
    "in the body of a loop": (
        17,
        _SCORES
        + """t = Constant<value_int=3>()
        yes = ReduceMin<keepdims=0>(x)
        c = Cast<to=9>(yes)
        p = If (c) < then_branch = a () => (i) { i = Softmax(s) }, else_branch = b () => (j) { j = Identity(s) } >
        y = MatMul(p, v)""",
        "control-flow",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_site_is_a_near_miss_with_its_reason(name: str) -> None:
    opset, body, reason = NEAR_MISSES[name]
    inputs = "float[B,10,16] x" + (", float[B,2,4,8] past" if "past" in body else "")
    _, found = find(ir.serde.deserialize_model(proto(body, opset, inputs, "float y")))
    assert not found.sites
    (miss,) = found.near_misses
    assert miss.code == reason, miss
    assert miss.sentence


def test_what_is_rounded_before_a_fused_operator_is_read_by_it_in_float() -> None:
    body = "q = MatMul(x, wq)\n i = QuantizeLinear(q, root)\n d = DequantizeLinear(i, root)\n"
    body += "y = com.microsoft.MultiHeadAttention<num_heads=2>(d, x, x)"
    graph, found = find(ir.serde.deserialize_model(proto(body, 17, "float[B,10,16] x", "float y")))
    assert len(found.sites) == 1
    assert [(each.reader, each.place, each.source) for each in graph.roundings] == [("y", 0, "q")]


@pytest.mark.parametrize("tokens", ["n", "s"])
def test_tokens_may_be_any_output_of_a_fused_norm(tokens: str) -> None:
    """The norm of a sum, or the sum itself, which the residual path reads further on."""
    opset, body = SPELLINGS["plain"]
    body = body.replace("(x, w", f"({tokens}, w").replace("y = Add(o3, bo)", "o4 = Add(o3, bo)")
    fused = "n, m, i, s = com.microsoft.SkipLayerNormalization(x, x, bq, bk)"
    last = "y, m2, i2, s2_ = com.microsoft.SkipLayerNormalization(o4, s, bq, bk)"
    graph, found = find(ir.serde.deserialize_model(proto(f"{fused} {body} {last}", opset)))
    (site,) = found.sites
    assert not found.near_misses
    for projection in site.projections:
        assert isinstance(projection, Projection), projection
        assert projection.input is not None
        assert projection.input.value == tokens
    assert site.fingerprint == find(spelled("plain"))[1].sites[0].fingerprint
    assert [graph.shape(name) for name in ("n", "m", "i", "s")] == [(2, 10, 16), (2, 10, 1), (2, 10, 1), (2, 10, 16)]


def test_projections_are_followed_through_a_picture_that_is_resized_channels_last() -> None:
    """As files have it that onnxruntime optimised."""
    resized = """
      {0}1 = MatMul(x, w{0})
      {0}2 = Reshape({0}1, picture)
      {0}3 = Resize<mode="nearest">({0}2, , twofold)
      {0}4 = Reshape({0}3, split)
    """
    body = f"""
      picture = Constant<value_ints=[0, 2, 5, 16]>()
      twofold = Constant<value_floats=[1.0, 2.0, 2.0, 1.0]>()
      split = Constant<value_ints=[0, 40, 2, 8]>()
      q1 = MatMul(x, wq)
      q2 = Reshape(q1, heads0)
      {resized.format("k")}
      {resized.format("v")}
      q = Transpose<perm=[0, 2, 1, 3]>(q2)
      k = Transpose<perm=[0, 2, 3, 1]>(k4)
      v = Transpose<perm=[0, 2, 1, 3]>(v4)
      s1 = MatMul(q, k)
      s2 = Mul(s1, scale0)
      p = Softmax(s2)
      o1 = MatMul(p, v)
      o2 = Transpose<perm=[0, 2, 1, 3]>(o1)
      o3 = Reshape(o2, joined0)
      y = MatMul(o3, wo)
    """
    graph, found = find(ir.serde.deserialize_model(proto(body, 17)))
    (site,) = found.sites
    assert (site.n_queries, site.n_keys, site.heads, site.core_reason) == (10, 40, 2, None)
    for role, projection in zip("qkv", site.projections, strict=True):
        assert isinstance(projection, Projection), projection
        np.testing.assert_array_equal(projection_weights(graph, projection)[0], weights()[f"w{role}"].T)


@pytest.mark.parametrize(("chosen", "dropped"), [("mask, s2, low", False), ("mask, low, s2", True)])
def test_a_mask_written_over_the_scores_joins_them(chosen: str, dropped: bool) -> None:
    opset, body = SPELLINGS["plain"]
    body = body.replace("Softmax<axis=-1>(s2)", "Softmax<axis=-1>(s3)").replace(
        "p = Softmax", f"low = Constant<value_float=-1e9>()\n  s3 = Where({chosen})\n  p = Softmax"
    )
    _, found = find(ir.serde.deserialize_model(proto(body, opset, "float[B,10,16] x, bool[B,1,1,10] mask")))
    (site,) = found.sites
    assert site.core is not None, site.core_reason
    assert (site.bias, site.bias_of_keys) == ("input", True)
    (term,) = site.core.terms
    assert (term.operand.value, term.dropped, term.filling) == ("mask", dropped, -1e9)


def test_a_reshape_to_one_image_is_of_a_batch_of_one() -> None:
    """onnx takes any shape that a Reshape names: that it holds as many elements is for whoever reads it to see."""
    opset, body = SPELLINGS["plain"]
    body = body.replace("heads = Constant<value_ints=[0, 0, 2, 8]>", "heads = Constant<value_ints=[1, 10, 2, 8]>")
    graph, found = find(ir.serde.deserialize_model(proto(body, opset)))
    assert (graph.prepared.batch, graph.prepared.open_batch, len(found.sites)) == (1, False, 1)


def test_a_fixed_batch_has_no_open_axes() -> None:
    opset, body = SPELLINGS["plain"]
    graph, found = find(ir.serde.deserialize_model(proto(body, opset, "float[1,10,16] x")))
    assert not any(graph.batch_axes(value) for value in graph.values)
    assert found.sites[0].core is not None
    assert -1 not in found.sites[0].core.query.layout.split


def test_reading_a_model_leaves_it_as_it_was() -> None:
    model = spelled("com.microsoft Attention")
    before = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    find(model)
    assert ir.serde.serialize_model(model).SerializeToString(deterministic=True) == before
