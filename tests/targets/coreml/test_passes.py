"""Passes on MIL programs: what they edit, that values stay what they were, and what they leave alone."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.passes import coreml_pipeline
from attnrewrite.targets.coreml import interpreter
from attnrewrite.targets.coreml.engine_rules import lint
from attnrewrite.targets.coreml.passes import (
    attention_by_heads,
    channels_first,
    gathers_as_slices,
    low_rank,
    merge_axes,
    merge_moves,
    transposes_down,
    views,
)
from attnrewrite.targets.coreml.pipeline import LAYOUTS

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402
from mil_programs import edited, kinds, numbers  # noqa: E402

# Views


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, Any]]]:
    """A shape, and a chain of data movement from it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4)))
    current, steps = list(shape), []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["transpose", "split", "join", "slice", "expand"]))
        axis = draw(st.integers(0, len(current) - 1))
        if kind == "transpose":
            order = draw(st.permutations(range(len(current))))
            steps.append(("transpose", order))
            current = [current[place] for place in order]
        elif kind == "split" and current[axis] == 4:
            current[axis : axis + 1] = [2, 2]
            steps.append(("reshape", list(current)))
        elif kind == "join" and axis + 1 < len(current):
            current[axis : axis + 2] = [current[axis] * current[axis + 1]]
            steps.append(("reshape", list(current)))
        elif kind == "slice" and current[axis] > 1:
            begin = draw(st.integers(0, current[axis] - 1))
            size = draw(st.integers(1, current[axis] - begin))
            steps.append(("slice", (axis, begin, size)))
            current[axis] = size
        elif kind == "expand" and len(current) < 6:
            current.insert(axis, 1)
            steps.append(("expand", axis))
    return shape, steps


def moved(x: Any, steps: list[tuple[str, Any]]) -> Any:
    for kind, given_ in steps:
        if kind == "transpose":
            x = mb.transpose(x=x, perm=given_)
        elif kind == "reshape":
            x = mb.reshape(x=x, shape=given_)
        elif kind == "expand":
            x = mb.expand_dims(x=x, axes=[given_])
        else:
            axis, start, size = given_
            begin, end = [0] * x.rank, list(x.shape)
            begin[axis], end[axis] = start, start + size
            x = mb.slice_by_index(x=x, begin=begin, end=end)
    return x


@settings(max_examples=150, deadline=None)
@given(chains())
def test_any_chain_of_movement_is_one_view_written_with_five_axes(chain: Any) -> None:
    shape, steps = chain
    _, made = edited(merge_moves.apply, lambda x: mb.relu(x=moved(mb.abs(x=x), steps)), *shape)
    count = kinds(made)
    assert count["transpose"] <= max(1, sum(kind == "transpose" for kind, _ in steps))


def test_a_long_axis_cut_by_whole_rows_is_cut_as_two() -> None:
    steps = [("reshape", [1, 288, 64, 49]), ("slice", (1, 96, 96)), ("reshape", [1, 6144, 49]), ("slice", (2, 3, 1))]
    _, made = edited(merge_moves.apply, lambda x: mb.relu(x=moved(mb.abs(x=x), steps)), 1, 288, 1, 3136)
    assert all(size <= views.WIDEST for op in made.functions["main"].operations for size in op.outputs[0].shape[-2:])


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(7)))
def test_seven_axes_in_any_order_take_five_at_most(order: list[int]) -> None:
    def build(x: Any) -> Any:
        wide = mb.transpose(x=mb.reshape(x=x, shape=[2, 2, 3, 2, 2, 2, 3]), perm=order)
        return mb.relu(x=mb.reshape(x=wide, shape=[-1, 3]))

    edits, made = edited(low_rank.apply, build, 4, 72)
    assert edits == 1
    assert all(each.rank <= views.RANK for op in made.functions["main"].operations for each in op.outputs)


@pytest.mark.parametrize(
    "index", [torch.tensor([0, 2, 3]), torch.tensor([3, 2, 1]), torch.tensor([0, 1, 2, 5]), torch.tensor([0, 0, 0])]
)
def test_what_is_no_strided_view_is_none(index: Tensor) -> None:
    assert views.view(index) is None


# Passes


