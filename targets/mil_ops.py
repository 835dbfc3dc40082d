"""The operators of Core ML's intermediate language (MIL) in torch, by their names and parameters there.

Each function takes an operator's inputs as MIL names them: tensors as torch tensors (constants too, numbers as tensors
of rank 0), texts as str, lists of tensors as lists; inputs that MIL leaves out are absent. Source: the operators'
reference in coremltools.converters.mil.mil.ops.defs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATORS: dict[str, Callable[..., Any]] = {}

DTYPES = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "uint16": torch.int32,
    "int32": torch.int32,
    "bool": torch.bool,
}

_UNARY = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "identity": lambda x: x,
    "logical_not": torch.logical_not,
    "relu": torch.relu,
    "relu6": F.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sqrt": torch.sqrt,
    "square": torch.square,
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
    "reduce_sum": lambda x, axes, keep: x.sum(axes, keep),
    "reduce_sum_square": lambda x, axes, keep: x.square().sum(axes, keep),
}

for _name, _unary in _UNARY.items():
    OPERATORS[_name] = lambda x, f=_unary: f(x)
for _name, _binary in _BINARY.items():
    OPERATORS[_name] = lambda x, y, f=_binary: f(x, y)
for _name, _reduce in _REDUCTIONS.items():
    OPERATORS[_name] = lambda x, keep_dims, axes=None, f=_reduce: f(x, _axes(axes, x), bool(keep_dims))


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a function into OPERATORS under its own name."""
    OPERATORS[function.__name__] = function
    return function


def _axes(axes: Tensor | None, x: Tensor) -> list[int]:
    return list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes.tolist()]


# Activations


@operator
def clip(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return x.clamp(alpha, beta)


@operator
def elu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.elu(x, float(alpha))


@operator
def gelu(x: Tensor, mode: str) -> Tensor:
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


@operator
def inverse(x: Tensor, epsilon: Tensor) -> Tensor:
    return 1 / (x + epsilon)


@operator
def leaky_relu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.leaky_relu(x, float(alpha))


@operator
def log(x: Tensor, epsilon: Tensor) -> Tensor:
    return torch.log(x + epsilon)


@operator
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.prelu(x, alpha)


@operator
def rsqrt(x: Tensor, epsilon: Tensor) -> Tensor:
    return torch.rsqrt(x + epsilon)


@operator
def sigmoid_hard(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


@operator
def softmax(x: Tensor, axis: Tensor) -> Tensor:
    return torch.softmax(x, int(axis))


@operator
def cast(x: Tensor, dtype: str) -> Tensor:
    # Rounding to float16 is the interpreter's, which does it wherever an output is declared so.
    kept = x.is_floating_point() and DTYPES[dtype].is_floating_point
    return x if kept else x.to(torch.float32 if DTYPES[dtype].is_floating_point else DTYPES[dtype])


# Products


@operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@operator
def matmul(x: Tensor, y: Tensor, transpose_x: Tensor, transpose_y: Tensor) -> Tensor:
    x = x.transpose(-1, -2) if bool(transpose_x) else x
    return x @ (y.transpose(-1, -2) if bool(transpose_y) else y)


@operator
def einsum(values: list[Tensor], equation: str) -> Tensor:
    return torch.einsum(equation, *values)


@operator
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask)


@operator
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


@operator
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


@operator
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


@operator
def layer_norm(
    x: Tensor, epsilon: Tensor, axes: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None
) -> Tensor:
    dims = _axes(axes, x)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    shape = [size if axis in dims else 1 for axis, size in enumerate(x.shape)]
    result = (x - mean) * torch.rsqrt(variance + epsilon)
    result = result if gamma is None else result * gamma.reshape(shape)
    return result if beta is None else result + beta.reshape(shape)


@operator
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
) -> Tensor:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))


@operator
def instance_norm(x: Tensor, epsilon: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    return F.instance_norm(x, weight=gamma, bias=beta, eps=float(epsilon))


@operator
def l2_norm(x: Tensor, epsilon: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum((-3, -2, -1), keepdim=True) + epsilon)


# Movement of data


@operator
def reshape(x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape.tolist())])


