"""Core ML programs run operator by operator give what torch gives, and show what float16 does."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.targets.coreml import interpreter as mil_interpreter
from attnrewrite.targets.prepare import canonical, specialise

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")

RANDOM = torch.Generator().manual_seed(0)
IMAGE = torch.randn(2, 4, 6, 8, generator=RANDOM)
WEIGHT = torch.randn(6, 2, 3, 3, generator=RANDOM)
VECTOR = torch.randn(4, generator=RANDOM)
SQUARE = torch.randn(8, 8, generator=RANDOM)
INDEX = torch.tensor([3, 0, 0, 1])

# Functions of IMAGE [2, 4, 6, 8], whose values lie in about -3 to 3.
CASES: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "largest place": lambda x: x.argmax(1).float(),
    "smallest place": lambda x: x.argmin(2, keepdim=True).float(),
    "transposed convolution": lambda x: F.conv_transpose2d(x, WEIGHT[:4], stride=2, padding=1, output_padding=(1, 0)),
    "transposed convolution, grouped": lambda x: F.conv_transpose2d(x, WEIGHT[:4], stride=(1, 3), groups=2),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "compare": lambda x: torch.where(x > 0.3, x, -x) + torch.where(x <= x.flip(-1), x, x + 0.5),
    "compare more": lambda x: torch.where(torch.logical_or(x < -0.3, x == x.flip(2)), x, 2 * x),
    "logic": lambda x: torch.where(torch.logical_and(x != x.flip(1), torch.logical_not(x > 0.3)), x, 2 * x),
    "exclusive": lambda x: torch.where(torch.logical_xor(x >= -0.3, x > x.flip(1)), x, 2 * x),
    "integer division": lambda x: torch.floor_divide(x, 0.3) + torch.remainder(x, 0.7),
    "elu": F.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "log": lambda x: torch.log(x.abs() + 0.1),
    "maximum": lambda x: torch.maximum(x, x.flip(1)) - torch.minimum(x, x.flip(1)),
    "pow": lambda x: x.abs() ** 1.5 + x**2,
    "prelu": lambda x: F.prelu(x, VECTOR),
    "relu": torch.relu,
    "relu6": lambda x: F.relu6(4 * x),
    "rounding": lambda x: torch.floor(x) + 10 * torch.ceil(x) + 100 * torch.round(3 * x),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sine": lambda x: torch.sin(x) + 2 * torch.cos(x),
    "softplus": F.softplus,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "tanh": torch.tanh,
    "atanh": lambda x: torch.atanh(x.tanh() * 0.9),
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "arithmetic": lambda x: (x + 2) * (x - 3 * x.flip(0)) / (x.abs() + 1),
    "softmax": lambda x: torch.softmax(x, 2),
    "linear": lambda x: F.linear(x, SQUARE[:3], VECTOR[:3]),
    "matmul": lambda x: x @ SQUARE + (x.transpose(-1, -2) @ x).sum(),
    "convolution": lambda x: F.conv2d(x, WEIGHT, torch.arange(6.0), stride=(2, 1), padding=(1, 2), groups=2),
    "convolution dilated": lambda x: F.conv2d(x, WEIGHT[:, :1].expand(-1, 4, -1, -1), dilation=2),
    "convolution of rows": lambda x: F.conv1d(x.flatten(2), WEIGHT[:, :1, 0].expand(-1, 4, -1), padding=1),
    "mean pool": lambda x: F.avg_pool2d(x, 3, 2, padding=1),
    "mean pool without padding": lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, padding=1),
    "layer norm": lambda x: F.layer_norm(x, (6, 8), torch.arange(48.0).view(6, 8), torch.ones(6, 8)),
    "layer norm plain": lambda x: F.layer_norm(x, (8,), eps=0.1),
    "batch norm": lambda x: F.batch_norm(x, VECTOR, VECTOR.abs() + 0.1, VECTOR + 2, VECTOR),
    "group norm": lambda x: F.group_norm(x, 2, VECTOR, VECTOR + 1),
    "instance norm": lambda x: F.instance_norm(x),
    "normalize": lambda x: F.normalize(x, dim=1) + F.normalize(x, p=1.0, dim=-2),
    "sums": lambda x: x.sum(-1) + x.mean((-1,)) + x.amax(-1) * x.amin(-1),
    "sum of all": lambda x: x.sum() + x.mean(),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "reshape": lambda x: x.reshape(2, 2, 2, -1),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "squeeze": lambda x: (x[:1].squeeze(0), x[:, :1].unsqueeze(0).squeeze(2)),
    "unsqueeze": lambda x: x.unsqueeze(1) * x[:, :, None],
    "concatenate": lambda x: torch.cat([x, x[:, :1], 2 * x], 1),
    "stack": lambda x: torch.stack([x, x + 1], 2),
    "split": lambda x: x.split([1, 3, 2], 2),
    "chunk": lambda x: x.chunk(2, 3),
    "unbind": lambda x: x.unbind(1),
    "slice": lambda x: x[:, 1:, -3:-1, ::3],
    "index": lambda x: x[:, -1, 2],
    "roll": lambda x: x.roll((1, -2), (2, 3)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5),
    "pad by reflection": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "repeat": lambda x: x.repeat(1, 2, 1, 3),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1) + torch.ones_like(x[:, :1]),
    "gather rows": lambda x: x[:, INDEX],
    "index select": lambda x: x.index_select(3, INDEX),
    "take along": lambda x: torch.gather(x, 1, INDEX.view(1, 4, 1, 1).expand(2, 4, 6, 8)),
    "triangle": lambda x: x.tril() + x.triu(1) * 2,
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "enlarge": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "enlarge bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "enlarge bilinear to corners": lambda x: F.interpolate(x, size=(12, 16), mode="bilinear", align_corners=True),
}


# What torch is not turned into here; test_operators builds it directly.
OF_THEIR_OWN = {
    "acos", "argsort", "asin", "atan", "classify", "constexpr_affine_dequantize", "constexpr_blockwise_shift_scale",
    "constexpr_cast", "constexpr_lut_to_dense", "constexpr_sparse_to_dense", "cosh", "cumsum", "einsum", "exp2",
    "fill", "fill_like", "gather_nd", "identity", "inverse", "lstm", "mod", "one_hot", "pixel_unshuffle",
    "reduce_l1_norm", "reduce_prod", "reduce_sum_square", "resample", "scatter", "scatter_along_axis", "scatter_nd",
    "shape", "sinh", "slice_by_size", "softsign", "tan", "topk",
}  # fmt: skip


class Everything(nn.Module):
    """Every case in turn, each result flat."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat(case(x)) for case in CASES.values())


