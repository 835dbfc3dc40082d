"""ONNX operators as torch functions: elementwise and reductions."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from attnrewrite.frontends.onnx.call import Call, Translation, torch_dtype
from attnrewrite.patterns.onnx.gelu import gelu_argument


def _same(function: Callable[..., Any]) -> Translation:
    """Operators that take the same operands in torch."""
    return lambda call: call.emit(function, *call.operands())


def _folded(function: Callable[..., Any]) -> Translation:
    """Operators of any number of operands, as a chain of binary ones."""
    return lambda call: reduce(lambda left, right: call.emit(function, left, right), call.operands())


def divide(left: Tensor, right: Tensor) -> Tensor:
    """ONNX divides whole numbers towards zero."""
    return torch.div(left, right) if left.is_floating_point() else torch.div(left, right, rounding_mode="trunc")


def _multiply(call: Call) -> Node:
    """A product; the last one of a GELU that was taken apart is that GELU again, as what rewrites it should see it."""
    found = gelu_argument(call.node, {"": call.opset})
    if found is None:
        return call.emit(torch.mul, *call.operands())
    return call.emit(F.gelu, call.importer.operand(str(found[0].name), call), approximate=found[1])


def prelu(value: Tensor, slope: Tensor) -> Tensor:
    return torch.where(value < 0, value * slope, value)


def _cast(call: Call) -> Node:
    return call.emit(Tensor.to, call.operand(0), torch_dtype(call.attribute("to")))


def _clip(call: Call) -> Node:
    if call.opset < 11:
        return call.emit(torch.clamp, call.operand(0), call.attribute("min"), call.attribute("max"))
    low, high = (call.numbers(place).item() if call.has(place) else None for place in (1, 2))
    return call.emit(torch.clamp, call.operand(0), low, high)


def _gelu(call: Call) -> Node:
    approximate = call.attribute("approximate", "none")
    return call.emit(F.gelu, call.operand(0), approximate=approximate)


def _fast_gelu(call: Call) -> Node:
    value = call.emit(torch.add, *call.operands()) if call.has(1) else call.operand(0)
    return call.emit(F.gelu, value, approximate="tanh")


def _mod(call: Call) -> Node:
    return call.emit(torch.fmod if call.attribute("fmod", 0) else torch.remainder, *call.operands())


def _is_inf(call: Call) -> Node:
    return call.emit(torch.isinf, call.operand(0))


def _hard_sigmoid(call: Call) -> Node:
    slope, shift = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    scaled = call.emit(torch.mul, call.operand(0), slope)
    return call.emit(torch.clamp, call.emit(torch.add, scaled, shift), 0.0, 1.0)


def _swish(alpha: float) -> Translation:
    def translate(call: Call) -> Node:
        scaled = call.emit(torch.mul, call.operand(0), call.attribute("alpha", alpha))
        return call.emit(torch.mul, call.operand(0), call.emit(torch.sigmoid, scaled))

    return translate


def _softmax(function: Callable[..., Any]) -> Translation:
    def translate(call: Call) -> Node:
        default = -1 if call.opset >= 13 else 1
        axis = call.axis(default)
        if call.opset < 13 and axis != len(call.result()) - 1:
            raise call.unsupported("it runs over several axes")
        return call.emit(function, call.operand(0), axis)

    return translate


def _axes(call: Call) -> list[int]:
    given = call.whole_numbers(1) if call.has(1) else call.attribute("axes")
    return list(range(len(call.shape(0)))) if given is None else [int(axis) for axis in given]


def _reduced(function: Callable[..., Any]) -> Translation:
    def translate(call: Call) -> Node:
        if call.has(1) and not call.whole_numbers(1) and call.attribute("noop_with_empty_axes", 0):
            return call.operand(0)
        return call.emit(function, call.operand(0), _axes(call), keepdim=bool(call.attribute("keepdims", 1)))

    return translate


def norm1(value: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return value.abs().sum(dim, keepdim=keepdim)


def norm2(value: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.linalg.vector_norm(value, 2, dim, keepdim=keepdim)


def sum_of_squares(value: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return value.square().sum(dim, keepdim=keepdim)


def log_of_sum(value: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return value.sum(dim, keepdim=keepdim).log()


def product(value: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    for axis in sorted((axis % value.dim() for axis in dim), reverse=True):
        value = value.prod(axis, keepdim=keepdim)
    return value


def _arg(function: Callable[..., Any]) -> Translation:
    def translate(call: Call) -> Node:
        return call.emit(function, call.operand(0), call.axis(0), keepdim=bool(call.attribute("keepdims", 1)))

    return translate


def _top_k(call: Call) -> list[Node]:
    count = call.whole_numbers(1)[0] if call.has(1) else call.attribute("k")
    found = call.emit(torch.topk, call.operand(0), count, call.axis(-1), bool(call.attribute("largest", 1)))
    return [call.emit(operator.getitem, found, place) for place in (0, 1)]


def _cumsum(call: Call) -> Node:
    if call.attribute("exclusive", 0) or call.attribute("reverse", 0):
        raise call.unsupported("it is exclusive, or runs backwards")
    return call.emit(torch.cumsum, call.operand(0), call.whole_numbers(1)[0])


def _einsum(call: Call) -> Node:
    return call.emit(torch.einsum, call.attribute("equation"), *call.operands())


def _identity(call: Call) -> Node:
    return call.operand(0)


def _mean(call: Call) -> Node:
    return call.emit(torch.div, _folded(torch.add)(call), float(len(call.operands())))


def _selu(call: Call) -> Node:
    alpha, gamma = (
        call.attribute("alpha", 1.67326319217681884765625),
        call.attribute("gamma", 1.05070102214813232421875),
    )
    return call.emit(torch.mul, call.emit(F.elu, call.operand(0), alpha), gamma)


def _cast_like(call: Call) -> Node:
    return call.emit(Tensor.to, call.operand(0), torch_dtype(call.importer.view.dtype(call.name(1))))


def one_hot(indices: Tensor, depth: int, axis: int, off: float, on: float, dtype: torch.dtype) -> Tensor:
    """`on` along a new axis of `depth` at each index, which may count from the end; `off` elsewhere, and for others."""
    places = torch.arange(depth, device=indices.device)
    whole = indices.long()[..., None]
    found = (torch.where(whole < 0, whole + depth, whole) == places).movedim(-1, axis)
    return torch.where(found, on, off).to(dtype)


def _one_hot(call: Call) -> Node:
    (depth,), (off, on) = call.whole_numbers(1), call.numbers(2).tolist()
    dtype = torch_dtype(call.importer.view.dtype(call.name(2)))
    return call.emit(one_hot, call.operand(0), depth, call.attribute("axis", -1), off, on, dtype)


def _lp_norm(call: Call) -> Node:
    return call.emit(F.normalize, call.operand(0), p=float(call.attribute("p", 2)), dim=call.axis(-1), eps=1e-30)


_ALIKE: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Div": divide, "Pow": torch.pow, "Neg": torch.neg,
    "Abs": torch.abs, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal,
    "Erf": torch.erf, "Sin": torch.sin, "Cos": torch.cos, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
    "Relu": torch.relu, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign,
    "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish, "PRelu": prelu,
    "Where": torch.where, "Equal": torch.eq, "Less": torch.lt, "Greater": torch.gt, "LessOrEqual": torch.le,
    "GreaterOrEqual": torch.ge, "Not": torch.logical_not, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "IsNaN": torch.isnan, "BitwiseNot": torch.bitwise_not, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Tan": torch.tan, "Asin": torch.asin,
    "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh,
    "Acosh": torch.acosh, "Atanh": torch.atanh,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceL1": norm1, "ReduceL2": norm2, "ReduceSumSquare": sum_of_squares, "ReduceLogSumExp": torch.logsumexp,
    "ReduceLogSum": log_of_sum, "ReduceProd": product,
}  # fmt: skip
OPERATORS: dict[str, Translation] = {
    **{name: _same(function) for name, function in _ALIKE.items()},
    **{name: _reduced(function) for name, function in _REDUCTIONS.items()},
    "Elu": lambda call: call.emit(F.elu, call.operand(0), call.attribute("alpha", 1.0)),
    "Celu": lambda call: call.emit(F.celu, call.operand(0), call.attribute("alpha", 1.0)),
    "ThresholdedRelu": lambda call: call.emit(F.threshold, call.operand(0), call.attribute("alpha", 1.0), 0.0),
    "LeakyRelu": lambda call: call.emit(F.leaky_relu, call.operand(0), call.attribute("alpha", 0.01)),
    "QuickGelu": _swish(1.702), "Swish": _swish(1.0), "HardSigmoid": _hard_sigmoid,
    "Gelu": _gelu, "FastGelu": _fast_gelu,
    "Clip": _clip, "Cast": _cast, "Mod": _mod, "Identity": _identity, "Dropout": _identity, "IsInf": _is_inf,
    "Mul": _multiply, "Min": _folded(torch.minimum), "Max": _folded(torch.maximum), "Sum": _folded(torch.add),
    "Mean": _mean, "Selu": _selu, "CastLike": _cast_like, "OneHot": _one_hot,
    "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "Einsum": _einsum, "CumSum": _cumsum, "TopK": _top_k, "LpNormalization": _lp_norm,
    "ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin),
}  # fmt: skip
