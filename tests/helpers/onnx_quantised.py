"""Quantised ONNX models: pairs put at named values of a spelling, and files as onnxruntime's quantiser writes them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.float16 import convert_float_to_float16

STEP = 1 / 32
_PRODUCTS = ["MatMul", "Gemm", "Conv"]
# name: how onnxruntime quantises a file
STATIC: dict[str, dict[str, Any]] = {
    "every operator": {},
    "every operator but Softmax, by channel": {"per_channel": True, "nodes_to_exclude": ["Softmax"]},
    "activations of two bytes": {"activation_type": QuantType.QUInt16},
    "products alone": {"op_types_to_quantize": _PRODUCTS},
}
DYNAMIC: dict[str, dict[str, Any]] = {
    "weights": {},
    "weights by channel": {"per_channel": True},
    "every product": {"extra_options": {"MatMulConstBOnly": False}},
}


def with_pairs(model: ir.Model, names: Sequence[str], step: float = STEP) -> ir.Model:
    """`model` with a QuantizeLinear and a DequantizeLinear between each of the named values and what reads it."""
    graph = model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    units = {"step": np.array(step, np.float32), "zero": np.array(0, np.int8)}
    scale, zero = (_stored(graph, name, array) for name, array in units.items())
    for name in names:
        value = made[name]
        readers = list(value.uses())
        rounds = ir.node("QuantizeLinear", [value, scale, zero], name=f"{name}_round")
        undoes = ir.node("DequantizeLinear", [rounds.outputs[0], scale, zero], name=f"{name}_undo")
        rounds.outputs[0].name, undoes.outputs[0].name = f"{name}_integers", f"{name}_rounded"
        for reader, place in readers:
            reader.replace_input_with(place, undoes.outputs[0])
        producer = value.producer()
        assert producer is not None
        graph.insert_after(producer, [rounds, undoes])
    return model


def with_integer_weights(model: ir.Model, names: Sequence[str], axis: int | None = None) -> ir.Model:
    """`model` with the named matrices as int8 behind a DequantizeLinear, by one scale or by one along `axis`."""
    graph = model.graph
    first = next(iter(graph))
    for name in names:
        value = graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy()
        most = np.abs(array).max() if axis is None else np.abs(array).max(1 - axis)
        scale = np.asarray(most / 127, np.float32)
        integers = np.round(array / (scale if axis is None else np.expand_dims(scale, 1 - axis))).astype(np.int8)
        operands = [_stored(graph, f"{name}_integers", integers), _stored(graph, f"{name}_scale", scale)]
        undoes = ir.node("DequantizeLinear", operands, {} if axis is None else {"axis": axis}, name=f"{name}_undo")
        undoes.outputs[0].name = f"{name}_as_float"
        ir.convenience.replace_all_uses_with(value, undoes.outputs[0])
        del graph.initializers[name]
        graph.insert_before(first, undoes)
    return model


PACKED = "four bits of half precision"


def quantised_file(path: Path, out: Path, images: np.ndarray, kind: str) -> Path:
    """The file at `path` as onnxruntime quantises it, by the STATIC or DYNAMIC called `kind`, or PACKED, written to
    `out`.
    """
    if kind == PACKED:
        quantiser = MatMulNBitsQuantizer(convert_float_to_float16(onnx.load(path), keep_io_types=True), block_size=16)
        quantiser.process()
        onnx.save(quantiser.model.model, out)
        return out
    if kind in DYNAMIC:
        quantize_dynamic(path, out, **DYNAMIC[kind])
        return out
    nodes = onnx.load(path).graph.node
    how = dict(STATIC[kind])
    excluded = how.pop("nodes_to_exclude", [])
    how["nodes_to_exclude"] = [node.name for node in nodes if node.op_type in excluded]
    quantize_static(path, out, _Images(onnx.load(path).graph.input[0].name, images), QuantFormat.QDQ, **how)
    return out


class _Images(CalibrationDataReader):
    def __init__(self, name: str, images: np.ndarray) -> None:
        self._batches: Iterator[dict[str, np.ndarray]] = iter([{name: images}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _stored(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    if name not in graph.initializers:
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    return graph.initializers[name]
