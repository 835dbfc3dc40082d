"""The operators of Core ML's intermediate language (MIL) that compute, in torch.

Each function takes an operator's inputs as MIL names them: tensors as torch tensors (constants too, numbers as tensors
of rank 0), texts as str, lists of tensors as lists; inputs that MIL leaves out are absent. Source: the operators'
reference in coremltools.converters.mil.mil.ops.defs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "uint16": torch.int32,
    "int32": torch.int32,
    "bool": torch.bool,
    "string": torch.int64,  # a label, by its place among the classes
    "dict": torch.float32,  # what each label has, in their order
}

_UNARY = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floor": torch.floor,
    "logical_not": torch.logical_not,
    "relu": torch.relu,
    "relu6": F.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}

_BINARY = {
    "add": torch.add,
    "equal": torch.eq,
    "floor_div": torch.floor_divide,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mod": torch.remainder,
    "mul": torch.mul,
    "not_equal": torch.ne,
    "pow": torch.pow,
    "real_div": torch.true_divide,
    "sub": torch.sub,
}

_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "reduce_l1_norm": lambda x, axes, keep: x.abs().sum(axes, keep),
    "reduce_l2_norm": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "reduce_log_sum_exp": lambda x, axes, keep: x.logsumexp(axes, keep),
    "reduce_max": lambda x, axes, keep: x.amax(axes, keep),
    "reduce_mean": lambda x, axes, keep: x.mean(axes, keep),
    "reduce_min": lambda x, axes, keep: x.amin(axes, keep),
    "reduce_prod": lambda x, axes, keep: _product(x, axes, keep),
    "reduce_sum": lambda x, axes, keep: x.sum(axes, keep),
    "reduce_sum_square": lambda x, axes, keep: x.square().sum(axes, keep),
}

ELEMENTWISE = (
    *_UNARY,
    *_BINARY,
    "clip",
    "elu",
    "gelu",
    "inverse",
    "leaky_relu",
    "linear_activation",
    "log",
    "rsqrt",
    "sigmoid_hard",
    "threshold",
    "thresholded_relu",
)
REDUCTIONS = tuple(_REDUCTIONS)


def _axes(axes: Tensor | None, x: Tensor) -> list[int]:
    return list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes.tolist()]


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep)
    return x


# Activations


def clip(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return x.clamp(alpha, beta)


def elu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.elu(x, float(alpha))


def gelu(x: Tensor, mode: str) -> Tensor:
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def inverse(x: Tensor, epsilon: Tensor) -> Tensor:
    return 1 / (x + epsilon)


def leaky_relu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.leaky_relu(x, float(alpha))


def linear_activation(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return alpha * x + beta


def log(x: Tensor, epsilon: Tensor) -> Tensor:
    return torch.log(x + epsilon)


def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.prelu(x, alpha)


def rsqrt(x: Tensor, epsilon: Tensor) -> Tensor:
    return torch.rsqrt(x + epsilon)


def sigmoid_hard(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def threshold(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.maximum(x, alpha)


def thresholded_relu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x >= alpha, x, 0)


def reduce_argmax(x: Tensor, axis: Tensor, keep_dims: Tensor, output_dtype: str | None = None) -> Tensor:
    return x.argmax(int(axis), bool(keep_dims))


def reduce_argmin(x: Tensor, axis: Tensor, keep_dims: Tensor, output_dtype: str | None = None) -> Tensor:
    return x.argmin(int(axis), bool(keep_dims))


def softmax(x: Tensor, axis: Tensor) -> Tensor:
    return torch.softmax(x, int(axis))


def cast(x: Tensor, dtype: str) -> Tensor:
    # Rounding to float16 is the interpreter's, which does it wherever an output is declared so.
    kept = x.is_floating_point() and DTYPES[dtype].is_floating_point
    return x if kept else x.to(torch.float32 if DTYPES[dtype].is_floating_point else DTYPES[dtype])


# Products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def matmul(x: Tensor, y: Tensor, transpose_x: Tensor, transpose_y: Tensor) -> Tensor:
    x = x.transpose(-1, -2) if bool(transpose_x) else x
    return x @ (y.transpose(-1, -2) if bool(transpose_y) else y)


def einsum(values: list[Tensor], equation: str) -> Tensor:
    return torch.einsum(equation, *values)


def conv(
    x: Tensor,
    weight: Tensor,
    strides: Tensor,
    pad_type: str,
    dilations: Tensor,
    groups: Tensor,
    pad: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    window = weight.shape[2:]
    x = F.pad(x, _padding(x, pad_type, pad, window, strides, dilations))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(window) - 1]
    return convolve(x, weight, bias, strides.tolist(), 0, dilations.tolist(), int(groups))


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    strides: Tensor,
    pad_type: str,
    dilations: Tensor,
    groups: Tensor,
    pad: Tensor | None = None,
    bias: Tensor | None = None,
    output_shape: Tensor | None = None,
) -> Tensor:
    window = weight.shape[2:]
    spread = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(window) - 1]
    whole = spread(x, weight, bias, strides.tolist(), 0, 0, int(groups), dilations.tolist())
    before = [0] * len(window) if pad is None or pad_type != "custom" else pad.tolist()[::2]
    after = [0] * len(window) if pad is None or pad_type != "custom" else pad.tolist()[1::2]
    for axis, (first, last) in enumerate(zip(before, after, strict=True), start=2):
        size = whole.shape[axis] - first - last if output_shape is None else int(output_shape[axis])
        whole = F.pad(whole.movedim(axis, -1), (0, max(first + size - whole.shape[axis], 0))).movedim(-1, axis)
        whole = whole.narrow(axis, first, size)
    return whole


def avg_pool(
    x: Tensor,
    kernel_sizes: Tensor,
    strides: Tensor,
    pad_type: str,
    exclude_padding_from_average: Tensor,
    ceil_mode: Tensor,
    pad: Tensor | None = None,
) -> Tensor:
    window = kernel_sizes.tolist()
    padding = _padding(x, pad_type, pad, window, strides, torch.ones_like(kernel_sizes))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(window) - 1]
    mean = pool(F.pad(x, padding), window, strides.tolist(), ceil_mode=bool(ceil_mode))
    if not bool(exclude_padding_from_average):
        return mean
    share = pool(F.pad(torch.ones_like(x), padding), window, strides.tolist(), ceil_mode=bool(ceil_mode))
    return mean / share


def max_pool(
    x: Tensor, kernel_sizes: Tensor, strides: Tensor, pad_type: str, ceil_mode: Tensor, pad: Tensor | None = None
) -> Tensor:
    window = kernel_sizes.tolist()
    padding = _padding(x, pad_type, pad, window, strides, torch.ones_like(kernel_sizes))
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(window) - 1]
    return pool(F.pad(x, padding, value=-torch.inf), window, strides.tolist(), ceil_mode=bool(ceil_mode))


def _padding(
    x: Tensor, pad_type: str, pad: Tensor | None, window: Any, strides: Tensor, dilations: Tensor
) -> list[int]:
    """The padding of a sliding window as F.pad wants it: pairs, the last axis first."""
    pairs = []
    for axis, (size, stride, dilation) in enumerate(zip(window, strides.tolist(), dilations.tolist(), strict=True)):
        if pad_type == "custom":
            assert pad is not None
            pairs.append((int(pad[2 * axis]), int(pad[2 * axis + 1])))
            continue
        length = x.shape[2 + axis]
        total = max((-(-length // stride) - 1) * stride + (size - 1) * dilation + 1 - length, 0)
        before = {"valid": 0, "same": total // 2, "same_lower": total - total // 2}[pad_type]
        pairs.append((before, 0 if pad_type == "valid" else total - before))
    return [amount for pair in reversed(pairs) for amount in pair]


# Normalisation


def layer_norm(
    x: Tensor, epsilon: Tensor, axes: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None
) -> Tensor:
    dims = _axes(axes, x)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    shape = [size if axis in dims else 1 for axis, size in enumerate(x.shape)]
    result = (x - mean) * torch.rsqrt(variance + epsilon)
    result = result if gamma is None else result * gamma.reshape(shape)
    return result if beta is None else result + beta.reshape(shape)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
) -> Tensor:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))


def instance_norm(x: Tensor, epsilon: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    return F.instance_norm(x, weight=gamma, bias=beta, eps=float(epsilon))


_FUNCTIONS = (
    clip,
    elu,
    gelu,
    inverse,
    leaky_relu,
    linear_activation,
    log,
    prelu,
    rsqrt,
    sigmoid_hard,
    threshold,
    thresholded_relu,
    reduce_argmax,
    reduce_argmin,
    softmax,
    cast,
    linear,
    matmul,
    einsum,
    conv,
    conv_transpose,
    avg_pool,
    max_pool,
    layer_norm,
    batch_norm,
    instance_norm,
)

OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: lambda x, f=function: f(x) for name, function in _UNARY.items()},
    **{name: lambda x, y, f=function: f(x, y) for name, function in _BINARY.items()},
    **{
        name: lambda x, keep_dims, axes=None, f=function: f(x, _axes(axes, x), bool(keep_dims))
        for name, function in _REDUCTIONS.items()
    },
    **{function.__name__: function for function in _FUNCTIONS},
}