@operator
def transpose(x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(perm.tolist())


@operator
def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(axes.tolist())


@operator
def expand_dims(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


@operator
def concat(values: list[Tensor], axis: Tensor, interleave: Tensor) -> Tensor:
    if bool(interleave):
        return torch.stack(values, int(axis) + 1).flatten(int(axis), int(axis) + 1)
    return torch.cat(values, int(axis))


@operator
def stack(values: list[Tensor], axis: Tensor) -> Tensor:
    return torch.stack(values, int(axis))


@operator
def split(x: Tensor, axis: Tensor, num_splits: Tensor | None = None, split_sizes: Tensor | None = None) -> Any:
    if split_sizes is not None:
        return x.split(split_sizes.tolist(), int(axis))
    assert num_splits is not None
    return x.chunk(int(num_splits), int(axis))


@operator
def slice_by_index(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    stride: Tensor | None = None,
    begin_mask: Tensor | None = None,
    end_mask: Tensor | None = None,
    squeeze_mask: Tensor | None = None,
) -> Tensor:
    none = torch.zeros(x.dim(), dtype=torch.bool)
    begin_mask, end_mask, squeeze_mask = (
        none if mask is None else mask for mask in (begin_mask, end_mask, squeeze_mask)
    )
    steps = [1] * x.dim() if stride is None else stride.tolist()
    for axis, step in reversed(list(enumerate(steps))):
        first, last = int(begin[axis]), int(end[axis])
        if squeeze_mask[axis]:
            x = x.select(axis, first)
            continue
        indices = range(x.shape[axis])[None if begin_mask[axis] else first : None if end_mask[axis] else last : step]
        x = x.index_select(axis, torch.tensor(indices, dtype=torch.int64))
    return x


@operator
def slice_by_size(x: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    for axis, (first, length) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
        x = x.narrow(axis, first, x.shape[axis] - first if length == -1 else length)
    return x


@operator
def pad(x: Tensor, pad: Tensor, mode: str, constant_val: Tensor) -> Tensor:
    pairs = pad.reshape(-1, 2).flip(0).flatten().tolist()
    return F.pad(x, pairs, mode, float(constant_val)) if mode == "constant" else F.pad(x, pairs, mode)


@operator
def tile(x: Tensor, reps: Tensor) -> Tensor:
    return x.repeat(reps.tolist())


@operator
def gather(
    x: Tensor, indices: Tensor, axis: Tensor, batch_dims: Tensor, validate_indices: Tensor | None = None
) -> Tensor:
    assert int(batch_dims) == 0, "gather over batches"
    dim = int(axis) % x.dim()
    rows = x.index_select(dim, indices.long().reshape(-1) % x.shape[dim])
    return rows.reshape(x.shape[:dim] + indices.shape + x.shape[dim + 1 :])


@operator
def gather_along_axis(x: Tensor, indices: Tensor, axis: Tensor, validate_indices: Tensor | None = None) -> Tensor:
    return x.gather(int(axis), indices.long())


@operator
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond.bool(), a, b)


@operator
def fill(shape: Tensor, value: Tensor) -> Tensor:
    return value.expand(shape.tolist())


@operator
def fill_like(ref_tensor: Tensor, value: Tensor) -> Tensor:
    return value.expand(ref_tensor.shape)


@operator
def band_part(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    x = x.triu(-int(lower)) if int(lower) >= 0 else x
    return x.tril(int(upper)) if int(upper) >= 0 else x


@operator
def pixel_shuffle(x: Tensor, upscale_factor: Tensor) -> Tensor:
    return F.pixel_shuffle(x, int(upscale_factor))


@operator
def resize_nearest_neighbor(x: Tensor, target_size_height: Tensor, target_size_width: Tensor) -> Tensor:
    return F.interpolate(x, size=(int(target_size_height), int(target_size_width)), mode="nearest")


@operator
def upsample_nearest_neighbor(x: Tensor, scale_factor_height: Tensor, scale_factor_width: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=(float(scale_factor_height), float(scale_factor_width)), mode="nearest")


@operator
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: Tensor,
    scale_factor_width: Tensor,
    align_corners: Tensor,
    half_pixel_centers: Tensor | None = None,
) -> Tensor:
    factors = (float(scale_factor_height), float(scale_factor_width))
    return F.interpolate(x, scale_factor=factors, mode="bilinear", align_corners=bool(align_corners))
