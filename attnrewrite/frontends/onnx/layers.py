"""ONNX operators as torch functions: products, convolutions, normalisation, pooling, attention."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from attnrewrite.frontends.onnx.call import Call


def _gemm(call: Call) -> Node:
    left, right = call.operand(0), call.operand(1)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left = call.emit(torch.permute, left, [1, 0]) if call.attribute("transA", 0) else left
    if call.attribute("transB", 0) and alpha == beta == 1.0 and (not call.has(2) or len(call.shape(2)) == 1):
        return call.emit(F.linear, left, right, call.operand(2))
    right = call.emit(torch.permute, right, [1, 0]) if call.attribute("transB", 0) else right
    product = call.emit(torch.matmul, left, right)
    product = product if alpha == 1.0 else call.emit(torch.mul, product, alpha)
    if not call.has(2):
        return product
    added = call.operand(2) if beta == 1.0 else call.emit(torch.mul, call.operand(2), beta)
    return call.emit(torch.add, product, added)


def _pads(call: Call, kernel: list[int]) -> tuple[list[int], list[int]]:
    """(padding before, padding after) of each spatial axis."""
    rank = len(kernel)
    stride = list(call.attribute("strides", [1] * rank))
    dilation = list(call.attribute("dilations", [1] * rank))
    how = call.attribute("auto_pad", "NOTSET")
    if how in ("NOTSET", "VALID"):
        given = list(call.attribute("pads", [0] * (2 * rank))) if how == "NOTSET" else [0] * (2 * rank)
        return given[:rank], given[rank:]
    before, after = [], []
    for axis in range(rank):
        length = call.shape(0)[2 + axis]
        wanted = (
            (math.ceil(length / stride[axis]) - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1 - length
        )
        small, large = max(wanted, 0) // 2, max(wanted, 0) - max(wanted, 0) // 2
        before.append(small if how == "SAME_UPPER" else large)
        after.append(large if how == "SAME_UPPER" else small)
    return before, after


def _padded(call: Call, before: list[int], after: list[int], value: float = 0.0) -> tuple[Node, list[int]]:
    """The operand and the padding that the operator itself still has to do: what is uneven is done before."""
    if before == after:
        return call.operand(0), before
    flat = [amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair]
    return call.emit(F.pad, call.operand(0), flat, "constant", value), [0] * len(before)


def _conv(call: Call) -> Node:
    kernel = list(call.shape(1)[2:])
    rank = len(kernel)
    if rank not in (1, 2, 3):
        raise call.unsupported(f"it has {rank} spatial axes")
    value, padding = _padded(call, *_pads(call, kernel))
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    strides, dilations = list(call.attribute("strides", [1] * rank)), list(call.attribute("dilations", [1] * rank))
    return call.emit(
        function, value, call.operand(1), call.operand(2), strides, padding, dilations, call.attribute("group", 1)
    )


def _conv_transpose(call: Call) -> Node:
    rank = len(call.shape(1)) - 2
    before, after = _pads(call, list(call.shape(1)[2:]))
    if before != after or call.attribute("auto_pad", "NOTSET") != "NOTSET" or rank not in (1, 2, 3):
        raise call.unsupported("its padding is uneven")
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    strides, dilations = list(call.attribute("strides", [1] * rank)), list(call.attribute("dilations", [1] * rank))
    extra = list(call.attribute("output_padding", [0] * rank))
    return call.emit(
        function,
        call.operand(0),
        call.operand(1),
        call.operand(2),
        strides,
        before,
        extra,
        call.attribute("group", 1),
        dilations,
    )


def _max_pool(call: Call) -> Node:
    kernel = list(call.attribute("kernel_shape"))
    rank = len(kernel)
    value, padding = _padded(call, *_pads(call, kernel), value=-math.inf)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    strides, dilations = list(call.attribute("strides", [1] * rank)), list(call.attribute("dilations", [1] * rank))
    return call.emit(function, value, kernel, strides, padding, dilations, bool(call.attribute("ceil_mode", 0)))


def _average_pool(call: Call) -> Node:
    kernel = list(call.attribute("kernel_shape"))
    rank = len(kernel)
    before, after = _pads(call, kernel)
    if before != after and not call.attribute("count_include_pad", 0):
        raise call.unsupported("its padding is uneven and not counted")
    if set(call.attribute("dilations", [1])) != {1} or rank not in (1, 2, 3):
        raise call.unsupported("it is dilated")
    value, padding = _padded(call, before, after)
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    strides = list(call.attribute("strides", [1] * rank))
    counted = bool(call.attribute("count_include_pad", 0))
    return call.emit(function, value, kernel, strides, padding, bool(call.attribute("ceil_mode", 0)), counted)


def _global_pool(function: Callable[..., Any]) -> Callable[[Call], Node]:
    def translate(call: Call) -> Node:
        return call.emit(function, call.operand(0), list(range(2, len(call.shape(0)))), keepdim=True)

    return translate


def _batch_norm(call: Call) -> Node:
    value, weight, bias, mean, variance = call.operands()
    return call.emit(F.batch_norm, value, mean, variance, weight, bias, False, 0.0, call.attribute("epsilon", 1e-5))


def _layer_norm(call: Call) -> Node:
    axis = call.axis(-1)
    shape = list(call.shape(0)[axis:])
    return call.emit(
        F.layer_norm, call.operand(0), shape, call.operand(1), call.operand(2), call.attribute("epsilon", 1e-5)
    )


def _rms_norm(call: Call) -> Node:
    axis = call.axis(-1)
    return call.emit(
        F.rms_norm, call.operand(0), list(call.shape(0)[axis:]), call.operand(1), call.attribute("epsilon", 1e-5)
    )


def _instance_norm(call: Call) -> Node:
    value, weight, bias = call.operands()
    return call.emit(F.instance_norm, value, None, None, weight, bias, True, 0.0, call.attribute("epsilon", 1e-5))


def _group_norm(call: Call) -> Node:
    if call.opset < 21:
        raise call.unsupported("its weights are per group")
    value, weight, bias = call.operands()
    return call.emit(F.group_norm, value, call.attribute("num_groups"), weight, bias, call.attribute("epsilon", 1e-5))


def _resize(call: Call) -> Node:
    """Interpolation to the known size of the result, of pictures that lie channels first, or last: onnxruntime moves
    transpositions past it.
    """
    sizes = call.shape(0), call.result()
    if sizes[0][1:2] == sizes[1][1:2] or sizes[0][-1] != sizes[1][-1]:
        return _interpolated(call, call.operand(0), *sizes)
    before, after = ((size[0], size[-1], *size[1:-1]) for size in sizes)
    pictures = call.emit(torch.movedim, call.operand(0), -1, 1)
    return call.emit(torch.movedim, _interpolated(call, pictures, before, after), 1, -1)


def _interpolated(call: Call, pictures: Node | None, before: tuple[int, ...], after: tuple[int, ...]) -> Node:
    mode = call.attribute("mode", "nearest")
    spatial, rank = list(after[2:]), len(before)
    modes = {"nearest": "nearest", "linear": {3: "linear", 4: "bilinear", 5: "trilinear"}.get(rank), "cubic": "bicubic"}
    how = call.attribute("coordinate_transformation_mode", "half_pixel")
    if modes.get(mode) is None or after[:2] != before[:2] or call.attribute("antialias", 0):
        raise call.unsupported(f"mode {mode} over {rank} axes")
    if mode == "nearest":
        floors = call.attribute("nearest_mode", "round_prefer_floor") == "floor" and how == "asymmetric"
        whole = all(new % old == 0 for new, old in zip(spatial, before[2:], strict=True))
        if not floors and not whole:
            raise call.unsupported(f"nearest with coordinates {how}")
        return call.emit(F.interpolate, pictures, spatial, mode="nearest")
    if how not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise call.unsupported(f"coordinates {how}")
    if mode == "cubic" and abs(call.attribute("cubic_coeff_a", -0.75) + 0.75) > 1e-6:
        raise call.unsupported("another cubic kernel than torch's")
    return call.emit(F.interpolate, pictures, spatial, mode=modes[mode], align_corners=how == "align_corners")


def _grid_sample(call: Call) -> Node:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(given := call.attribute("mode", "linear"), given)
    if mode == "bicubic" and len(call.shape(0)) != 4:
        raise call.unsupported(f"mode {given} over {len(call.shape(0))} axes")
    return call.emit(
        F.grid_sample, call.operand(0), call.operand(1), mode=mode,
        padding_mode=call.attribute("padding_mode", "zeros"), align_corners=bool(call.attribute("align_corners", 0)),
    )  # fmt: skip


def _attention(call: Call) -> Node:
    query, key, value = (call.operand(place) for place in range(3))
    shared = call.shape(0)[1] != call.shape(1)[1]
    return call.emit(
        F.scaled_dot_product_attention, query, key, value, call.operand(3),
        is_causal=bool(call.attribute("causal", 0)), scale=call.attribute("scale"), enable_gqa=shared,
    )  # fmt: skip


def _skip_layer_norm(call: Call) -> list[Node | None]:
    """The norm of a sum, and the sum; its mean and deviation, which lie between, are given out in training only."""
    total = call.emit(torch.add, call.operand(0), call.operand(1))
    total = call.emit(torch.add, total, call.operand(4)) if call.has(4) else total
    width, epsilon = [call.shape(0)[-1]], call.attribute("epsilon", 1e-5)
    return [call.emit(F.layer_norm, total, width, call.operand(2), call.operand(3), epsilon), None, None, total]


LAYERS: dict[str, Callable[[Call], Any]] = {
    "MatMul": lambda call: call.emit(torch.matmul, *call.operands()),
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_pool(torch.mean),
    "GlobalMaxPool": _global_pool(torch.amax),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "Resize": _resize,
    "GridSample": _grid_sample,
    "Attention": _attention,
}