def flat(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    parts = (value,) if isinstance(value, Tensor) else value
    return torch.cat([part.float().reshape(-1) for part in parts])


def convert(module: nn.Module, inputs: tuple[Tensor, ...], precision: str, path: Path) -> object:
    program = canonical(specialise(module.eval(), inputs))
    with warnings.catch_warnings(action="ignore"):
        model = ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=getattr(ct.precision, precision),
            skip_model_load=True,
        )
    model.save(str(path))
    return mil_interpreter.load(path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> object:
    return convert(Everything(), (IMAGE,), "FLOAT32", tmp_path_factory.mktemp("mil") / "all.mlpackage")


@pytest.fixture(scope="module")
def found(everything) -> dict[str, Tensor]:
    name = next(iter(everything.functions["main"].inputs))
    outputs = mil_interpreter.interpret(everything, {name: IMAGE}).outputs
    return dict(zip(CASES, outputs.values(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_torch_gives(name: str, found: dict[str, Tensor]) -> None:
    expected = flat(CASES[name](IMAGE))
    torch.testing.assert_close(found[name], expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


def test_every_operator_is_in_some_case(everything) -> None:
    seen = {operation.op_type for operation in everything.functions["main"].operations}
    assert set(mil_interpreter.OPERATORS) - seen <= OF_THEIR_OWN


def run(module: nn.Module, value: Tensor, precision: str, folder: Path) -> mil_interpreter.Interpretation:
    program = convert(module, (value,), precision, folder / "model.mlpackage")
    return mil_interpreter.interpret(program, {next(iter(program.functions["main"].inputs)): value})


def output(result: mil_interpreter.Interpretation) -> Tensor:
    (value,) = result.outputs.values()
    return value


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x) / 1000


def test_every_result_is_rounded_as_declared(tmp_path: Path) -> None:
    # 32.06^2 is 1027.8 and becomes 1028 in float16, where the step there is 1.
    value = torch.tensor([[32.0625]])
    assert output(run(Square(), value, "FLOAT32", tmp_path / "exact")).item() == pytest.approx(1.02800390625)
    assert output(run(Square(), value, "FLOAT16", tmp_path / "half")).item() == torch.tensor(1.028).half().item()


def test_an_overflow_in_float16_is_infinite_and_named(tmp_path: Path) -> None:
    value = torch.tensor([[300.0, 2.0]])
    exact = run(Square(), value, "FLOAT32", tmp_path / "exact")
    assert exact.overflowed == ()
    half = run(Square(), value, "FLOAT16", tmp_path / "half")
    assert len(half.overflowed) == 1
    assert output(half)[0, 0].isinf()


def test_an_operator_without_an_interpretation_is_named(everything, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: call for kind, call in mil_interpreter.OPERATORS.items() if kind != "erf"}
    monkeypatch.setattr(mil_interpreter, "OPERATORS", known)
    name = next(iter(everything.functions["main"].inputs))
    with pytest.raises(InputError, match="holds operator 'erf'"):
        mil_interpreter.interpret(everything, {name: IMAGE})


class Cancel(nn.Module):
    """1000.3 - 1000 keeps two digits of float16's three; the product before it keeps all three."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x * 3.0 + 1000) - 1000)


def test_a_diagnosis_names_the_operator_that_loses_most(tmp_path: Path) -> None:
    value = torch.linspace(0.1, 1, 32)[None]
    value[0, 5] = 3.0  # among the others, rounding makes ties
    program = convert(Cancel(), (value,), "FLOAT16", tmp_path / "half.mlpackage")
    name = next(iter(program.functions["main"].inputs))
    found = mil_interpreter.diagnose(program, {name: value})
    assert found.worst is not None
    assert found.worst.kind in ("add", "sub")
    assert found.worst.loss > 30
    (snr,) = found.snr.values()
    exact = mil_interpreter.interpret(program, {name: value}, rounded=False)
    torch.testing.assert_close(output(exact), Cancel()(value), rtol=0, atol=1e-4)
    noise = (output(mil_interpreter.interpret(program, {name: value})) - output(exact)).double().square().sum()
    assert snr == pytest.approx(10 * float(torch.log10(output(exact).double().square().sum() / noise)))
    assert tuple(found.argmax.values()) == (1.0,)


def test_a_diagnosis_tells_overflows_and_denormals(tmp_path: Path) -> None:
    value = torch.tensor([[300.0, 2.0, 1e-3, 0.0]])
    program = convert(Square(), (value,), "FLOAT16", tmp_path / "half.mlpackage")
    found = mil_interpreter.diagnose(program, {next(iter(program.functions["main"].inputs)): value})
    assert found.worst is not None
    assert found.worst.overflowed
    assert found.worst.denormal == 0.25
    assert found.worst.snr == -float("inf")