def windows(x: Any) -> Any:
    """Two linear layers over windows of two by two in an image of four by four, of 8 channels."""
    wide = mb.transpose(x=mb.reshape(x=x, shape=[1, 2, 2, 2, 2, 8]), perm=[0, 1, 3, 2, 4, 5])
    wide = mb.linear(x=wide, weight=numbers(24, 8), bias=numbers(24))
    packed = mb.transpose(x=mb.reshape(x=wide, shape=[1, 4, 4, 3, 2, 4]), perm=[3, 0, 1, 4, 2, 5])
    query, key, value = (mb.squeeze(x=each, axes=[0]) for each in mb.split(x=packed, num_splits=3, axis=0))
    shares = mb.softmax(x=mb.matmul(x=query, y=key, transpose_y=True), axis=-1)
    return mb.matmul(x=shares, y=value)


def test_windows_of_six_axes_become_four() -> None:
    edits, made = edited([merge_axes.apply, low_rank.apply], windows, 1, 16, 8)
    assert edits == [1, 4]  # the linear layer; what it reads, and query, key and value
    assert all(each.rank <= 5 for op in made.functions["main"].operations for each in op.outputs)
    edits, made = edited([lambda block: merge_axes.apply(block, 3, 4), low_rank.apply], windows, 1, 16, 8)
    assert max(op.outputs[0].rank for op in made.functions["main"].operations if op.op_type == "matmul") == 4


def test_axes_that_a_reduction_keeps_apart_are_not_merged() -> None:
    def build(x: Any) -> Any:
        return mb.reduce_max(x=mb.reshape(x=x, shape=[2, 3, 2, 2, 2, 4]), axes=[3], keep_dims=False)

    edits, made = edited(merge_axes.apply, build, 6, 32)
    assert edits == 1
    (reduced,) = (op for op in made.functions["main"].operations if op.op_type == "reduce_max")
    assert list(reduced.inputs["axes"].val) == [2]  # 2 * 3 are one; 2 and 2 of those around it are not its own


def test_operands_that_broadcast_along_half_of_the_axes_keep_them() -> None:
    build = lambda x: mb.add(x=mb.reshape(x=x, shape=[2, 2, 2, 2, 2, 2]), y=numbers(2, 1, 2, 1, 2, 1))  # noqa: E731
    assert edited(merge_axes.apply, build, 8, 8)[0] == 0


def block_of_layers(x: Any) -> Any:
    """What a transformer's MLP is, tokens behind a convolution, with a class token before them."""
    made = mb.conv(x=x, weight=numbers(8, 3, 2, 2), strides=[2, 2])
    tokens = mb.transpose(x=mb.reshape(x=made, shape=[1, 8, 16]), perm=[0, 2, 1])
    tokens = mb.add(x=mb.concat(values=[numbers(1, 1, 8), tokens], axis=1), y=numbers(1, 17, 8))
    normed = mb.layer_norm(x=tokens, axes=[-1], gamma=numbers(8), beta=numbers(8), epsilon=1e-5)
    wide = mb.gelu(x=mb.linear(x=normed, weight=numbers(32, 8), bias=numbers(32)))
    tokens = mb.add(x=tokens, y=mb.mul(x=mb.linear(x=wide, weight=numbers(8, 32)), y=numbers(8)))
    return mb.reduce_mean(x=tokens, axes=[1], keep_dims=False)


def test_layers_over_tokens_are_computed_channels_first() -> None:
    _, made = edited([channels_first.apply, merge_moves.apply], block_of_layers, 1, 3, 8, 8)
    count = kinds(made)
    assert (count["linear"], count["conv"], count["transpose"]) == (0, 3, 0)


def test_what_is_not_in_the_layout_is_not_brought_there_for_an_addition() -> None:
    edits, made = edited(channels_first.apply, lambda x: mb.add(x=mb.abs(x=x), y=numbers(1, 5, 8)), 1, 5, 8)
    assert edits == 0
    assert kinds(made) == {"abs": 1, "add": 1}


