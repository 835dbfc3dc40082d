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
    "abs": torch.abs, "atan": torch.atan, "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf,
    "exp": torch.exp, "exp2": torch.exp2, "floor": torch.floor, "sinh": torch.sinh, "softsign": F.softsign,
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
    "reduce_l1_norm": lambda x, dims, keepdim: x.abs().sum(dims, keepdim),
    "reduce_prod": lambda x, dims, keepdim: torch.tensor(np.prod(x.numpy(), tuple(dims), keepdims=keepdim)),
    "reduce_sum_square": lambda x, dims, keepdim: x.square().sum(dims, keepdim),
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
    "slice_by_size": (
        lambda x: mb.slice_by_size(x=x, begin=[0, 0, 1, 1], size=[-1, 1, 1, -1]), lambda x: x[:, :1, 1:2, 1:]
    ),
    "fill": (lambda x: mb.mul(x=x, y=mb.fill(shape=mb.shape(x=x), value=0.3)), lambda x: x * 0.3),
    "fill_like": (lambda x: mb.fill_like(ref_tensor=x, value=0.3), lambda x: torch.full_like(x, 0.3)),
    "identity": (lambda x: mb.identity(x=x), lambda x: x),
    "tangent": (lambda x: mb.tan(x=mb.tanh(x=x)), lambda x: torch.tan(x.tanh())),
    "arcs": (
        lambda x: mb.add(x=mb.asin(x=mb.tanh(x=x)), y=mb.acos(x=mb.erf(x=x))),
        lambda x: torch.asin(x.tanh()) + torch.acos(torch.erf(x)),
    ),
    "inverse": (lambda x: mb.inverse(x=mb.square(x=x), epsilon=0.1), lambda x: 1 / (x * x + 0.1)),
    "pixel_unshuffle": (
        lambda x: mb.pixel_unshuffle(x=mb.concat(values=[mb.concat(values=[x, x], axis=2)] * 2, axis=3),
                                     downscale_factor=np.uint32(2)),
        lambda x: F.pixel_unshuffle(x.repeat(1, 1, 2, 2), 2),
    ),
    "resample": (
        lambda x: mb.resample(
            x=x, coordinates=np.tile(PLACES, (x.shape[0], 1, 1, 1)), sampling_mode="bilinear", padding_mode="constant",
            padding_value=0.0, coordinates_mode="normalized_minus_one_to_one", align_corners=False,
        ),
        lambda x: F.grid_sample(x, torch.from_numpy(np.tile(PLACES, (len(x), 1, 1, 1))), align_corners=False),
    ),
    "gather": (lambda x: mb.gather(x=x, indices=np.int32([1, 0, 1]), axis=3), lambda x: x[..., [1, 0, 1]]),
    "gather of a batch": (
        lambda x: mb.gather(x=x, indices=np.tile(np.int32([1, 0, 1]), (*x.shape[:2], 1)), axis=2, batch_dims=2),
        lambda x: x[:, :, [1, 0, 1]],
    ),
    "gather_along_axis": (
        lambda x: mb.gather_along_axis(x=x, indices=np.zeros(x.shape, np.int32) + 1, axis=-2),
        lambda x: x[..., 1:2, :].expand_as(x),
    ),
    "gather_nd": (
        lambda x: mb.gather_nd(x=x, indices=np.int32([[0, 0, 1], [0, 0, 0]])), lambda x: x[0, 0, [1, 0]]
    ),
    "topk": (lambda x: mb.topk(x=x, k=2, axis=-1)[0], lambda x: x.topk(2).values),
    "topk, least first": (lambda x: mb.topk(x=x, k=2, axis=2, ascending=True)[0], lambda x: x.sort(2).values[:, :, :2]),
    "argsort": (
        lambda x: mb.gather_along_axis(x=x, indices=mb.argsort(x=x, axis=-1, ascending=True), axis=-1),
        lambda x: x.sort(-1).values,
    ),
    "one_hot": (
        lambda x: mb.one_hot(
            indices=mb.reduce_argmax(x=x, axis=-1), one_hot_vector_size=6, on_value=2.0, off_value=0.5
        ),
        lambda x: F.one_hot(x.argmax(-1), 6) * 1.5 + 0.5,
    ),
    "one_hot in front": (
        lambda x: mb.one_hot(
            indices=mb.reduce_argmax(x=x, axis=-1), one_hot_vector_size=6, axis=0, on_value=1.0, off_value=0.0
        ),
        lambda x: F.one_hot(x.argmax(-1), 6).movedim(-1, 0),
    ),
    "cumsum": (lambda x: mb.cumsum(x=x, axis=2), lambda x: x.cumsum(2)),
    "cumsum from the end, exclusive": (
        lambda x: mb.cumsum(x=x, axis=3, exclusive=True, reverse=True),
        lambda x: x.flip(3).cumsum(3).flip(3) - x,
    ),
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


