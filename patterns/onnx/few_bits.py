"""Weights that onnxruntime packs into few bits (MatMulNBits, MatMulBnb4), written out as what they stand for.

Such a weight lies transposed, row by row, in blocks of one scale each. What is multiplied with it is not rounded.
"""

import math

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import Refusal
from attnrewrite.patterns.onnx.writer import Setting, Writer, integer

# the numbers of four bits, by MatMulBnb4's quant_type (Dettmers et al. 2023, QLoRA, appendix E, and bitsandbytes)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_LEVELS = {0: (*_FP4, *(-level for level in _FP4)), 1: _NF4}


def write_product_of_bits(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    """com.microsoft MatMulNBits: A [.., K] times the transpose of (integers [N, K] - zero) * scale, and a bias."""
    rows, columns, length = (integer(node, name) for name in ("N", "K", "block_size"))
    bits, blocks = integer(node, "bits", 4), math.ceil(columns / length)
    packed, scales, zero, order = (_stored(node, place) for place in range(1, 5))
    if packed is None or scales is None or (len(node.inputs) > 3 and node.inputs[3] is not None and zero is None):
        return Refusal("computed-weight", "its packed weight, scales or zero points are not stored")
    if order is not None or bits not in (2, 4, 8) or (zero is not None and zero.dtype != np.uint8):
        return Refusal("other-packing", "its bits, their order or its zero points are none that are known")
    integers = _unpacked(packed.reshape(rows * blocks, -1), bits)
    middle = np.full((rows, blocks), 1 << (bits - 1), np.uint8)
    zeros = middle if zero is None else _unpacked(zero.reshape(rows, -1), bits)[:, :blocks]
    operands = {"integers": integers, "scale": scales.astype(np.float32).reshape(-1), "zero": zeros.reshape(-1)}
    given = [writer.constant(array, name) for name, array in operands.items()]
    weight = _laid_out(writer, writer.one("DequantizeLinear", given, "blocks", axis=0), rows, columns, blocks * length)
    made = _product(writer, node, weight, setting)
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    return made if bias is None else writer.one("Add", [made, bias], "biased")


def write_product_of_levels(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    """com.microsoft MatMulBnb4: A [.., K] times the transpose of levels [N, K] * the largest of their block."""
    rows, columns, length = (integer(node, name) for name in ("N", "K", "block_size"))
    packed, largest, levels = _stored(node, 1), _stored(node, 2), _LEVELS.get(integer(node, "quant_type", -1))
    if packed is None or largest is None or levels is None:
        return Refusal("computed-weight", "its packed weight or scales are not stored, or its levels are not known")
    if rows * columns % length or integer(node, "transB", 1) != 1:
        return Refusal("other-packing", "its last block is a part of one, or its weight does not lie transposed")
    places = np.stack([packed >> 4, packed & 15], -1).reshape(-1, length)
    blocks = np.array(levels, np.float32)[places] * largest.astype(np.float32).reshape(-1, 1)
    weight = _laid_out(writer, writer.constant(blocks, "blocks"), rows, columns, columns)
    return _product(writer, node, weight, setting)


def _stored(node: ir.Node, place: int) -> np.ndarray | None:
    value = node.inputs[place] if place < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [rows, n] as integers [rows, n * 8 / bits], the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1)


def _laid_out(writer: Writer, blocks: ir.Value, rows: int, columns: int, length: int) -> ir.Value:
    """Blocks, `length` numbers of them for a row, as the weight [columns, rows]."""
    laid = writer.reshape(blocks, (rows, length), "rows")
    if length != columns:
        bounds = {"from": 0, "to": columns, "axis": 1}
        laid = writer.one("Slice", [laid, *(writer.constant(np.array([n]), name) for name, n in bounds.items())], "cut")
    return writer.transpose(laid, (1, 0), "weight")


def _product(writer: Writer, node: ir.Node, weight: ir.Value, setting: Setting) -> ir.Value:
    tokens = node.inputs[0]
    kind = setting.dtype(tokens)
    if kind != ir.DataType.FLOAT:
        weight = writer.one("Cast", [weight], "narrow", to=int(kind))
    return writer.one("MatMul", [tokens, weight], "product")