def rolled_windows(x: Any) -> Any:
    """A picture's rows rolled, cut into windows of 2 x 2, a layer in these, and back, beside the picture itself."""
    made = mb.conv(x=x, weight=numbers(8, 3, 1, 1))
    tokens = mb.transpose(x=made, perm=[0, 2, 3, 1])  # [1, 4, 4, 8]
    rolled = mb.concat(
        values=[
            mb.slice_by_index(x=tokens, begin=[0, 1, 0, 0], end=[1, 4, 4, 8]),
            mb.slice_by_index(x=tokens, begin=[0, 0, 0, 0], end=[1, 1, 4, 8]),
        ],
        axis=1,
    )
    cut = mb.transpose(x=mb.reshape(x=rolled, shape=[2, 2, 2, 16]), perm=[0, 2, 1, 3])
    layer = mb.linear(x=mb.reshape(x=cut, shape=[4, 4, 8]), weight=numbers(8, 8), bias=numbers(8))
    head = mb.reshape(x=layer, shape=[4, 1, 4, 8])
    seen = mb.matmul(x=mb.softmax(x=mb.matmul(x=head, y=head, transpose_y=True), axis=-1), y=head)
    layer = mb.linear(x=mb.reshape(x=seen, shape=[4, 4, 8]), weight=numbers(8, 8))
    back = mb.transpose(x=mb.reshape(x=layer, shape=[2, 2, 2, 16]), perm=[0, 2, 1, 3])
    back = mb.reshape(x=back, shape=[1, 4, 4, 8])
    unrolled = mb.concat(
        values=[
            mb.slice_by_index(x=back, begin=[0, 3, 0, 0], end=[1, 4, 4, 8]),
            mb.slice_by_index(x=back, begin=[0, 0, 0, 0], end=[1, 3, 4, 8]),
        ],
        axis=1,
    )
    return mb.conv(x=mb.transpose(x=mb.add(x=tokens, y=unrolled), perm=[0, 3, 1, 2]), weight=numbers(4, 8, 1, 1))


def test_windows_are_cut_and_joined_once_each() -> None:
    passes = [channels_first.apply, attention_by_heads.apply, channels_first.apply, merge_moves.apply]
    edits, made = edited(passes, rolled_windows, 1, 3, 4, 4)
    assert edits[1] == 1
    assert (kinds(made)["transpose"], kinds(made)["linear"]) == (2, 0)


def test_a_linear_layer_of_computed_weights_stays() -> None:
    edits, _ = edited(channels_first.apply, lambda x: mb.matmul(x=x, y=mb.transpose(x=x, perm=[0, 2, 1])), 1, 5, 8)
    assert edits == 0


def attention(
    x: Any, *, factor: bool = True, bias: np.ndarray | None = None, turned: bool = False, twice: bool = False
) -> Any:
    """Two heads of 4 channels over 5 tokens, qkv packed."""
    made = mb.linear(x=x, weight=numbers(24, 8), bias=numbers(24))
    packed = mb.transpose(x=mb.reshape(x=made, shape=[1, 5, 3, 2, 4]), perm=[2, 0, 3, 1, 4])
    query, key, value = (mb.squeeze(x=each, axes=[0]) for each in mb.split(x=packed, num_splits=3, axis=0))
    query = mb.mul(x=query, y=np.float32(0.5)) if factor else query
    key = mb.transpose(x=key, perm=[0, 1, 3, 2]) if turned else key
    scores = mb.matmul(x=query, y=key, transpose_y=not turned)
    scores = mb.mul(x=scores, y=np.float32(0.7))
    scores = scores if bias is None else mb.add(x=scores, y=bias)
    shares = mb.softmax(x=scores, axis=-1)
    seen = mb.matmul(x=shares, y=value)
    seen = mb.add(x=seen, y=mb.reduce_sum(x=shares, axes=[-1], keep_dims=True)) if twice else seen
    return mb.reshape(x=mb.transpose(x=seen, perm=[0, 2, 1, 3]), shape=[1, 5, 8])


