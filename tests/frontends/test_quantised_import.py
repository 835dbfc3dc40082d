"""Roundings imported from ONNX: onnxruntime's integers, the identity's gradient, and a bound on what is left out."""

import re

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_quantised import with_pairs
from onnx_spellings import SPELLINGS, proto, spelled

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.onnx import left_out as leaving
from attnrewrite.frontends.onnx.compared import TOLERANCE, difference, run
from attnrewrite.frontends.onnx.importer import example_inputs, import_graph
from attnrewrite.frontends.onnx.left_out import left_out
from attnrewrite.patterns.onnx.graph import OnnxGraph

_ZERO = "w = Constant<value_int=3>()\n z = Cast<to=%d>(w)\n s = Constant<value_float=0.03125>()\n"
_PAIR = "i = QuantizeLinear(x, s, z)\n y = DequantizeLinear(i, s, z)"
# name: (opset, body)
ROUNDINGS = {
    "bytes": (17, _ZERO % 2 + _PAIR),
    "signed bytes": (17, _ZERO % 3 + _PAIR),
    "two bytes": (21, _ZERO % 5 + _PAIR),
    "no zero point": (13, "s = Constant<value_float=0.03125>()\n" + _PAIR.replace(", z", "")),
    "a scale for each channel": (
        17,
        "s = Abs(bq)\n i = QuantizeLinear<axis=2>(x, s)\n y = DequantizeLinear<axis=-1>(i, s)",
    ),
    "integers that move": (
        17,
        _ZERO % 2 + "i = QuantizeLinear(x, s, z)\n t = Transpose<perm=[0, 2, 1]>(i)\n y = DequantizeLinear(t, s, z)",
    ),
    "a scale of the moment": (17, "i, s, z = DynamicQuantizeLinear(x)\n y = DequantizeLinear(i, s, z)"),
    "a scale of the moment, of positive numbers": (
        17,
        "p = Abs(x)\n i, s, z = DynamicQuantizeLinear(p)\n y = DequantizeLinear(i, s, z)",
    ),
    "zeros": (17, "o = Sub(x, x)\n i, s, z = DynamicQuantizeLinear(o)\n y = DequantizeLinear(i, s, z)"),
}
REFUSED = {
    "zero points that differ": (
        17,
        "s = Abs(bq)\n r = Mul(s, root)\n z = Cast<to=2>(r)\n i = QuantizeLinear<axis=2>(x, s, z)\n"
        "y = DequantizeLinear<axis=2>(i, s, z)",
        "its zero points differ",
    ),
    "a scale that follows the input": (
        17,
        "s = ReduceMax<keepdims=0>(x)\n i = QuantizeLinear(x, s)\n y = DequantizeLinear(i, s)",
        "its operand 's' is not constant",
    ),
    "four bits": (21, _ZERO % 22 + _PAIR, "its integers are of four bits"),
}


def model(opset: int, body: str) -> ir.Model:
    made = ir.serde.deserialize_model(proto(body, opset, outputs="float y"))
    made.graph.outputs[0].shape = None
    return made


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_gives_the_integers_of_onnxruntime(name: str) -> None:
    given = model(*ROUNDINGS[name])
    module, (example,) = import_graph(OnnxGraph(given))
    for tokens in (example, 100 * example[:1]):  # the latter beyond the range
        torch.testing.assert_close(module(tokens), run(given, (tokens,))[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", REFUSED)
def test_a_rounding_that_cannot_be_imported_is_named(name: str) -> None:
    opset, body, message = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(message)):
        import_graph(OnnxGraph(model(opset, body)))


def test_integers_may_be_a_result() -> None:
    given = ir.serde.deserialize_model(proto(_ZERO % 2 + "y = QuantizeLinear(x, s, z)", 17, outputs="uint8[B,10,16] y"))
    module, (example,) = import_graph(OnnxGraph(given))
    found, (wanted,) = module(example), run(given, (example,))
    assert found.dtype == torch.uint8
    assert torch.equal(found, wanted)


def test_a_rounding_has_the_gradient_of_the_identity_within_its_range() -> None:
    module, _ = import_graph(OnnxGraph(model(*ROUNDINGS["signed bytes"])))
    tokens = torch.tensor([0.0, 0.51, -3.0, 100.0, -100.0]).reshape(1, 5, 1).expand(1, 5, 16)
    tokens = tokens.repeat(1, 2, 1).requires_grad_()
    module(tokens).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad[0, :5, 0].tolist() == [1, 1, 1, 0, 0]


def test_a_module_is_held_to_the_file_from_rounding_to_rounding() -> None:
    given = with_pairs(spelled("plain"), ["o3"])
    module, inputs = import_graph(OnnxGraph(given))
    assert difference(given, module, inputs) <= TOLERANCE
    with torch.no_grad():
        module.wq[0, 0] += 0.05  # which a rounding after it could hide
    assert difference(given, module, inputs) > TOLERANCE
    assert difference(spelled("plain"), module, inputs) == float("inf")  # a file without that rounding


def test_what_is_left_out_is_no_more_than_its_steps_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = OnnxGraph(with_pairs(spelled("plain"), ["q", "kt", "s2", "p", "v"], step=1 / 12))
    found = left_out(graph, example_inputs(graph))
    assert found is not None
    assert (found.roundings, found.beyond) == (5, 0)
    assert 0 < found.difference < leaving.MOST * found.drawn < 0.5
    assert left_out(OnnxGraph(spelled("plain")), example_inputs(graph)) is None
    monkeypatch.setattr(leaving, "MOST", 0.1)
    with pytest.raises(CheckFailedError, match=r"without the 5 roundings inside its attention .* before quantization"):
        left_out(graph, example_inputs(graph))


def test_an_answer_that_hardly_depends_on_its_attention_may_change_as_float32_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opset, body = SPELLINGS["plain"]
    hardly = "o4 = Add(o3, bo)\n w = Constant<value_float=1e-6>()\n o5 = Mul(o4, w)\n y = Add(x, o5)"
    body = body.replace("y = Add(o3, bo)", hardly)
    graph = OnnxGraph(with_pairs(ir.serde.deserialize_model(proto(body, opset)), ["p"]))
    monkeypatch.setattr(leaving, "MOST", 0.0)  # so that the steps explain nothing
    found = left_out(graph, example_inputs(graph))
    assert found is not None
    assert found.roundings == 1
    assert 0 < found.difference < leaving.ROUNDING
    monkeypatch.setattr(leaving, "ROUNDING", 0.0)
    with pytest.raises(CheckFailedError, match="without the 1 roundings inside its attention"):
        left_out(graph, example_inputs(graph))


def test_numbers_beyond_the_range_of_their_integers_are_counted() -> None:
    graph = OnnxGraph(with_pairs(spelled("plain"), ["v"], step=1 / 256))
    inputs = example_inputs(graph)
    found = left_out(graph, inputs)
    assert found is not None
    (values,) = run(graph.source, inputs, ("v",))[1:]
    beyond = ((values * 256 < -128.501) | (values * 256 > 127.501)).float().mean()
    assert found.beyond == pytest.approx(float(beyond), rel=1e-6)
    assert np.isfinite(found.difference)
