"""Modules and programs that were quantized: read in the numbers that they stand for, or refused with the way out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of quantized programs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import attnrewrite as ar
from attnrewrite.errors import InputError

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


class Packed(Tensor):
    """A matrix as integers and one scale for each row, as libraries that quantize modules keep it."""

    integers: Tensor
    scale: Tensor
    rounds_tokens = False

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> "Packed":
        return cls(inner["integers"], inner["scale"])

    def dequantize(self) -> Tensor:
        return self.integers * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            tokens, weight, bias = args
            tokens = tokens.mul(8).round().div(8) if cls.rounds_tokens else tokens
            return tokens @ weight.integers.mT.float() * weight.scale[:, 0] + bias
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        return function(*tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, args), **(kwargs or {}))


class RoundsTokens(Packed):
    rounds_tokens = True


class Sealed(Packed):
    def dequantize(self) -> Tensor:
        raise NotImplementedError("sealed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def rounded(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        probabilities = self.rounded((query @ key.mT * 8**-0.5).softmax(-1))
        return self.proj((probabilities @ value).transpose(1, 2).flatten(2))


class RoundedProbabilities(Block):
    def rounded(self, x: Tensor) -> Tensor:
        as_integers = (1 / 255, 0, 0, 255, torch.uint8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(
            torch.ops.quantized_decomposed.quantize_per_tensor(x, *as_integers), *as_integers
        )


class RoundedTokens(RoundedProbabilities):
    def rounded(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(RoundedProbabilities.rounded(self, x))


def _packed(kind: type[Packed]) -> Block:
    model = Block().eval()
    for layer in (model.qkv, model.proj):
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        layer.weight = nn.Parameter(kind((layer.weight.detach() / scale).round().to(torch.int8), scale), False)
    return model


def test_packed_weights_are_the_numbers_that_they_stand_for() -> None:
    model = _packed(Packed)
    plain = copy.deepcopy(Block().eval())
    for mine, theirs in zip((plain.qkv, plain.proj), (model.qkv, model.proj), strict=True):
        mine.weight = nn.Parameter(theirs.weight.dequantize())
    found, wanted = (ar.convert(each, (X,), variant="l1") for each in (model, plain))
    assert len(found.plan.placements) == 1
    assert torch.equal(found.module(X), wanted.module(X))
    assert isinstance(model.qkv.weight, Packed)  # the caller's own stays as it is


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            RoundsTokens,
            r"Block's qkv \(Linear\) answers differently .*: it quantizes more; give the model before quantization",
        ),
        (Sealed, r"Block's qkv.weight is a Sealed, of which the numbers cannot be had \(sealed\): give the model with"),
    ],
)
def test_what_is_more_than_its_weights_is_refused(kind: type[Packed], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ar.explain(_packed(kind), (X,))


class IntegerLayer(nn.Module):
    """Its weight is integers, and torch.export cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(16, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.float() * float(x.abs().max() > 0)


def test_a_layer_of_integers_that_cannot_be_followed_is_named() -> None:
    model = nn.Sequential(IntegerLayer(), Block()).eval()
    with pytest.raises(InputError, match=r"0 \(IntegerLayer\) is quantized: give the model before quantization"):
        ar.convert(model, (X,), variant="l1")


@pytest.mark.parametrize(("kind", "sites"), [(RoundedProbabilities, 0), (RoundedTokens, 1)])
def test_a_program_that_rounds_to_integers_names_the_way_out(kind: type[Block], sites: int, tmp_path: Path) -> None:
    program = torch.export.export(kind().eval(), (X,))
    found = ar.explain(program)
    assert [len(found.sites), [miss.code for miss in found.near_misses]] == [sites, ["quantized"] * (1 - sites)]
    assert all("what torch.onnx.export writes of it" in miss.sentence for miss in found.near_misses)
    with pytest.raises(InputError, match=r"program computes on integers \(at quantize_per_tensor.*\); give the model"):
        ar.convert(program, variant="l1")
    torch.onnx.export(program, f=tmp_path / "file.onnx", dynamo=True, verbose=False)
    assert len(ar.convert(tmp_path / "file.onnx", variant="l1").plan.placements) == 1