@pytest.mark.parametrize(
    "options",
    [{}, {"factor": False}, {"turned": True}, {"bias": numbers(2, 5, 5)}, {"bias": numbers(1, 1, 1, 5)}],
    ids=["plain", "no factor", "key transposed", "bias a head", "bias a key"],
)
def test_attention_is_written_head_by_head(options: dict[str, Any]) -> None:
    passes = [channels_first.apply, attention_by_heads.apply, merge_moves.apply]
    edits, made = edited(passes, lambda x: attention(x, **options), 1, 5, 8)
    assert edits[1] == 1
    count = kinds(made)
    assert (count["matmul"], count["softmax"]) == (4, 2)
    assert count["transpose"] == 2  # the input and the output
    assert all(each.rank <= 4 for op in made.functions["main"].operations for each in op.outputs)


def test_attention_whose_shares_are_read_elsewhere_stays() -> None:
    edits, _ = edited(attention_by_heads.apply, lambda x: attention(x, twice=True), 1, 5, 8)
    assert edits == 0


def test_a_softmax_over_queries_is_no_attention() -> None:
    build = lambda x: mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-2), y=x)  # noqa: E731
    assert edited(attention_by_heads.apply, build, 1, 2, 5, 4)[0] == 0


def linear_attention(x: Any, *, class_token: bool = False) -> Any:
    """phi(Q) (phi(K)^T V) over [1, 2 * 4, 1, 5], as a convolution leaves it, and back; norms over the tokens."""

    def heads() -> Any:
        made = mb.reshape(x=mb.conv(x=x, weight=numbers(8, 8, 1, 1)), shape=[1, 2, 4, 5])
        return mb.transpose(x=made, perm=[0, 1, 3, 2])

    query, key, value = mb.sigmoid(x=heads()), mb.relu(x=heads()), heads()
    key = mb.real_div(x=key, y=mb.add(x=mb.reduce_sum(x=key, axes=[-2], keep_dims=True), y=np.float32(1)))
    context = mb.matmul(x=key, y=value, transpose_x=True)
    seen = mb.add(x=mb.matmul(x=query, y=context), y=mb.reduce_mean(x=value, axes=[2], keep_dims=True))
    if class_token:
        seen = mb.concat(values=[mb.softmax(x=numbers(1, 2, 1, 4), axis=-1), seen], axis=2)
        seen = mb.pad(x=seen, pad=[1, 0, 0, 0], mode="constant", constant_val=0.0)
    merged = mb.reshape(x=mb.transpose(x=seen, perm=[0, 1, 3, 2]), shape=[1, 8, 1, -1])
    return mb.conv(x=merged, weight=numbers(8, 8, 1, 1))


@pytest.mark.parametrize("class_token", [False, True])
def test_linear_attention_between_convolutions_needs_no_transpose(class_token: bool) -> None:
    build = lambda x: linear_attention(x, class_token=class_token)  # noqa: E731
    edits, made = edited([transposes_down.apply, merge_moves.apply], build, 1, 8, 1, 5)
    assert edits[0] == 8 + 2 * class_token
    assert kinds(made)["transpose"] == 0


def test_a_sum_follows_its_turned_operand() -> None:
    """What is computed for the sum alone is computed turned, too."""

    def build(x: Any) -> Any:
        tokens = mb.transpose(x=mb.relu(x=x), perm=[0, 1, 3, 2])  # [1, 2, 5, 4]
        weight = mb.reduce_max(x=tokens, axes=[3], keep_dims=True)
        mean = mb.reduce_mean(x=tokens, axes=[2], keep_dims=True)
        made = mb.add(x=mb.mul(x=weight, y=mean), y=tokens)
        return mb.abs(x=mb.reshape(x=mb.transpose(x=made, perm=[0, 1, 3, 2]), shape=[1, 8, 1, 5]))

    edits, made = edited([transposes_down.apply, merge_moves.apply], build, 1, 2, 4, 5)
    assert edits[0] == 3  # two reductions and the sum, which takes the product with it
    assert kinds(made)["transpose"] == 0


def test_columns_side_by_side_lie_one_below_the_other() -> None:
    def build(x: Any) -> Any:
        tokens = mb.transpose(x=mb.relu(x=x), perm=[0, 1, 3, 2])  # [1, 2, 5, 4]
        columns = [
            mb.slice_by_index(x=tokens, begin=[0, 0, 0, n], end=[1, 2, 5, n + 1], begin_mask=[True] * 3 + [False],
                              end_mask=[True] * 3 + [False])
            for n in range(4)
        ]  # fmt: skip
        made = mb.concat(values=[mb.square(x=each) for each in columns], axis=3)
        return mb.matmul(x=made, y=numbers(1, 2, 4, 6))

    _, made = edited([transposes_down.apply, merge_moves.apply], build, 1, 2, 4, 5)
    assert kinds(made)["transpose"] == 1  # the output's own


