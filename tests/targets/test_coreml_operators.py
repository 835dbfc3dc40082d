"""Each operator of the interpreter on drawn shapes, against torch; programs are built directly, without conversion."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.targets.coreml import interpreter

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402

# Of x [a, b, c, d], values in about -3 to 3, and y of the same shape: what MIL computes, and what torch does.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs, "ceil": torch.ceil, "cos": torch.cos, "erf": torch.erf, "exp": torch.exp, "floor": torch.floor,
    "relu": F.relu, "relu6": F.relu6, "round": torch.round, "sigmoid": torch.sigmoid, "sign": torch.sign,
    "silu": F.silu, "sin": torch.sin, "softplus": F.softplus, "square": torch.square, "tanh": torch.tanh,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "floor_div": torch.floor_divide, "mod": torch.remainder,
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "equal": torch.eq, "greater": torch.gt, "greater_equal": torch.ge, "less": torch.lt, "less_equal": torch.le,
    "not_equal": torch.ne,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "reduce_sum": torch.sum, "reduce_mean": torch.mean, "reduce_max": torch.amax, "reduce_min": torch.amin,
    "reduce_log_sum_exp": torch.logsumexp,
    "reduce_l2_norm": lambda x, dims, keepdim: torch.linalg.vector_norm(x, 2, dims, keepdim),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "clip": (lambda x: mb.clip(x=x, alpha=-0.5, beta=0.7), lambda x: x.clamp(-0.5, 0.7)),
    "elu": (lambda x: mb.elu(x=x, alpha=0.7), lambda x: F.elu(x, 0.7)),
    "gelu": (lambda x: mb.gelu(x=x, mode="EXACT"), F.gelu),
    "gelu by tanh": (
        lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"), lambda x: F.gelu(x, approximate="tanh")
    ),
    "leaky_relu": (lambda x: mb.leaky_relu(x=x, alpha=0.2), lambda x: F.leaky_relu(x, 0.2)),
    "log": (lambda x: mb.log(x=mb.square(x=x), epsilon=1e-3), lambda x: torch.log(x * x + 1e-3)),
    "rsqrt": (lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=1e-3), lambda x: (x * x + 1e-3) ** -0.5),
    "sqrt": (lambda x: mb.sqrt(x=mb.abs(x=x)), lambda x: x.abs().sqrt()),
    "sigmoid_hard": (lambda x: mb.sigmoid_hard(x=x, alpha=1 / 6, beta=0.5), F.hardsigmoid),
    "softmax": (lambda x: mb.softmax(x=x, axis=1), lambda x: x.softmax(1)),
    "layer_norm": (
        lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=1e-3), lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3)
    ),
    "layer_norm over channels": (
        lambda x: mb.layer_norm(x=x, axes=[1], epsilon=1e-3),
        lambda x: F.layer_norm(x.movedim(1, -1), x.shape[1:2], eps=1e-3).movedim(-1, 1),
    ),
    "instance_norm": (lambda x: mb.instance_norm(x=x, epsilon=1e-2), lambda x: F.instance_norm(x, eps=1e-2)),
    "matmul": (lambda x: mb.matmul(x=x, y=x, transpose_y=True), lambda x: x @ x.mT),
    "matmul from the left": (lambda x: mb.matmul(x=x, y=x, transpose_x=True), lambda x: x.mT @ x),
    "einsum": (
        lambda x: mb.einsum(values=(x, mb.transpose(x=x, perm=[0, 3, 2, 1])), equation="nchw,nwhu->nchu"),
        lambda x: torch.einsum("nchw,nwhu->nchu", x, x.permute(0, 3, 2, 1)),
    ),
    "transpose": (lambda x: mb.transpose(x=x, perm=[2, 0, 3, 1]), lambda x: x.permute(2, 0, 3, 1)),
    "reshape": (lambda x: mb.reshape(x=x, shape=[0, -1]), lambda x: x.flatten(1)),
    "expand_dims": (lambda x: mb.expand_dims(x=x, axes=[2]), lambda x: x.unsqueeze(2)),
    "concat": (lambda x: mb.concat(values=[x, x], axis=2), lambda x: torch.cat([x, x], 2)),
    "stack": (lambda x: mb.stack(values=[x, x], axis=1), lambda x: torch.stack([x, x], 1)),
    "reverse": (lambda x: mb.reverse(x=x, axes=[3]), lambda x: x.flip(3)),
    "tile": (lambda x: mb.tile(x=x, reps=[1, 2, 1, 3]), lambda x: x.repeat(1, 2, 1, 3)),
    "pad": (
        lambda x: mb.pad(x=x, pad=[0, 0, 0, 0, 1, 2, 3, 0], mode="constant", constant_val=0.5),
        lambda x: F.pad(x, (3, 0, 1, 2), value=0.5),
    ),
    "slice_by_index": (
        lambda x: mb.slice_by_index(x=x, begin=[0, 0, 0, 1], end=[0] * 4, end_mask=[True] * 4, stride=[1, 1, 1, 2]),
        lambda x: x[..., 1::2],
    ),
    "gather": (lambda x: mb.gather(x=x, indices=np.int32([1, 0, 1]), axis=3), lambda x: x[..., [1, 0, 1]]),
    "max_pool": (
        lambda x: mb.max_pool(x=x, kernel_sizes=[2, 2], strides=[1, 2], pad_type="valid"),
        lambda x: F.max_pool2d(x, 2, (1, 2)),
    ),
    "avg_pool": (
        lambda x: mb.avg_pool(
            x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1],
            exclude_padding_from_average=True,
        ),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
}  # fmt: skip


def interpreted(build: Callable[[Any], Any], x: Tensor) -> Tensor:
    specs = [mb.TensorSpec(shape=tuple(x.shape))]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: build(x))
    (value,) = interpreter.interpret(program, {"x": x}).outputs.values()
    return value


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """[a, b, c, d]: normal numbers, and some of them whole."""
    shape = [draw(st.integers(1, 4)) for _ in range(2)] + [draw(st.integers(2, 6)) for _ in range(2)]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return x.round() if draw(st.booleans()) else x


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-6, atol=2e-6)


few = settings(max_examples=5, deadline=None)


@pytest.mark.parametrize("name", UNARY)
@few
@given(x=tensors())
def test_functions_of_one(name: str, x: Tensor) -> None:
    same(interpreted(lambda v: getattr(mb, name)(x=v), x), UNARY[name](x))


@pytest.mark.parametrize("name", BINARY | COMPARISONS)
@few
@given(x=tensors(), axis=st.integers(0, 3))
def test_functions_of_two_that_broadcast(name: str, x: Tensor, axis: int) -> None:
    y = x.flip(axis).narrow(axis, 0, 1) + 0.25
    expected = (BINARY | COMPARISONS)[name](x, y)
    if name in COMPARISONS:
        found = interpreted(lambda v: mb.cast(x=getattr(mb, name)(x=v, y=y.numpy()), dtype="fp32"), x)
    else:
        found = interpreted(lambda v: getattr(mb, name)(x=v, y=y.numpy()), x)
    same(found, expected)


@pytest.mark.parametrize("name", REDUCTIONS)
@few
@given(x=tensors(), axes=st.sets(st.integers(-4, -1), min_size=1, max_size=2), keep=st.booleans())
def test_reductions(name: str, x: Tensor, axes: set[int], keep: bool) -> None:
    along = sorted(axes)
    same(
        interpreted(lambda v: getattr(mb, name)(x=v, axes=along, keep_dims=keep), x),
        REDUCTIONS[name](x, along, keepdim=keep),
    )


@pytest.mark.parametrize("name", OTHERS)
@few
@given(x=tensors())
def test_the_others(name: str, x: Tensor) -> None:
    build, expected = OTHERS[name]
    same(interpreted(build, x), expected(x))


@few
@given(
    groups=st.integers(1, 2), kernel=st.integers(1, 3), stride=st.integers(1, 2), dilation=st.integers(1, 2),
    size=st.integers(5, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolutions(groups: int, kernel: int, stride: int, dilation: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, size, size + 1, generator=random)
    weight = torch.randn(6, 4 // groups, kernel, kernel, generator=random)
    found = interpreted(
        lambda v: mb.conv(
            x=v, weight=weight.numpy(), strides=[stride] * 2, dilations=[dilation] * 2, groups=groups,
            pad_type="custom", pad=[1, 0, 2, 1],
        ),
        x,
    )  # fmt: skip
    torch.testing.assert_close(
        found, F.conv2d(F.pad(x, (2, 1, 1, 0)), weight, None, stride, 0, dilation, groups), rtol=1e-5, atol=1e-5
    )


def test_an_unknown_operator_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="holds operator 'cumsum'"):
        interpreted(lambda v: mb.cumsum(x=v, axis=0), torch.ones(2, 2))
