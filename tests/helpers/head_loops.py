"""Attentions whose heads are computed one by one in a Python loop, the ways people write it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 12, 3, 16
EACH = WIDTH // HEADS


Join = Callable[[list[Tensor]], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | float = EACH**-0.5, bias: Tensor | float = 0.0) -> Tensor:
    return (q @ k.transpose(-2, -1) * scale + bias).softmax(-1) @ v


class Loop(nn.Module):
    """A residual attention over [batch, tokens, channels], its heads as `heads` gives them, joined by `join`."""

    def __init__(
        self, heads: Callable[["Loop", Tensor], Iterator[Tensor]], join: Callable[[list[Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.heads, self.join = heads, join
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.each = nn.ModuleList(nn.Linear(WIDTH, 3 * EACH) for _ in range(HEADS))
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(WIDTH, EACH) for _ in range(HEADS)) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.heat = nn.Linear(WIDTH, HEADS)
        self.register_buffer("hidden", torch.arange(TOKENS) % 5 == 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.join(list(self.heads(self, x))))


Heads = Callable[[Loop, Tensor], Iterator[Tensor]]


def last(heads: list[Tensor]) -> Tensor:
    return torch.cat(heads, dim=-1)


def stacked(heads: list[Tensor]) -> Tensor:
    return torch.stack(heads, dim=2).flatten(2)


def interleaved(heads: list[Tensor]) -> Tensor:
    return torch.stack(heads, dim=-1).flatten(2)


def turned(heads: list[Tensor]) -> Tensor:
    return torch.cat([head.transpose(1, 2) for head in reversed(heads)], dim=1).transpose(1, 2)


def assigned(heads: list[Tensor]) -> Tensor:
    made = torch.zeros_like(torch.cat(heads, -1))
    for h, head in enumerate(heads):
        made[:, :, h * EACH : (h + 1) * EACH] = head
    return made


def one_by_one(heads: list[Tensor]) -> Tensor:
    made = heads[0]
    for head in heads[1:]:
        made = torch.cat([made, head], dim=-1)
    return made


def slices(m: Loop, x: Tensor) -> Iterator[Tensor]:
    q, k, v = m.qkv(x).split(WIDTH, -1)
    for h in range(HEADS):
        mine = slice(h * EACH, (h + 1) * EACH)
        yield attend(q[..., mine], k[..., mine], v[..., mine])


def chunks(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for part in m.qkv(x).chunk(HEADS, -1):
        yield attend(*part.chunk(3, -1))


def separate(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for q, k, v in zip(m.q, m.k, m.v, strict=True):
        yield attend(q(x), k(x), v(x))


def packed(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for linear in m.each:
        yield attend(*linear(x).chunk(3, -1))


def fused(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for q, k, v in zip(m.q, m.k, m.v, strict=True):
        yield F.scaled_dot_product_attention(q(x), k(x), v(x))


def biased(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for part, bias in zip(m.qkv(x).chunk(HEADS, -1), m.bias, strict=True):
        yield attend(*part.chunk(3, -1), bias=bias)


def masked(m: Loop, x: Tensor, fill: float = -math.inf) -> Iterator[Tensor]:
    for part in m.qkv(x).chunk(HEADS, -1):
        q, k, v = part.chunk(3, -1)
        yield (q @ k.transpose(1, 2)).masked_fill(m.hidden, fill).softmax(-1) @ v


def shared_keys(m: Loop, x: Tensor) -> Iterator[Tensor]:
    k, v = m.k[0](x), m.v[0](x)
    for q in m.q:
        yield attend(q(x), k, v)


@dataclass(frozen=True)
class Apart:
    """Heads that cannot be joined: the `code` of the reason."""

    name: str
    heads: Heads
    join: Join
    code: str


def unlike_scales(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for h, part in enumerate(m.qkv(x).chunk(HEADS, -1)):
        yield attend(*part.chunk(3, -1), scale=1.0 + h)


def some_masked(m: Loop, x: Tensor) -> Iterator[Tensor]:
    for h, part in enumerate(m.qkv(x).chunk(HEADS, -1)):
        yield attend(*part.chunk(3, -1), bias=m.bias[h] if h else 0.0)


def filled(m: Loop, x: Tensor) -> Iterator[Tensor]:
    return masked(m, x, fill=-1e9)


def heated(m: Loop, x: Tensor) -> Iterator[Tensor]:
    heat = m.heat(x.mean(1)).unsqueeze(-1)
    for part in m.qkv(x).chunk(HEADS, -1):
        yield attend(*part.chunk(3, -1), scale=heat[:, :1])


def cascaded(m: Loop, x: Tensor) -> Iterator[Tensor]:
    made = torch.zeros_like(x[..., :EACH])
    for q, k, v in zip(m.q, m.k, m.v, strict=True):
        made = attend(q(x) + made, k(x), v(x))
        yield made


def tokens_beside(m: Loop, x: Tensor) -> Iterator[Tensor]:
    yield from [*chunks(m, x)][:-1]
    yield x[..., :EACH]


def halves(m: Loop, x: Tensor) -> Iterator[Tensor]:
    """Not heads: the same attention over each half of the tokens."""
    for half in x.chunk(2, 1):
        yield attend(*m.qkv(half).chunk(3, -1))


def tokens(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1)


JOINED = {
    "slices, concatenated": (slices, last),
    "slices, stacked": (slices, stacked),
    "slices, assigned to slices": (slices, assigned),
    "slices, one laid beside the others": (slices, one_by_one),
    "slices, channels interleaved": (slices, interleaved),
    "chunks, last head first": (chunks, turned),
    "a projection for each": (separate, last),
    "a packed projection for each": (packed, stacked),
    "fused attention": (fused, last),
    "a bias for each": (biased, last),
    "a mask for all": (masked, last),
    "keys shared": (shared_keys, last),
}
APART = (
    Apart("scales", unlike_scales, last, "unlike-heads"),
    Apart("one without a mask", some_masked, last, "unlike-heads"),
    Apart("a number as mask", filled, last, "number-masked"),
    Apart("a temperature", heated, last, "scores-multiplied"),
    Apart("cascaded", cascaded, last, "read-between"),
    Apart("tokens beside them", tokens_beside, last, "not-joined"),
    Apart("halves of the tokens", halves, tokens, "other-tokens"),
)