@settings(max_examples=30, deadline=None)
@given(
    left=st.booleans(), right=st.booleans(), first=st.booleans(), second=st.booleans(), shared=st.booleans(),
)  # fmt: skip
def test_products_of_operands_that_lie_turned(left: bool, right: bool, first: bool, second: bool, shared: bool) -> None:
    """Every way to lie, and every way for the product to read it."""

    def operand(x: Any, turned: bool) -> Any:
        return mb.transpose(x=x, perm=[0, 2, 1]) if turned else x

    def build(x: Any) -> Any:
        seen = mb.abs(x=x)
        square = mb.matmul(x=seen, y=numbers(1, 5, 3))  # [2, 3, 3]
        made = mb.matmul(x=operand(square, left), y=operand(square, right), transpose_x=first, transpose_y=second)
        return mb.add(x=mb.relu(x=made), y=operand(square, left)) if shared else mb.relu(x=made)

    edited([transposes_down.apply, merge_moves.apply], build, 2, 3, 5)


def test_operands_that_lie_otherwise_stay() -> None:
    """A transpose of one operand alone, and sums over all that torch reduces away."""
    alone = lambda x: mb.add(x=mb.transpose(x=mb.abs(x=x), perm=[0, 2, 1]), y=mb.exp(x=x))  # noqa: E731
    assert edited(transposes_down.apply, alone, 1, 4, 4)[0] == 0
    reduced = lambda x: mb.reduce_max(x=mb.transpose(x=x, perm=[2, 0, 1]), axes=[0, 1], keep_dims=False)  # noqa: E731
    assert edited(transposes_down.apply, reduced, 2, 3, 4)[0] == 1


@pytest.mark.parametrize(
    ("places", "slices", "concats"), [([2, 3, 4, 0, 1], 2, 1), ([1, 2], 1, 0), ([4], 1, 0), ([-1, 0], 2, 1)]
)
def test_runs_of_places_are_sliced(places: list[int], slices: int, concats: int) -> None:
    build = lambda x: mb.relu(x=mb.gather(x=x, indices=np.array(places, np.int32), axis=1))  # noqa: E731
    edits, made = edited(gathers_as_slices.apply, build, 2, 5, 3)
    assert edits == 1
    assert kinds(made) == Counter(slice_by_index=slices, concat=concats, relu=1) - Counter()


@pytest.mark.parametrize("places", [list(range(0, 40, 2)), [[0, 1], [2, 3]]])
def test_scattered_places_stay_a_gather(places: list[Any]) -> None:
    build = lambda x: mb.relu(x=mb.gather(x=x, indices=np.array(places, np.int32), axis=1))  # noqa: E731
    assert edited(gathers_as_slices.apply, build, 2, 40, 3)[0] == 0


# All of them, in coremltools' pipeline


class Net(nn.Module):
    """A convolution, one encoder layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def test_the_pipeline_serves_anyones_conversion() -> None:
    torch.manual_seed(0)
    model, inputs = Net().eval(), (torch.randn(1, 3, 16, 16),)
    exported = torch.export.export(model, inputs).run_decompositions({})
    shares = {}
    for layout in LAYOUTS:
        made = ct.convert(
            exported, convert_to="milinternal", minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32, pass_pipeline=coreml_pipeline(layout),
        )  # fmt: skip
        (found,) = interpreter.interpret(
            made, dict(zip(made.functions["main"].inputs, inputs, strict=True))
        ).outputs.values()
        torch.testing.assert_close(found, model(*inputs), rtol=0, atol=1e-5)
        shares[layout] = len(lint(made).breaking("transpose")), kinds(made)["conv"]
    assert shares["engine"] == (0, 5)  # patches, qkv, out, and two of the MLP
    assert shares["as-is"][0] > 2
    assert shares["as-is"][1] == 1


def test_an_unknown_layout_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'engine'"):
        coreml_pipeline("engines")
