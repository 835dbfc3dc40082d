"""Operators rewritten for compilers keep their meaning, whatever way a model spells them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.targets.agreement import FLOAT32
from attnrewrite.targets.base import get_target
from attnrewrite.targets.prepare import Prepared, arrays, canonical, exact, in_float32, reference, specialise

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(1)
MASK = torch.rand(5, 5, generator=RANDOM) > 0.4
MASK[:, 0] = True
KERNEL = torch.randn(2, 3, 2, 4, generator=RANDOM)


def heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def targets_of(program: torch.export.ExportedProgram) -> set[object]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


FOUR = (heads(2, 3, 5, 8), heads(2, 3, 5, 8), heads(2, 3, 5, 4))
CASES: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "plain": (F.scaled_dot_product_attention, FOUR),
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.9), FOUR),
    "bool mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK), FOUR),
    "float mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK.float()), FOUR),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), FOUR),
    "three axes": (F.scaled_dot_product_attention, tuple(each[0] for each in FOUR)),
    "five axes": (F.scaled_dot_product_attention, tuple(each[None] for each in FOUR)),
    "grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (heads(2, 6, 5, 8), heads(2, 3, 5, 8), heads(2, 3, 5, 4)),
    ),
    "cross": (F.scaled_dot_product_attention, (heads(1, 2, 1, 8), heads(1, 2, 7, 8), heads(1, 2, 7, 8))),
    "roll": (lambda x: x.roll((-2, 1, 9), (1, 2, 3)), (heads(2, 3, 4, 5),)),
    "roll by nothing": (lambda x: x.roll(0, 1) + 1, (heads(2, 3),)),
    "roll flat": (lambda x: x.roll(3), (heads(2, 3),)),
    "select": (lambda x: x[:, -1] + x[:, 2], (heads(2, 3, 4),)),
    "one hot": (lambda x: F.one_hot(x.argmax(-1), 4) * 0.5, (heads(2, 3, 4),)),
    "select scatter": (lambda x, y: torch.select_scatter(x, y, 1, -2), (heads(2, 3, 4), heads(2, 4))),
    "select scatter, other type": (
        lambda x, y: torch.select_scatter(x, (y > 0).int(), 2, 0),
        (heads(2, 3, 4), heads(2, 3)),
    ),
    "slice scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 1, -1), (heads(2, 4, 4), heads(2, 2, 4))),
    "bicubic": (lambda x: F.interpolate(x, (9, 4), mode="bicubic"), (heads(2, 3, 5, 7),)),
    "bicubic, corners": (
        lambda x: F.interpolate(x, (9, 1), mode="bicubic", align_corners=True),
        (heads(2, 3, 5, 7),),
    ),
    "bicubic by factors": (lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bicubic"), (heads(2, 3, 5, 7),)),
    "variance and mean": (lambda x: torch.var_mean(x, (1, 2), keepdim=True, correction=0), (heads(2, 3, 5, 7),)),
    "nearest": (lambda x: F.interpolate(x, (3, 10)), (heads(2, 3, 5, 7),)),
    "windows summed": (lambda x: F.fold(x, (5, 4), 3, padding=1, stride=2), (heads(2, 18, 6),)),
    "bilinear": (lambda x: F.interpolate(x, (3, 10), mode="bilinear"), (heads(2, 3, 5, 7),)),
    "bilinear by factors": (
        lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"),
        (heads(2, 3, 5, 7),),
    ),
    "bilinear, corners": (
        lambda x: F.interpolate(x, (3, 10), mode="bilinear", align_corners=True),
        (heads(2, 3, 5, 7),),
    ),
    "few wide windows": (lambda x: x.unfold(1, 5, 3).unfold(-2, 4, 2) * 2, (heads(2, 11, 8),)),
    "many small windows": (lambda x: x.unfold(-1, 2, 1) * 2, (heads(2, 11),)),
    "strides": (lambda x: (x + 1).as_strided((2, 3, 4), (3, 7, 1), 5) * 2, (heads(5, 7),)),
    "strides of nothing": (lambda x: (x + 1).as_strided((), (), 4) * 2, (heads(5, 7),)),
    "gelu": (F.gelu, (heads(2, 30),)),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), (heads(2, 30),)),
    "fill": (lambda x: x.masked_fill(x > 0, -2.0), (heads(2, 30),)),
    "where number": (lambda x: torch.where(x > 0, x, 0.5) + torch.where(x > 1, 2.0, x), (heads(2, 30),)),
    "where numbers": (lambda x: torch.where(x > 0, 1.0, 0.5), (heads(2, 30),)),
    "convolution valid": (lambda x: F.conv2d(x, KERNEL, stride=2, padding="valid"), (heads(1, 3, 9, 8),)),
    "convolution same": (lambda x: F.conv2d(x, KERNEL[..., :3], padding="same", dilation=(2, 1)), (heads(1, 3, 9, 8),)),
    "product over one": (lambda x, y: torch.bmm((x @ y)[0, :, :, :1], y[0]), (heads(2, 3, 5, 1), heads(2, 3, 1, 5))),
    "in place": (lambda x: (x + 1).mul_(2).relu_(), (heads(2, 3),)),
}


@pytest.mark.parametrize("name", CASES)
def test_canonical_programs_say_the_same_with_fewer_operators(name: str) -> None:
    function, inputs = CASES[name]
    module = Apply(function)
    program = canonical(specialise(module, inputs))
    assert not targets_of(program) & {
        aten.scaled_dot_product_attention.default,
        aten.roll.default,
        aten.select.int,
        aten.conv2d.padding,
        aten.masked_fill.Scalar,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.Scalar,
        aten.relu_.default,
        aten.unfold.default,
        aten.as_strided.default,
        aten.col2im.default,
        aten.upsample_nearest2d.vec,
        aten.var_mean.correction,
    }
    assert not any(node.kwargs.get("approximate") == "tanh" for node in program.graph.nodes)
    for found, expected in zip(arrays(program.module()(*inputs)), reference(module, inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected))


def test_strides_over_a_part_of_a_tensor_reach_beyond_it_and_are_left() -> None:
    module = Apply(lambda x: (x + 1)[1:].as_strided((2, 3), (3, 1), 4) * 2)
    assert aten.as_strided.default in targets_of(canonical(specialise(module, (heads(5, 7),))))


class Biased(nn.Module):
    """A table of position biases looked up, a mask filled in, an unused weight, and a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(heads(3, 2))
        self.unused = nn.Parameter(heads(3))
        self.register_buffer("index", torch.tensor([2, 0, -1, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.index].split(1, dim=1)[0].flatten()
        mask = x.new_zeros(4)
        mask[1:3] = -1
        return x + bias + mask + torch.ones_like(x).cumsum(1)


def test_what_depends_on_no_input_is_computed_beforehand() -> None:
    module = Biased()
    (x,) = inputs = (heads(2, 4),)
    program = canonical(specialise(module, inputs))
    assert targets_of(program) == {aten.add.Tensor}
    torch.testing.assert_close(program.module()(x), module(x))
    assert set(program.state_dict) | set(program.constants) == {"folded_0", "folded_1", "folded_2"}


def test_random_numbers_are_not_constants() -> None:
    program = canonical(specialise(Apply(lambda x: x + torch.rand(2, 4)), (heads(2, 4),)))
    assert aten.rand.default in targets_of(program)


def test_what_only_asserts_is_left_out() -> None:
    def positive(x: Tensor) -> Tensor:
        torch._assert_async((x > -9).all(), "there must be no such number")
        return x + 1

    assert targets_of(specialise(Apply(positive), (heads(2, 4),))) == {aten.add.Tensor}


def test_the_encoder_layers_fused_operator_is_not_captured() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    program = specialise(nn.TransformerEncoder(layer, 1).eval(), (heads(1, 5, 16),))
    assert not any("_transformer_encoder" in str(target) for target in targets_of(program))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_module_dynamic_in_its_batch_is_fixed_to_the_example() -> None:
    batch = torch.export.Dim("batch")
    dynamic = torch.export.export(nn.Linear(4, 3), (heads(2, 4),), dynamic_shapes=({0: batch},)).module()
    program = specialise(dynamic, (heads(1, 4),))
    shapes = [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.op == "call_function"]
    assert shapes == [(1, 3)]


def test_what_cannot_be_captured_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^torch.export cannot capture the module: a branch or a size in it .+$"):
        specialise(Apply(lambda x: x.relu() if x.sum() > 0 else x), (heads(3),))
    assert capfd.readouterr() == ("", "")  # torch would print the graph that it had come to


def test_outputs_are_the_tensors_in_order_however_packed() -> None:
    one, two = heads(1), heads(2)
    assert [array.shape for array in arrays({"a": one, "b": [two, None, 3]})] == [(1,), (2,)]


HALVES = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
MASKS: dict[str, dict[str, object]] = {
    "no mask": {},
    "bool mask": {"attn_mask": MASK},
    "float32 mask": {"attn_mask": MASK.float()},
    "causal": {"is_causal": True},
}


class Attends(nn.Module):
    """[B, 5, 16] -> [B, 5, 4]: one attention of two heads, masked as `mask` says."""

    def __init__(self, mask: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = MASKS[mask]
        self.packed, self.out = nn.Linear(16, 48), nn.Linear(16, 4)
        self.eval().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value, **self.given).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_attention_stays_in_its_type(dtype: torch.dtype, mask: str) -> None:
    module, x = Attends(mask, dtype), heads(2, 5, 16).to(dtype)
    program = canonical(specialise(module, (x,)))
    found = program.module()(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, module(x), rtol=HALVES[dtype], atol=HALVES[dtype])
    made = {node.meta["val"].dtype for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert made <= {dtype, torch.bool} | ({torch.float32} if mask == "float32 mask" else set())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_module_is_widened_and_itself_left_alone(dtype: torch.dtype, mask: str) -> None:
    module, x = Attends(mask, dtype), heads(2, 5, 16).to(dtype)
    before = module(x)
    wide = in_float32(module, (x,))
    found = wide.module(*wide.inputs)
    assert (found.dtype, wide.inputs[0].dtype, len(wide.notes)) == (torch.float32, torch.float32, 1)
    torch.testing.assert_close(found, Attends(mask, dtype).float()(x.float()), rtol=1e-5, atol=1e-6)
    assert {weight.dtype for weight in module.parameters()} == {dtype}
    assert torch.equal(module(x), before)


def test_a_float32_module_is_not_widened() -> None:
    module, x = Attends("causal", torch.float32), heads(2, 5, 16)
    wide = in_float32(module, (x,))
    assert wide.module is module
    assert wide.inputs[0] is x
    assert wide.notes == ()


def test_a_module_that_casts_inside_is_widened_there_too() -> None:
    def cast(x: Tensor) -> Tensor:
        return (x.to(torch.float16) * torch.ones(5, dtype=torch.float16)).float() + torch.full((5,), 1.0).half()

    module = nn.Sequential(nn.Linear(5, 5).half(), Apply(cast))
    wide = in_float32(module, (heads(2, 5).half(),))
    values = [node.meta.get("val") for node in specialise(wide.module, wide.inputs).graph.nodes]
    assert {value.dtype for value in values if isinstance(value, Tensor)} == {torch.float32}


def test_a_module_that_is_another_in_float32_is_refused() -> None:
    rounds = Apply(lambda x: (x + 4096) - 4096)  # float16 has no fractions there
    with pytest.raises(CheckFailedError, match="the module in float32: its output differs from the module's by"):
        in_float32(rounds, (torch.full((2, 3), 0.4).half(),))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask", ["bool mask", "causal"])
@pytest.mark.parametrize("name", ["host", "coreml-npu"])
def test_a_masked_half_precision_model_reaches_a_target(
    name: str, mask: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = get_target(name)
    if (reason := target.availability().build) is not None:
        pytest.skip(str(reason))
    module, x = Attends(mask, dtype), heads(2, 5, 16).to(dtype)
    made = target.lower("masked", module, (x,), tmp_path, threads=1)
    said = str(dtype).removeprefix("torch.")
    assert f"compiled from the model in float32 (it is in {said}): its inputs are float32" in made.notes


def test_what_runs_without_gradients_is_told_in_float64_too() -> None:
    def angles(x: Tensor) -> Tensor:
        with torch.no_grad():
            turned = (x.float() * 1e-3).cos()
        return x * turned + x.exp().log()

    x = heads(2, 5, 16)
    (found,) = exact(specialise(Apply(angles), (x,)), (x,))
    assert found.dtype == "float64"
    torch.testing.assert_close(torch.from_numpy(found), angles(x).double(), rtol=1e-5, atol=1e-6)


def test_a_module_that_rounding_moves_further_is_not_held_to_what_it_rounded() -> None:
    inputs = (torch.linspace(0, 1, 50).reshape(1, 50),)
    prepared = Prepared(Apply(lambda x: (x + 1e3) - 1e3), inputs)
    agreement = prepared.agree("it", inputs[0].numpy()[None])
    assert FLOAT32 < agreement.max_abs_error < agreement.tolerance


class Turned(nn.Module):
    """Channels two by two turned by stored angles, as rotary embeddings are: [B, 5, 8] -> [B, 5, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unit", torch.polar(torch.ones(9, 4), torch.rand(9, 4, generator=RANDOM)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.unit[: x.shape[1]]
        return torch.view_as_real(turned).flatten(-2)


def test_stored_complex_numbers_are_pairs_before_a_compiler_sees_them() -> None:
    module, x = Turned(), heads(2, 5, 8)
    program = specialise(module, (x,))
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(value.is_complex() for value in values if isinstance(value, Tensor))
    torch.testing.assert_close(program.module()(x), module(x))
