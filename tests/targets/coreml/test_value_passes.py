"""Passes that say values otherwise, for float16 or for the layout: the result is what it was."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="coremltools is not installed")

from coremltools.converters.mil.mil import Builder as mb
from mil_programs import edited, kinds, numbers

from attnrewrite.targets.coreml.passes import (
    epsilons_in_half,
    masks_in_half,
    narrow_kernels,
    norms_folded,
    sums_of_stacks,
)


@pytest.mark.parametrize(("hidden", "edits"), [(-np.inf, 1), (-1e30, 1), (-100.0, 0)])
def test_masks_are_what_float16_holds(hidden: float, edits: int) -> None:
    mask = np.where(np.tri(5, dtype=bool), 0, hidden).astype(np.float32)
    build = lambda x: mb.softmax(x=mb.add(x=x, y=mask), axis=-1)  # noqa: E731
    done, made = edited(masks_in_half.apply, build, 1, 5, 5)
    assert done == edits
    (added,) = (op for op in made.functions["main"].operations if op.op_type == "add")
    assert added.inputs["y"].val.min() == (-4e4 if edits else hidden)


def test_a_constant_that_no_softmax_reads_stays() -> None:
    mask = np.where(np.tri(5, dtype=bool), 0, -1e30).astype(np.float32)
    assert edited(masks_in_half.apply, lambda x: mb.relu(x=mb.add(x=x, y=mask)), 1, 5, 5)[0] == 0


# What is computed: (its edits, the operators that are left).
EPSILONS = {
    "an epsilon of the model": (
        lambda x: mb.rsqrt(x=mb.add(x=mb.square(x=x), y=np.float32(1e-5))), 1, {"square", "rsqrt"}
    ),
    "on the other side": (lambda x: mb.log(x=mb.add(x=np.float32(1e-3), y=mb.square(x=x))), 1, {"square", "log"}),
    "one that float16 lacks": (
        lambda x: mb.rsqrt(x=mb.add(x=mb.exp(x=x), y=np.float32(1e-12))), 0, {"exp", "add", "rsqrt"}
    ),
    "one for each channel": (
        lambda x: mb.rsqrt(x=mb.add(x=mb.square(x=x), y=np.full(4, 1e-5, np.float32))), 0, {"square", "add", "rsqrt"}
    ),
    "an epsilon of its own": (
        lambda x: mb.rsqrt(x=mb.add(x=mb.square(x=x), y=np.float32(1.0)), epsilon=np.float32(1e-3)), 0,
        {"square", "add", "rsqrt"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EPSILONS)
def test_epsilons_are_what_float16_holds(case: str) -> None:
    build, edits, left = EPSILONS[case]
    done, made = edited(epsilons_in_half.apply, build, 2, 4)
    assert (done, set(kinds(made))) == (edits, left)


# What sums a stack: (its edits, how).
STACKS = {
    "the axis of the stack": (2, lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=False)),
    "counted from the end": (2, lambda x: mb.reduce_sum(x=x, axes=[-3], keep_dims=False)),
    "another axis": (0, lambda x: mb.reduce_sum(x=x, axes=[1], keep_dims=False)),
    "the axis is kept": (0, lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=True)),
    "a mean": (0, lambda x: mb.reduce_mean(x=x, axes=[0], keep_dims=False)),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacks_that_are_summed_are_sums(case: str) -> None:
    adds, reduced = STACKS[case]
    build = lambda x: reduced(mb.stack(values=[mb.relu(x=x), mb.exp(x=x), x], axis=0))  # noqa: E731
    done, made = edited(sums_of_stacks.apply, build, 3, 4)
    assert (done, kinds(made)["add"]) == (adds // 2, adds)


# An input's shape and a convolution: (the widths of the kernels that it becomes, the slices before them).
KERNELS = {
    "patches of 16": ((1, 3, 32, 48), (5, 3, 16, 16), {"strides": (16, 16)}, [8, 8], 2),
    "patches of 14, a bias": ((2, 3, 28, 28), (5, 3, 14, 14), {"strides": (14, 14), "bias": True}, [7, 7], 2),
    "patches that overlap, what is left over": ((1, 2, 20, 39), (3, 2, 5, 27), {"strides": (2, 4)}, [9, 9, 9], 3),
    "by channel, padded": ((1, 4, 9, 40), (4, 1, 3, 31), {"groups": 4, "pad": (1, 1, 15, 15)}, [11, 10, 10], 2),
    "padded on one side": ((1, 2, 9, 20), (4, 2, 1, 15), {"pad": (0, 0, 9, 0)}, [8, 7], 1),
    "columns that see the padding alone": ((1, 2, 9, 3), (4, 2, 1, 30), {"pad": (0, 0, 27, 0)}, [10], 0),
    "dilated": ((1, 2, 9, 64), (4, 2, 3, 17), {"dilations": (2, 3), "bias": True}, [9, 8], 2),
    "along one axis": ((1, 2, 64), (4, 2, 20), {"strides": (4,)}, [10, 10], 2),
    "as wide as the engine takes": ((1, 2, 26, 26), (4, 2, 13, 13), {"strides": (13, 13)}, [13], 0),
    "high and narrow": ((1, 2, 40, 9), (4, 2, 31, 3), {}, [3], 0),
    "padded as coremltools would": ((1, 2, 9, 40), (4, 2, 3, 15), {"pad_type": "same"}, [15], 0),
}


@pytest.mark.parametrize("case", KERNELS)
def test_wide_kernels_are_sums_of_narrow_ones(case: str) -> None:
    shape, weight, options, widths, slices = KERNELS[case]
    given = dict(options)
    if "pad" in given:
        given["pad_type"] = "custom"
    if given.pop("bias", False):
        given["bias"] = numbers(weight[0])
    values = numbers(*weight)
    done, made = edited(narrow_kernels.apply, lambda x: mb.relu(x=mb.conv(x=x, weight=values, **given)), *shape)
    found = [op.inputs["weight"].shape[-1] for op in made.functions["main"].operations if op.op_type == "conv"]
    assert (done, found) == (int(widths != [weight[-1]]), widths)
    assert kinds(made)["slice_by_index"] == slices


def test_a_kernel_that_is_computed_stays() -> None:
    def build(x: Any) -> Any:
        kernel = mb.exp(x=mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, 2, 3, 15]))
        return mb.conv(x=mb.relu(x=x), weight=kernel)

    assert edited(narrow_kernels.apply, build, 1, 2, 9, 40)[0] == 0


def layer(x: Any, bias: bool = True) -> Any:
    return mb.linear(x=x, weight=numbers(6, 4), bias=numbers(6) if bias else None)


def norm(x: Any, width: int = 6, affine: bool = True) -> Any:
    given = {"gamma": numbers(width), "beta": numbers(width)} if affine else {}
    return mb.batch_norm(
        x=x, mean=numbers(width), variance=np.abs(numbers(width)) + 1, epsilon=np.float32(1e-3), **given
    )


def flattened(x: Any) -> Any:
    return mb.expand_dims(x=mb.reshape(x=x, shape=[10, 6]), axes=[2])


def twice_read(x: Any) -> Any:
    made = layer(x)
    return mb.add(x=mb.reshape(x=norm(flattened(made)), shape=[2, 5, 6]), y=made)


# What is computed of [2, 5, 4]: (its edits).
NORMS = {
    "tokens flattened into the batch": (lambda x: norm(flattened(layer(x))), 1),
    "no bias": (lambda x: norm(flattened(layer(x, bias=False))), 1),
    "statistics alone": (lambda x: norm(flattened(layer(x)), affine=False), 1),
    "channels first": (lambda x: norm(mb.transpose(x=layer(x), perm=[0, 2, 1])), 1),
    "over another axis": (lambda x: norm(layer(x), width=5), 0),
    "something in between": (lambda x: norm(mb.relu(x=flattened(layer(x)))), 0),
    "behind no layer": (lambda x: norm(mb.relu(x=x), width=5), 0),
    "the layer has another reader": (twice_read, 0),
}


@pytest.mark.parametrize("case", NORMS)
def test_batch_norms_are_part_of_the_linear_layers_before_them(case: str) -> None:
    build, edits = NORMS[case]
    done, made = edited(norms_folded.apply, lambda x: mb.relu(x=build(x)), 2, 5, 4)
    assert done == edits
    assert kinds(made)["batch_norm"] == 1 - edits
