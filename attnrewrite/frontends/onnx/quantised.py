"""ONNX operators that round to integers of a scale, as torch functions. Integers are whole numbers in float32.

Rounding has the gradient of the identity within its range, so that what stands before it can be trained. Each reads a
buffer called `step_name` of it, by which it is found again in any graph that is captured from the module.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import Node

from attnrewrite.frontends.onnx.call import Call, Translation, torch_dtype
from attnrewrite.passes.roundings import step_name

# ONNX's integers that are read as whole numbers in float32
INTEGERS = {each.value: each for each in (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)}
_MOST = 255.0  # DynamicQuantizeLinear's largest integer; the least is 0


def _output(call: Call) -> str:
    return str(call.node.outputs[0].name)


def _along_axis(call: Call, place: int) -> np.ndarray:
    """A scale or zero point by channel in the shape that the tensor beside it broadcasts with."""
    numbers = call.numbers(place)
    if call.attribute("block_size", 0):
        raise call.unsupported("it has a scale for each block")
    if numbers.size == 1:
        return numbers.reshape(())
    sizes = [1] * len(call.shape(0))
    sizes[call.axis(1)] = numbers.size
    return numbers.reshape(sizes)


def _zero(call: Call) -> int:
    numbers = np.unique(call.numbers(2)) if call.has(2) else np.zeros(1, np.int64)
    if numbers.size > 1:
        raise call.unsupported("its zero points differ")
    return int(numbers[0])


def _quantize(call: Call) -> Node:
    kind = INTEGERS.get(call.importer.view.dtype(_output(call)))
    if kind is None:
        raise call.unsupported(
            "its integers are of four bits, or floating-point numbers; give the model before quantization, or with "
            "integers of one byte or two"
        )
    bounds, zero = np.iinfo(kind.numpy()), _zero(call)
    step = call.importer.buffer(_along_axis(call, 1).astype(np.float32), step_name(_output(call)))
    steps = call.emit(torch.div, call.operand(0), step)
    rounded = _round(call, call.emit(torch.clamp, steps, float(bounds.min) - zero, float(bounds.max) - zero))
    return call.emit(torch.add, rounded, zero) if zero else rounded


def _round(call: Call, steps: Node) -> Node:
    """steps + (round(steps) - steps), which is exact: both differences are floating-point numbers."""
    off = call.emit(torch.sub, call.emit(torch.round, steps), steps)
    return call.emit(torch.add, steps, call.emit(Tensor.detach, off))


def _dequantize(call: Call) -> Node:
    wanted = torch_dtype(call.importer.view.dtype(_output(call)))
    numbers = call.emit(Tensor.to, call.operand(0), wanted)
    known = call.importer.is_constant
    if call.has(2) and not known(call.name(2)):
        numbers = call.emit(torch.sub, numbers, call.operand(2))
    elif zero := _zero(call):
        numbers = call.emit(torch.add, numbers, -zero)
    if not known(call.name(1)):
        return call.emit(torch.mul, numbers, call.operand(1))
    unit = call.importer.buffer(_along_axis(call, 1), f"{_output(call)}/unit")
    return call.emit(torch.mul, numbers, unit)


def _dynamic_quantize(call: Call) -> list[Any]:
    """Integers from 0 to 255, their scale and zero point, by the least and the largest number of the whole tensor."""
    x = call.operand(0)
    none = call.importer.buffer(np.zeros((), np.float32), step_name(_output(call)))
    top = call.emit(torch.maximum, call.emit(torch.amax, x), none)
    bottom = call.emit(torch.minimum, call.emit(torch.amin, x), none)
    span = call.emit(torch.sub, top, bottom)
    empty = call.emit(Tensor.to, call.emit(torch.eq, span, 0.0), torch.float32)  # a scale of one, where all are zero
    scale = call.emit(torch.add, call.emit(torch.div, span, _MOST), empty)
    shift = call.emit(torch.neg, call.emit(torch.div, bottom, scale))
    zero = call.emit(torch.round, call.emit(torch.clamp, shift, 0.0, _MOST))
    rounded = _round(call, call.emit(torch.div, x, scale))
    return [call.emit(torch.clamp, call.emit(torch.add, rounded, zero), 0.0, _MOST), scale, zero]


QUANTISED: dict[str, Translation] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
}
