"""ONNX files that are damaged or hostile: one error that says what is wrong; nothing hangs, nothing else is read."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_spellings import SPELLINGS, proto

from attnrewrite.errors import InputError, NothingMatchedError
from attnrewrite.patterns.onnx.files import read_model
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx

PLAIN = SPELLINGS["plain"][1]


def explain(path: Path) -> int:
    return len(scan_onnx(OnnxGraph(read_model(path)), "model"))


def written(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def truncated(folder: Path) -> Path:
    path = written(folder / "model.onnx", proto(PLAIN, 17))
    path.write_bytes(path.read_bytes()[:-100])
    return path


def empty(folder: Path) -> Path:
    return written(folder / "model.onnx", onnx.ModelProto())


def text(folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_text("this is not a model, it is a sentence")
    return path


def absent(folder: Path) -> Path:
    return folder / "model.onnx"


def cyclic(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("a = Add(x, b) b = Relu(a) y = Softmax(b)", 17))


def recursive(folder: Path) -> Path:
    body = helper.make_function(
        "own", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="own")], [helper.make_opsetid("own", 1)]
    )
    model = proto("y = Relu(x)", 17)
    model.graph.node[0].op_type, model.graph.node[0].domain = "F", "own"
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.append(body)
    return written(folder / "model.onnx", model)


def unmade(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("y = Add(x, nothing)", 17))


def twice(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("y = Relu(x) y = Abs(x)", 17))


def mistyped(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("a = Cast<to=7>(x) y = MatMul(a, wq)", 17))


def misshapen(folder: Path) -> Path:
    model = proto("y = MatMul(x, seven)", 17)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((7, 7), np.float32), "seven"))
    return written(folder / "model.onnx", model)


def short_weight(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    model.graph.initializer[0].dims[0] = 1 << 40
    return written(folder / "model.onnx", model)


def huge_input(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("y = Softmax(x)", 17, "float[B,1000000000,1000000000] x"))


def huge_expand(folder: Path) -> Path:
    body = "n = Constant<value_ints=[1, 1000000000, 1000000000]>() z = ConstantOfShape(n) y = Softmax(z)"
    return written(folder / "model.onnx", proto(body, 17))


def large_scores(folder: Path) -> Path:
    body = "t = Transpose<perm=[0, 2, 1]>(x) s = MatMul(x, t) p = Softmax(s) y = MatMul(p, x)"
    return written(folder / "model.onnx", proto(body, 17, "float[2,65535,16] x"))


def long_range(folder: Path) -> Path:
    ends = "a = Constant<value_int=0>() b = Constant<value_int=8000000000>() c = Constant<value_int=1>()"
    body = f"{ends} r = Range(a, b, c) f = Cast<to=1>(r) m = ReduceMax(f) z = Add(x, m) y = Softmax(z)"
    return written(folder / "model.onnx", proto(body, 17))


def open_width(folder: Path) -> Path:
    return written(folder / "model.onnx", proto("y = Softmax(x)", 17, "float[B,N,16] x"))


def ambiguous(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    node = next(node for node in model.graph.node if node.attribute)
    node.attribute.append(node.attribute[0])
    return written(folder / "model.onnx", model)


def untyped(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    model.graph.node[0].attribute.add(name="odd")
    return written(folder / "model.onnx", model)


def of_part_bytes(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    model.graph.initializer[0].data_type = TensorProto.UINT4
    return written(folder / "model.onnx", model)


def without_numbers(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    model.graph.initializer[0].ClearField("raw_data")
    return written(folder / "model.onnx", model)


def a_constant_of_few(folder: Path) -> Path:
    model = proto("c = Constant<value=float[3] {1., 2., 3.}>()\n y = Add(x, c)", 17)
    model.graph.node[0].attribute[0].t.ClearField("float_data")
    return written(folder / "model.onnx", model)


def of_a_far_future(folder: Path) -> Path:
    model = proto("y = Softmax(x)", 17, "float[B,N,16] x")
    model.opset_import[0].version = 1 << 40
    return written(folder / "model.onnx", model)


def with_three_inputs(folder: Path) -> Path:
    model = proto(PLAIN, 17)
    model.graph.node[0].input.append("x")
    return written(folder / "model.onnx", model)


def external(location: str, length: int = 1024) -> Callable[[Path], Path]:
    """A model whose first weight is said to lie in `location`."""

    def make(folder: Path) -> Path:
        (folder / "inside").mkdir()
        (folder / "secret").write_bytes(bytes(4096))
        os.symlink(folder / "secret", folder / "inside" / "link")
        (folder / "inside" / "short").write_bytes(bytes(16))
        model = proto(PLAIN, 17)
        tensor = next(t for t in model.graph.initializer if t.name == "wq")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        return written(folder / "inside" / "model.onnx", model)

    return make


BAD = {
    truncated: "not an ONNX model, or cut short",
    empty: "holds no graph",
    text: "not an ONNX model, or cut short",
    absent: "cannot be read",
    cyclic: "cannot be put in order",
    recursive: "cannot be put in order",
    unmade: r"node 'node0' \(Add\) reads 'nothing', which nothing makes",
    twice: "not a sound ONNX model: Output 'y' is redeclared",
    ambiguous: r"has the attribute '\w+' twice",
    untyped: "has an attribute 'odd' of no type",
    with_three_inputs: r"node 'node0' \(\w+\) has 3 inputs, and its operator at most 2",
    of_part_bytes: r"has 64 bytes, its dimensions \[16\] need 8",
    without_numbers: r"initialiser 'bk' does not hold the numbers that its dimensions \[16\] need",
    a_constant_of_few: r"node 'node0' \(Constant\): its value does not hold the numbers .* \[3\] need",
    of_a_far_future: "give --input-size",
    mistyped: r"node 'node1' \(MatMul\) does not take its operands",
    misshapen: r"node 'node0' \(MatMul\) does not take its operands \(x 2x10x16, seven 7x7\)",
    short_weight: r"initialiser 'bk' has 64 bytes, its dimensions \[1099511627776\] need",
    huge_input: "no machine holds it",
    huge_expand: "no machine holds it",
    large_scores: r"s has 8,589,672,450 elements: following them takes some 256.0 GiB of memory",
    long_range: r"node .node3. \(Range\), which makes 8,000,000,000 elements, takes some 59.6 GiB of memory",
    open_width: "input 'x' leaves axis 1 open: give --input-size",
    external("../secret"): "points outside the model's folder",
    external("link"): "points outside the model's folder",
    external("/etc/passwd"): "points outside the model's folder",
    external("missing"): "which is not there",
    external("short"): "lies beyond the end of short",
}


@pytest.mark.parametrize(("make", "message"), BAD.items(), ids=[f"{place}" for place in range(len(BAD))])
def test_a_bad_file_is_refused_in_one_line(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        explain(make(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["float x", "float[0,10,16] x"])
def test_inputs_without_axes_or_elements_are_refused_or_hold_no_attention(given: str, tmp_path: Path) -> None:
    """Products of nothing have no axes that anything varies along."""
    path = written(tmp_path / "model.onnx", proto(PLAIN, 17, given))
    with suppress(InputError, NothingMatchedError):
        assert not explain(path)


def test_a_value_of_unknown_size_is_named() -> None:
    graph = OnnxGraph(ir.serde.deserialize_model(proto(PLAIN, 17)))
    for asked in (graph.shape, graph.batch_axes):
        with pytest.raises(InputError, match="the size of 'nowhere' cannot be inferred"):
            asked("nowhere")


def test_weights_beside_the_model_are_read(tmp_path: Path) -> None:
    model = ir.serde.deserialize_model(proto(PLAIN, 17))
    ir.save(model, tmp_path / "model.onnx", external_data="model.data", size_threshold_bytes=0)
    graph = OnnxGraph(read_model(tmp_path / "model.onnx"))
    (mine,) = scan_onnx(graph, "model").sites
    (wanted,) = scan_onnx(OnnxGraph(model), "model").sites
    assert mine.fingerprint == wanted.fingerprint


@pytest.mark.parametrize("step", ["Relu(v{i})", "Add(v{i}, v{j})", "Softmax(v{i})"])
def test_many_nodes_neither_hang_nor_overflow(step: str) -> None:
    """Long chains; sums of earlier sums, whose paths are more than anyone can walk; a softmax at every step."""
    count = 2000 if step.startswith("Softmax") else 20_000
    nodes = "\n".join(f"v{i + 1} = {step.format(i=i, j=max(i - 1, 0))}" for i in range(count))
    model = proto(f"v0 = MatMul(x, x)\n{nodes}\ny = Softmax(v{count})", 17, "float[2,4,4] x", "float y")
    found = scan_onnx(OnnxGraph(ir.serde.deserialize_model(model)), "model")
    assert not found.sites
    assert len(found.near_misses) == 1 + (count if step.startswith("Softmax") else 0)
