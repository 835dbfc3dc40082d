"""Attentions that stand in a quantised file otherwise than in a plain one: each is converted, and the file checked."""

import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_quantised import PACKED, quantised_file
from torch import Tensor, nn

import attnrewrite as ar

TOKENS, WIDTH, HEADS = 16, 32, 2


def heads(tokens: Tensor) -> Tensor:
    """[B, N, C] as [B, heads, N, C / heads]."""
    return tokens.unflatten(2, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Of tokens to tokens; sizes are asked of what is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def queries(self, x: Tensor) -> Tensor:
        return heads(self.query(x))

    def values(self, x: Tensor) -> Tensor:
        return heads(self.value(x))

    def pool(self, tokens: Tensor) -> Tensor:
        return tokens

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5

    def forward(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        own = self.values(x)
        scores = self.scores(self.pool(self.queries(x)), self.pool(heads(self.key(x))))
        mixed = scores.softmax(-1) @ self.pool(own if values is None else own + values)
        images, _, tokens, _ = mixed.shape
        return self.out(mixed.transpose(1, 2).reshape(images, tokens, WIDTH))


class Pooled(Attention):
    """Queries, keys and values through a convolution and a norm over each head's tokens, as in MViTv2."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH // HEADS, WIDTH // HEADS, 3, padding=1, groups=WIDTH // HEADS)
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def pool(self, tokens: Tensor) -> Tensor:
        images = tokens.flatten(0, 1).transpose(1, 2).unflatten(2, (4, 4))
        pooled = self.depthwise(images).flatten(2).transpose(1, 2)
        return self.norm(pooled.unflatten(0, (-1, HEADS)))


class OfLearnedQueries(Attention):
    """Queries made of weights alone, as in the first block of DETR's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def queries(self, x: Tensor) -> Tensor:
        return heads(self.query(self.learned)).expand(x.shape[0], -1, -1, -1)


class Biased(Attention):
    """A bias of queries and positions for all, and one that is written into a part of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TOKENS, TOKENS, WIDTH // HEADS))
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS // 2))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = super().scores(query, key) + torch.einsum("bhnc,nmc->bhnm", query, self.positions)
        scores[..., : TOKENS // 2] += self.bias
        return scores


class Model(nn.Module):
    """[B, 3, 16, 16] -> [B, 5]: patches through an attention of each kind, then learned tokens that look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        attentions = Attention(), Attention(), Pooled(), OfLearnedQueries(), Biased(), Attention(), Attention()
        self.attentions = nn.ModuleList(attentions)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in attentions])
        self.learned, self.head = nn.Parameter(torch.randn(1, TOKENS, WIDTH)), nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        first, second, *others, own, across = self.attentions
        x = self.patches(image).flatten(2).transpose(1, 2)
        before = self.norms[0](x)
        x = x + first(before)
        x = x + second(self.norms[1](x), first.values(before))  # values that the next attention adds to its own
        for norm, attention in zip(self.norms[2:-2], others, strict=True):
            x = x + attention(norm(x))
        asked = self.learned.repeat(x.shape[0], 1, 1)
        asked = self.norms[-2](asked + own(asked))  # learned tokens that see each other
        return self.head((asked + across(self.norms[-1](x) + asked)).mean(1))


@pytest.mark.parametrize("kind", ["weights", "every operator", PACKED])
def test_every_attention_is_converted(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 16, 16)
    with warnings.catch_warnings(action="ignore"):
        how = {"dynamo": False, "opset_version": 17, "input_names": ["image"], "dynamic_axes": {"image": {0: "batch"}}}
        torch.onnx.export(Model().eval(), (images[:2],), tmp_path / "float.onnx", **how)
    file = quantised_file(tmp_path / "float.onnx", tmp_path / "file.onnx", images[:2].numpy(), kind)
    done = ar.convert(file, variant="l1", options={"approximate": True})
    folder = done.save(tmp_path / "out")  # which holds the file to the module
    assert [each.site for each in done.plan.placements] == [f"site{number}" for number in range(7)]
    assert not any(node.op_type == "Softmax" for node in ir.load(folder / "model.onnx").graph)
    assert np.isfinite(done.module(images[:2]).detach().numpy()).all()