PLACES = np.random.default_rng(0).uniform(-1.2, 1.2, (1, 3, 4, 2)).astype(np.float32)
# What each mode makes of a row whose places 1, 0 are given two values, in this order, and place 1 another.
SCATTERED: dict[str, Callable[[float, float], float]] = {
    "add": lambda kept, given: kept + given, "sub": lambda kept, given: kept - given,
    "mul": lambda kept, given: kept * given, "div": lambda kept, given: kept / given,
    "max": max, "min": min, "update": lambda kept, given: given,
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


@pytest.mark.parametrize("mode", SCATTERED)
@few
@given(x=tensors(), axis=st.integers(-4, 3))
def test_scattering(mode: str, x: Tensor, axis: int) -> None:
    """Values placed along an axis, first by one index for all, then by one for each value, then at whole places."""
    size = x.shape[axis]
    places = np.arange(size, dtype=np.int32)[::-1][: max(size - 1, 1)].copy()
    given_ = (x.flip(axis).narrow(axis, 0, len(places)) + 4.5).numpy()  # none is 0
    expected = x.movedim(axis, 0).clone()
    for place, row in zip(places, np.moveaxis(given_, axis, 0), strict=True):
        kept = expected[place].flatten().tolist()
        made = [SCATTERED[mode](one, float(other)) for one, other in zip(kept, row.flatten(), strict=True)]
        expected[place] = torch.tensor(made).reshape(expected[place].shape)
    expected = expected.movedim(0, axis)
    same(interpreted(lambda v: mb.scatter(data=v, indices=places, updates=given_, axis=axis, mode=mode), x), expected)
    shape = [1] * 4
    shape[axis] = len(places)
    along = np.broadcast_to(places.reshape(shape), given_.shape).copy()
    found = interpreted(lambda v: mb.scatter_along_axis(data=v, indices=along, updates=given_, axis=axis, mode=mode), x)
    same(found, expected)
    if axis % 4 == 0:
        whole = mb.scatter_nd
        same(interpreted(lambda v: whole(data=v, indices=places[:, None], updates=given_, mode=mode), x), expected)


def test_places_that_are_given_twice_gather_both() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    places, values = np.int32([[0, 2], [0, 2]]), np.float32([5.0, 7.0])
    same(interpreted(lambda v: mb.scatter_nd(data=v, indices=places, updates=values, mode="add"), x),
         torch.tensor([[1.0, 2.0, 15.0]]))  # fmt: skip


@few
@given(
    steps=st.integers(1, 4), batch=st.integers(1, 2), width=st.integers(1, 3), hidden=st.integers(1, 3),
    both=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_lstm(steps: int, batch: int, width: int, hidden: int, both: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = torch.nn.LSTM(width, hidden, bidirectional=both)
    x = torch.randn(steps, batch, width)

    def gates(name: str) -> np.ndarray:  # torch has the cell before the output
        enter, forget, cell, leave = getattr(layer, name).detach().chunk(4)
        return torch.cat([enter, forget, leave, cell]).numpy()

    def build(v: Any) -> Any:
        ends = {"": "_l0"} | ({"_back": "_l0_reverse"} if both else {})
        weights = {
            f"weight_{kind}{suffix}": gates(f"weight_{kind}{end}")
            for kind in ("ih", "hh")
            for suffix, end in ends.items()
        }
        biases = {f"bias{suffix}": gates(f"bias_ih{end}") + gates(f"bias_hh{end}") for suffix, end in ends.items()}
        state = np.zeros((batch, hidden * (1 + both)), np.float32)
        return mb.lstm(
            x=v, initial_h=state, initial_c=state, **weights, **biases, output_sequence=True,
            direction="bidirectional" if both else "forward",
        )[0]  # fmt: skip

    torch.testing.assert_close(interpreted(build, x), layer(x)[0], rtol=1e-5, atol=1e-6)


def test_an_unknown_operator_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="holds operator 'non_zero'"):
        interpreted(lambda v: mb.non_zero(x=v), torch.ones(2, 2))
