"""Attention written in ways nobody listed: hypothesis draws the layout, the products and what happens to the scores."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import relative_error
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant

ROUNDS = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Drawn:
    """One way to write attention over x [batch, tokens, heads * dim]."""

    heads: int
    dim: int
    rows: int
    columns: int
    packing: str  # packed, separate, shared keys and values
    axes: str  # where the heads and channels lie in the projection: "hd" or "dh"
    fold: str  # separate axes, heads folded into the batch, or a fifth axis
    product: str  # matmul, bmm-like swapped operands, einsum
    scaling: str  # before, after, both, none
    bias: str  # none, per head, shared
    window: bool
    cast: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.columns * (4 if self.window else 1)

    @property
    def seen(self) -> int:
        """Tokens that attend to each other."""
        return self.rows * self.columns


ways = st.builds(
    Drawn,
    heads=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([2, 5]),
    rows=st.sampled_from([2, 3]),
    columns=st.sampled_from([2, 4]),
    packing=st.sampled_from(["packed", "separate", "shared"]),
    axes=st.sampled_from(["hd", "dh"]),
    fold=st.sampled_from(["apart", "folded", "fifth"]),
    product=st.sampled_from(["matmul", "turned", "einsum"]),
    scaling=st.sampled_from(["before", "after", "both", "none"]),
    bias=st.sampled_from(["none", "per head", "shared"]),
    window=st.booleans(),
    cast=st.booleans(),
)


class Written(nn.Module):
    def __init__(self, way: Drawn, mutate: str | None = None) -> None:
        super().__init__()
        self.way, self.mutate = way, mutate
        width = way.heads * way.dim
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.packed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(way.heads if way.bias == "per head" else 1, way.seen, way.seen))

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        if way.window:
            x = x.view(-1, 2, way.rows, 2, way.columns, x.shape[-1]).transpose(2, 3).reshape(-1, way.seen, x.shape[-1])
        q, k, v = (self.split(part) for part in self.project(x))
        out = self.attend(q, k, v)
        out = self.out(self.merge(out))
        if way.window:
            out = out.view(-1, 2, 2, way.rows, way.columns, out.shape[-1]).transpose(2, 3)
        return out.reshape(-1, way.tokens, out.shape[-1])

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.way.packing == "packed":
            return self.packed(x).chunk(3, dim=-1)
        if self.way.packing == "shared":
            both = self.maps[1](x)
            return self.maps[0](x), both, both
        return tuple(each(x) for each in self.maps)

    def split(self, t: Tensor) -> Tensor:
        """[B, N, width] -> [B, H, N, d], or with the heads folded, or with an axis more."""
        way = self.way
        if way.axes == "hd":
            t = t.view(-1, way.seen, way.heads, way.dim).transpose(1, 2)
        else:
            t = t.view(-1, way.seen, way.dim, way.heads).permute(0, 3, 1, 2)
        if way.fold == "folded":
            return t.reshape(-1, way.seen, way.dim)
        return t.unsqueeze(1) if way.fold == "fifth" else t

    def merge(self, t: Tensor) -> Tensor:
        way = self.way
        t = t.reshape(-1, way.heads, way.seen, way.dim)
        return (t.permute(0, 2, 1, 3) if way.axes == "hd" else t.permute(0, 2, 3, 1)).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        way, scale = self.way, self.way.dim**-0.5
        if way.scaling == "before":
            q = q * scale
        if way.scaling == "both":
            q, k = q * scale**0.5, k * scale**0.5
        if way.product == "einsum":
            scores = torch.einsum("...nd,...md->...nm", q, k) if q.dim() > 4 else self.summed(q, k)
        elif way.product == "turned":
            scores = (k @ q.transpose(-2, -1)).transpose(-2, -1)
        else:
            scores = q @ k.transpose(-2, -1)
        if way.scaling == "after":
            scores = scores * scale
        if way.bias != "none":
            scores = self.biased(scores)
        if way.cast:
            scores = scores.to(torch.float64).to(torch.float32)
        return self.weigh(scores, v)

    def summed(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bnd,bmd->bnm", q, k) if q.dim() == 3 else torch.einsum("bhnd,bhmd->bhnm", q, k)

    def biased(self, scores: Tensor) -> Tensor:
        if self.way.fold == "folded":
            return (scores.view(-1, self.way.heads, *scores.shape[-2:]) + self.table).flatten(0, 1)
        return scores + self.table

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        if self.mutate == "queries":
            return scores.softmax(-2) @ v
        if self.mutate == "gate":
            return F.softmax(v, -1) * scores.mean(-1, keepdim=True)
        weights = scores.softmax(-1)
        return weights @ v + (weights.mean() if self.mutate == "twice" else 0)


def scanned(module: nn.Module, way: Drawn) -> Any:
    captured = capture("drawn", module.eval(), (torch.randn(2, way.tokens, way.heads * way.dim),))
    return captured, scan(FxGraph(captured.module), "drawn")


@ROUNDS
@given(way=ways)
def test_drawn_attention_is_found_and_rewrites_to_itself(way: Drawn) -> None:
    torch.manual_seed(0)
    captured, found = scanned(Written(way), way)
    assert [(s.heads, s.head_dim, s.n_queries, s.n_keys, s.windows) for s in found.sites] == [
        (way.heads, way.dim, way.seen, way.seen, 4 if way.window else 1)
    ]
    assert found.sites[0].bias == ("none" if way.bias == "none" else "constant")
    softmax = get_variant("softmax")
    rewritten = FxRewrite(Plan("drawn", (Placement.at(found.sites[0], softmax),)))(captured.module)
    x = torch.randn(3, way.tokens, way.heads * way.dim)
    with torch.no_grad():
        assert relative_error(rewritten(x), captured.module(x)) < 1e-5


@ROUNDS
@given(way=ways, mutation=st.sampled_from(["queries", "gate", "twice"]))
def test_mutated_attention_is_not_taken_for_attention(way: Drawn, mutation: str) -> None:
    torch.manual_seed(0)
    _, found = scanned(Written(way, mutation), way)
    if mutation == "twice":
        assert [site.probs_escape for site in found.sites] == [True]
        assert str(get_variant("l1").refuse(found.sites[0])) == "its probabilities are used elsewhere in the model"
    else:
        reason = "normalised-over-queries" if mutation == "queries" else "no-product"
        assert not found.sites
        assert [miss.code for miss in found.near_misses] == [reason]
