"""Quantised attention in ONNX: read in float between its neighbours' roundings, which stay."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx_quantised import with_integer_weights, with_pairs
from onnx_runs import run
from onnx_spellings import proto, spelled, weights

from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.quantised import as_pairs
from attnrewrite.patterns.weights import projection_weights
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Projection, Untraced
from attnrewrite.variants.registry import get_variant

PLAIN = ["q1", "k1", "v1", "q2", "k2", "v2", "q3", "k3", "v3", "q", "kt", "v", "s1", "s2", "p", "o", "o1", "o2"]
# name: (spelling, the values that are rounded, how many readers the site reads without that)
INSIDE = {
    "scores": ("plain", ["s2"], 1),
    "scores, twice": ("plain", ["s1", "s2"], 2),
    "probabilities": ("plain", ["p"], 1),
    "values": ("plain", ["v"], 1),
    "queries and keys as they are multiplied": ("plain", ["q", "kt"], 2),
    "projections before their bias": ("plain", ["q1", "k1", "v1"], 3),
    "heads put together": ("plain", ["o", "o1", "o2"], 3),
    "everything": ("plain", PLAIN, len(PLAIN)),
    "a packed projection": ("one packed projection", ["a1", "a2", "a4", "q", "v", "p"], 6),
    "exponentials over their sum": ("softmax by hand", ["s2", "v"], 3),
    "one operator": ("Attention on four axes", ["q", "k", "v", "o"], 4),
}


@pytest.mark.parametrize("name", INSIDE)
def test_roundings_inside_an_attention_are_left_out(name: str) -> None:
    spelling, values, count = INSIDE[name]
    model = with_pairs(spelled(spelling), values)
    graph = OnnxGraph(model)
    found = scan_onnx(graph, "model")
    assert not found.near_misses
    (site,) = found.sites
    assert len(graph.roundings) == count
    assert site.core_reason is None
    assert all(not isinstance(part, Untraced) and part.direct for part in (*site.projections, site.output))
    tokens = np.random.default_rng(0).normal(size=(3, 10, 16)).astype(np.float32)
    np.testing.assert_allclose(run(graph.source, tokens)[0], run(spelled(spelling), tokens)[0], rtol=1e-5, atol=1e-6)
    assert any(node.op_type == "QuantizeLinear" for node in model.graph)  # the file itself is not changed


# what is rounded outside, by whether it is before the site or after it
@pytest.mark.parametrize("values", [["n"], ["o3"], ["n", "o3"]])
def test_roundings_around_an_attention_stay(values: list[str]) -> None:
    model = with_pairs(_behind_an_operator(spelled("plain")), [*values, "s2", "v"])
    graph = OnnxGraph(model)
    placements = (Placement.at(site, get_variant("softmax")) for site in scan_onnx(graph, "model").sites)
    result, edits = OnnxRewrite(Plan("model", tuple(placements))).apply(model)
    assert [edit.replaced for edit in edits] == ["o3" if "o3" in values else "y"]
    kept = [node.name for node in result.graph if node.op_type == "QuantizeLinear"]
    assert kept == [f"{value}_round" for value in values]
    tokens = np.random.default_rng(0).normal(size=(3, 10, 16)).astype(np.float32)
    np.testing.assert_allclose(run(result, tokens)[0], run(graph.source, tokens)[0], rtol=1e-5, atol=1e-5)


def _behind_an_operator(model: ir.Model) -> ir.Model:
    """The attention of tokens that an operator has made: n."""
    tokens = model.graph.inputs[0]
    readers = list(tokens.uses())
    made = ir.node("Tanh", [tokens], name="before")
    made.outputs[0].name = "n"
    for reader, place in readers:
        reader.replace_input_with(place, made.outputs[0])
    model.graph.insert_before(next(iter(model.graph)), made)
    return model


@pytest.mark.parametrize("axis", [None, 1])
def test_weights_of_integers_are_read_as_the_numbers_that_they_stand_for(axis: int | None) -> None:
    model = with_integer_weights(spelled("plain"), ["wq", "wk", "wv", "wo"], axis)
    graph = OnnxGraph(model)
    (site,) = scan_onnx(graph, "model").sites
    for role, projection in zip("qkv", site.projections, strict=True):
        assert isinstance(projection, Projection)
        known = weights()[f"w{role}"].T
        off = np.abs(projection_weights(graph, projection)[0] - known)
        assert 0 < off.max() <= np.abs(known).max() / 127 / 2 * 1.001


def test_values_that_something_else_reads_stay_rounded_there() -> None:
    model = spelled("plain")
    value = next(v for node in model.graph for v in node.outputs if v.name == "v")
    beside = ir.node("Relu", [value], name="beside")
    beside.outputs[0].name, beside.outputs[0].dtype = "z", ir.DataType.FLOAT
    model.graph.append(beside)
    model.graph.outputs.append(beside.outputs[0])
    graph = OnnxGraph(with_pairs(model, ["v"]))
    (rounding,) = graph.roundings
    assert (rounding.reader, rounding.source) == ("o", "v")
    read = {node.name: [operand.name for operand in node.inputs if operand] for node in graph.source.graph}
    assert read["beside"] == ["v_rounded"]


_INTEGERS = """
  i, a, z = DynamicQuantizeLinear(x)
  p0 = MatMulInteger(i, w_int, z, w_zero)
  p1 = Cast<to=1>(p0)
  u = Mul(a, w_unit)
  y = Mul(p1, u)
"""


@pytest.mark.parametrize("columns", [1, 16])
def test_a_product_of_integers_is_the_same_product_of_pairs(columns: int) -> None:
    model = ir.serde.deserialize_model(proto(_INTEGERS, 17))
    random = np.random.default_rng(0)
    shape = () if columns == 1 else (columns,)
    given = {
        "w_int": random.integers(0, 256, (16, 16), np.uint8),
        "w_zero": random.integers(100, 156, shape, np.uint8),
        "w_unit": random.uniform(0.01, 0.02, shape).astype(np.float32),
    }
    for name, array in given.items():
        model.graph.register_initializer(_initialiser(model, name, np.asarray(array)))
    tokens = random.normal(size=(2, 10, 16)).astype(np.float32)
    plain = as_pairs(model)
    assert [node.op_type for node in plain.graph if "Integer" in node.op_type] == []
    np.testing.assert_allclose(run(plain, tokens)[0], run(model, tokens)[0], rtol=1e-5, atol=1e-5)


def _initialiser(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    value = next(o for node in model.graph for o in node.inputs if o is not None and o.name == name)
    value.const_value = ir.tensor(array, name=name)
    return value
