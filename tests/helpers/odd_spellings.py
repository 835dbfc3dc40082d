"""Odd ways to write attention, each with what is to become of it: what is accepted must be right for every input.

`right`: a site that softmax stands at, equal to the original. `no core`: a site that says why nothing can stand there.
`not a site`: a near miss. Every module takes x [batch, 12, 24], with 4 heads of 6, and computes in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from spellings import HEADS, SCALE, TOKENS, WIDTH, attend, heads, merged, packed, separate, unpacked
from torch import Tensor, nn

INF = math.inf
NEAR = torch.ones(TOKENS, TOKENS).tril(3).triu(-3) > 0
ONE_ROW = torch.ones(TOKENS, TOKENS).index_fill(0, torch.tensor([5]), 0) > 0  # query 5 sees nothing
SHUFFLED = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 11, 10])
PLACES = torch.arange(TOKENS)[:, None].sub(torch.arange(TOKENS)).abs() % 5
Expected = Literal["right", "no core", "not a site"]


@dataclass(frozen=True)
class Odd:
    name: str
    expected: Expected
    parts: Callable[[], dict[str, Any]]
    run: Callable[[Any, Tensor], Tensor]


class OddModule(nn.Module):
    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.odd = odd
        for name, part in odd.parts().items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd.run(self, x)


def build_odd(odd: Odd) -> nn.Module:
    torch.manual_seed(11)
    module = OddModule(odd).eval().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.6, 0.6) if parameter.dim() > 1 else parameter.uniform_(0.2, 1.0)
    return module


def drawn(batch: int, scale: float, seed: int) -> Tensor:
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def tables(**shapes: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: packed() | {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def scored(name: str, expected: Expected, change: Callable[[Any, Tensor, Tensor], Tensor], parts: Any = packed) -> Odd:
    """Attention whose scores are changed before the softmax; `change` is given the module, the input, the scores."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(change(m, x, q @ k.mT * SCALE).softmax(-1) @ v))

    return Odd(name, expected, parts, run)


def shared_out(name: str, expected: Expected, share: Callable[[Tensor, Tensor], Tensor]) -> Odd:
    """Attention whose probabilities are made of scores and their exponentials by `share`."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        scores = q @ k.mT * SCALE
        return m.proj(merged(share(scores, scores.exp()) @ v))

    return Odd(name, expected, packed, run)


def divided_later(name: str, expected: Expected, weigh: Callable[[Tensor, Tensor], Tensor]) -> Odd:
    """Attention whose exponentials and values meet in `weigh`."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(weigh((q @ k.mT * SCALE).exp(), v)))

    return Odd(name, expected, packed, run)


def weighed(name: str, expected: Expected, change: Callable[[Any, Tensor, Tensor], Tensor], parts: Any = packed) -> Odd:
    """Attention whose probabilities are changed before they meet the values."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(change(m, x, (q @ k.mT * SCALE).softmax(-1)) @ v))

    return Odd(name, expected, parts, run)


def operands(
    name: str, expected: Expected, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], parts: Any = packed
) -> Odd:
    """Attention whose queries, keys and values are changed before they meet."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.proj(merged(attend(*change(*unpacked(m, x)))))

    return Odd(name, expected, parts, run)


def over_sum(powers: Tensor) -> Tensor:
    return powers / powers.sum(-1, keepdim=True)


def far(x: Tensor) -> Tensor:
    """A mask of keys that follows the input, [B, 1, 1, N]; some images have none left."""
    return (x[:, :, 0] < 0.4)[:, None, None, :]


def mutated(m: Any, x: Tensor) -> Tensor:
    m.gain.mul_(0.5)
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.mT * m.gain).softmax(-1) @ v))


def one_image(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(1, (HEADS, -1)).transpose(0, 1) for part in (m.q, m.k, m.v))
    return m.proj(attend(q, k, v).transpose(0, 1).flatten(1))


def grouped(m: Any, x: Tensor) -> Tensor:
    q, (k, v) = heads(m.q(x)), m.kv(x).unflatten(2, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
    return m.proj(merged(F.scaled_dot_product_attention(q, k, v, far(x).logical_not(), scale=0.3, enable_gqa=True)))


def halves(m: Any, x: Tensor) -> Tensor:
    """A softmax over each half of the keys."""
    q, k, v = unpacked(m, x)
    scores = (q @ k.mT * SCALE).unflatten(3, (2, TOKENS // 2)).softmax(-1).flatten(3)
    return m.proj(merged(scores @ v))


def pairs_of_queries(m: Any, x: Tensor) -> Tensor:
    """A softmax over the keys of two queries at once."""
    q, k, v = unpacked(m, x)
    scores = (q @ k.mT * SCALE).unflatten(2, (TOKENS // 2, 2)).flatten(3).softmax(-1)
    return m.proj(merged(scores.unflatten(3, (2, TOKENS)).flatten(2, 3) @ v))


def some_queries(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged(attend(q[:, :, 2:7], k, v)))


def some_tokens_first(m: Any, x: Tensor) -> Tensor:
    return m.proj(merged(attend(heads(m.q(x[:, 1:6])), heads(m.k(x[:, 3:])), heads(m.v(x[:, 3:])))))


def safe_rows(keep: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Probabilities set to zero by a rule on the scores."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        scores = (q @ k.mT * SCALE).masked_fill(~NEAR, -INF)
        weights = torch.where(keep(scores), 0.0, scores.softmax(-1))
        return m.proj(merged(weights @ v))

    return run


def difference_of_heads(m: Any, x: Tensor) -> Tensor:
    """Differential attention: the values of two heads go by one head's probabilities less a share of the other's."""
    q, k, v = unpacked(m, x)
    pairs = (q @ k.mT * SCALE).softmax(-1).unflatten(1, (HEADS // 2, 2))
    values = v.unflatten(1, (HEADS // 2, 2)).transpose(2, 3).flatten(3)
    return m.proj(merged((pairs[:, :, 0] - 0.3 * pairs[:, :, 1]) @ values))


def with_values(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = heads(m.q(x)), heads(m.k(x)), heads(m.v(change(x)))
        return m.proj(merged(attend(q, k, v)))

    return run


def strided(m: Any, x: Tensor) -> Tensor:
    """As many values as tokens, though a convolution reads every other one and what it is padded with."""
    v = m.conv(x[:, :9].mT.unflatten(2, (3, 3))).flatten(2).mT
    return m.proj(merged(attend(heads(m.q(x)), heads(m.k(x[:, :9])), heads(v))))


def transposed(m: Any, x: Tensor) -> Tensor:
    v = torch.ops.aten.convolution(
        x.mT.unflatten(2, (3, 4)), m.conv.weight, m.conv.bias, [1, 1], [0, 0], [1, 1], True, [0, 0], 1
    )
    return m.proj(merged(attend(heads(m.q(x)), heads(m.k(x)), heads(v.flatten(2).mT))))


def relative(m: Any, x: Tensor) -> Tensor:
    """A bias that each query gathers from its own products with a table."""
    q, k, v = unpacked(m, x)
    bias = (q @ m.table.mT).gather(-1, PLACES.expand(*q.shape[:2], -1, -1))
    return m.proj(merged((q @ k.mT * SCALE + bias).softmax(-1) @ v))


def scaled_under_views(m: Any, x: Tensor) -> Tensor:
    packed = m.qkv(x)
    parts = [heads(part) for part in packed.chunk(3, -1)]
    packed.mul_(0.5)
    return m.proj(merged(attend(*parts)))


def with_a_sink(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged(F.pad(q @ k.mT * SCALE, (1, 0)).softmax(-1)[..., 1:] @ v))


def over_images(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.mT * SCALE).softmax(0) @ v))


def head_in_place(m: Any, x: Tensor, s: Tensor) -> Tensor:
    s = s.clone()
    s[:, 1].mul_(0.1)
    return s


def added_to_a_part(m: Any, x: Tensor, s: Tensor) -> Tensor:
    """A bias between all tokens but the first, as of a grid behind a class token."""
    s = s.clone()
    s[:, :, 1:, 1:] += m.table
    return s


def added_as_pictures(m: Any, x: Tensor, s: Tensor) -> Tensor:
    """What MViTv2 adds behind its class token: by row and by column, with the scores laid out as two pictures."""
    s = s.clone()
    query = x[:, 4:, :6].view(-1, 1, 2, 4, 6)
    pictures = s[:, :, 4:, 4:].view(-1, HEADS, 2, 4, 2, 4)
    pictures = pictures + (query @ m.rows)[..., None] + (query @ m.columns)[..., None, :]
    s[:, :, 4:, 4:] = pictures.view(-1, HEADS, 8, 8)
    return s


def keys_written_over(m: Any, x: Tensor, s: Tensor) -> Tensor:
    s = s.clone()
    s[..., [1, 3]] = -math.inf
    return s


def subset(m: Any, x: Tensor) -> Tensor:
    """Five of each head's six channels take part in the scores."""
    q, k, v = unpacked(m, x)
    return m.proj(merged(attend(q[..., :5], k[..., :5], v)))


ODD = (
    # what multiplies the scores
    scored("gain of each head", "right", lambda m, x, s: s * m.gain, tables(gain=(HEADS, 1, 1))),
    scored("gain of each image", "right", lambda m, x, s: s * x.mean((1, 2))[:, None, None, None].sigmoid()),
    scored("gain of each head, spread out", "right", lambda m, x, s: s * m.gain.expand(-1, TOKENS, TOKENS),
           tables(gain=(HEADS, 1, 1))),
    scored("gain of each query", "no core", lambda m, x, s: s * m.gain, tables(gain=(TOKENS, 1))),
    scored("gain of each key", "no core", lambda m, x, s: s * m.gain, tables(gain=(1, TOKENS))),
    scored("zeros and ones of keys", "no core", lambda m, x, s: s * (~far(x)).double()),
    scored("zeros and ones of queries", "no core", lambda m, x, s: s * (~far(x)).mT.double()),
    scored("outer product of masks", "no core", lambda m, x, s: s * (~far(x) & ~far(x).mT).double()),
    scored("adjacency", "no core", lambda m, x, s: s * NEAR.double()),
    scored("adjacency of truth values", "no core", lambda m, x, s: s * NEAR),
    scored("two gains", "no core", lambda m, x, s: s * m.gain * m.other,
           tables(gain=(HEADS, 1, 1), other=(HEADS, 1, 1))),
    scored("gain after a bias", "no core", lambda m, x, s: (s + m.table) * m.gain,
           tables(gain=(HEADS, 1, 1), table=(TOKENS, TOKENS))),
    scored("divided by a tensor", "no core", lambda m, x, s: s / m.gain.exp(), tables(gain=(1, TOKENS))),
    Odd("gain that the forward pass changes", "right",
        lambda: packed() | {"gain": torch.ones(1)}, mutated),
    # arithmetic with arguments
    scored("added times alpha", "right", lambda m, x, s: torch.add(s, m.table, alpha=2),
           tables(table=(TOKENS, TOKENS))),
    scored("taken away times alpha", "right", lambda m, x, s: torch.sub(m.table, s, alpha=-0.5),
           tables(table=(TOKENS, TOKENS))),
    scored("a number added times alpha", "right", lambda m, x, s: torch.add(s, 3.0, alpha=2)),
    scored("rounded down by a division", "no core", lambda m, x, s: torch.div(s, 0.5, rounding_mode="floor")),
    scored("cut by a division", "no core", lambda m, x, s: torch.div(s, 0.5, rounding_mode="trunc")),
    scored("floor division", "no core", lambda m, x, s: s // 0.5),
    scored("whole numbers", "no core", lambda m, x, s: s.to(torch.int32).double()),
    scored("truth values", "no core", lambda m, x, s: s.to(torch.bool).double()),
    scored("type of whole numbers", "no core", lambda m, x, s: s.type_as(m.whole).double(),
           lambda: packed() | {"whole": torch.ones(1, dtype=torch.int64)}),
    scored("truth values added", "right", lambda m, x, s: s + NEAR),
    scored("truth values added twice", "right", lambda m, x, s: s + NEAR + ONE_ROW),
    scored("clamped", "no core", lambda m, x, s: s.clamp(-1, 1)),
    scored("bounded below", "no core", lambda m, x, s: s.clamp_min(0.1)),
    scored("soft capped", "no core", lambda m, x, s: 2 * torch.tanh(s / 2)),
    scored("squared", "no core", lambda m, x, s: s * s),
    scored("added to itself", "no core", lambda m, x, s: s + s),
    scored("turned about", "right", lambda m, x, s: 1.0 - s),
    # a maximum taken away
    scored("maximum of each query", "right", lambda m, x, s: s - s.amax(-1, keepdim=True)),
    scored("maximum of each query, spread out", "right", lambda m, x, s: s - s.amax(-1, keepdim=True).expand_as(s)),
    scored("maximum of each key", "right", lambda m, x, s: s - s.amax(-2, keepdim=True)),
    scored("maximum of all heads", "right", lambda m, x, s: s - s.amax(1, keepdim=True)),
    scored("maximum of everything", "right", lambda m, x, s: s - s.amax()),
    scored("maximum without its axis", "right", lambda m, x, s: s - s.amax(-1)[:, :, None]),
    scored("maximum before a mask", "right", lambda m, x, s: (s - s.amax(-1, keepdim=True)).masked_fill(far(x), -INF)),
    scored("a large number added to some queries", "right", lambda m, x, s: s + far(x).mT * -1e9),
    scored("mean of each query", "right", lambda m, x, s: s - s.mean(-1, keepdim=True)),
    Odd("difference of heads", "no core", packed, difference_of_heads),
    # masks
    scored("filled with -inf", "right", lambda m, x, s: s.masked_fill(~NEAR, -INF)),
    scored("filled with -1e4", "right", lambda m, x, s: s.masked_fill(far(x), -1e4)),
    scored("filled with -1e9, one query whole", "right", lambda m, x, s: s.masked_fill(~ONE_ROW, -1e9)),
    scored("filled with -1e4, one query whole", "right", lambda m, x, s: torch.where(ONE_ROW, s, -1e4)),
    scored("filled twice alike", "right", lambda m, x, s: s.masked_fill(~NEAR, -1e4).masked_fill(far(x), -1e4)),
    scored("filled twice unlike", "no core", lambda m, x, s: s.masked_fill(~NEAR, -1e4).masked_fill(far(x), -1e5)),
    scored("filled, then scaled down", "no core", lambda m, x, s: s.masked_fill(far(x), -1e4) * 1e-3),
    scored("filled, then scaled up", "right", lambda m, x, s: s.masked_fill(far(x), -1e4) * 2),
    scored("filled, then negated", "no core", lambda m, x, s: -s.masked_fill(far(x), -1e4)),
    scored("filled, then divided", "right", lambda m, x, s: torch.where(far(x), -1e9, s) / 2),
    scored("shifted, then filled", "right", lambda m, x, s: (s + 5e3).masked_fill(far(x), -1e4)),
    scored("filled, then biased", "no core", lambda m, x, s: s.masked_fill(far(x), -1e4) + m.table,
           tables(table=(TOKENS, TOKENS))),
    scored("filled with -inf, then biased", "right", lambda m, x, s: s.masked_fill(~NEAR, -INF) + m.table,
           tables(table=(TOKENS, TOKENS))),
    scored("biased, then filled", "right", lambda m, x, s: (s + m.table).masked_fill(far(x), -1e4),
           tables(table=(TOKENS, TOKENS))),
    scored("maximum taken away, then filled", "no core",
           lambda m, x, s: (s - s.amax(-1, keepdim=True)).masked_fill(far(x), -1e4)),
    scored("filled with 0", "no core", lambda m, x, s: s.masked_fill(far(x), 0.0)),
    scored("filled with a tensor", "no core", lambda m, x, s: torch.where(far(x), m.table, s),
           tables(table=(TOKENS, TOKENS))),
    scored("filled where the scores are low", "right", lambda m, x, s: s.masked_fill(s < -1, -1e4)),
    scored("added mask of -1e4", "right", lambda m, x, s: s + far(x) * -1e4),
    scored("written into a slice", "no core", lambda m, x, s: torch.cat([s[..., :1] * 0, s[..., 1:]], -1)),
    scored("upper triangle of zeros", "not a site", lambda m, x, s: s.tril()),
    Odd("fused with truth values", "right", packed,
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), attn_mask=NEAR)))),
    Odd("fused with an input's mask", "right", packed,
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), attn_mask=~far(x))))),
    Odd("fused with numbers", "right", packed,
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), attn_mask=NEAR.double())))),
    Odd("fused with dropout", "no core", packed,
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), dropout_p=0.3)))),
    Odd("fused with heads of keys for two of queries each", "right",
        lambda: {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "kv", "proj")}, grouped),
    Odd("rows of -inf cleared", "right", packed, safe_rows(lambda s: (s == -INF).all(-1, keepdim=True))),
    Odd("rows with one -inf cleared", "no core", packed, safe_rows(lambda s: (s == -INF).any(-1, keepdim=True))),
    Odd("columns of -inf cleared", "no core", packed, safe_rows(lambda s: (s == -INF).all(-2, keepdim=True))),
    Odd("all but -inf cleared", "no core", packed, safe_rows(lambda s: s != -INF)),
    scored("log of a mask", "right", lambda m, x, s: s + (~far(x)).double().log()),
    scored("the largest scores kept", "right", lambda m, x, s: torch.where(s < s.topk(4).values[..., -1:], -INF, s)),
    scored("the largest scores kept by scatter", "right",
           lambda m, x, s: s + torch.full_like(s, -INF).scatter(-1, s.topk(4).indices, 0.0)),
    scored("table chosen by the input's order", "right",
           lambda m, x, s: s + m.table[x[:, :, 0].argsort(-1)][:, None], tables(table=(TOKENS, TOKENS))),
    scored("filled, biased, filled", "no core",
           lambda m, x, s: (s.masked_fill(far(x), -1e4) + m.table).masked_fill(far(x), -1e4),
           tables(table=(TOKENS, TOKENS))),
    scored("added mask, then a gain", "no core", lambda m, x, s: (s + far(x) * -1e4) * m.gain,
           tables(gain=(HEADS, 1, 1))),
    scored("temperature of each query's token", "no core", lambda m, x, s: s * x.mean(-1)[:, None, :, None].sigmoid()),
    scored("gain of an image's place in the batch", "right",
           lambda m, x, s: s * (1 + torch.arange(x.shape[0])[:, None, None, None])),
    scored("times the batch's size", "no core", lambda m, x, s: s * x.shape[0]),
    scored("a head scaled in place", "no core", head_in_place),
    scored("a bias added to a part", "right", added_to_a_part, tables(table=(TOKENS - 1, TOKENS - 1))),
    scored("biases added to a part as pictures", "right", added_as_pictures, tables(rows=(6, 2), columns=(6, 4))),
    scored("keys written over by their numbers", "right", keys_written_over),
    Odd("relative bias of each query", "right", lambda: packed() | {"table": nn.Parameter(torch.randn(5, WIDTH // 4))},
        relative),
    Odd("packed projection scaled under its views", "right", packed, scaled_under_views),
    Odd("a sink beside the keys", "not a site", packed, with_a_sink),
    Odd("softmax over images", "not a site", packed, over_images),
    # what lies where
    scored("keys of scores rolled", "no core", lambda m, x, s: s.roll(1, -1)),
    scored("queries of scores rolled", "no core", lambda m, x, s: s.roll(2, -2)),
    scored("keys of scores flipped", "no core", lambda m, x, s: s.flip(-1)),
    scored("keys rolled for a bias, and back", "no core", lambda m, x, s: (s.roll(1, -1) + m.table).roll(-1, -1),
           tables(table=(TOKENS, TOKENS))),
    scored("scores turned over", "right", lambda m, x, s: s.mT),
    scored("heads of scores rolled", "no core", lambda m, x, s: s.roll(1, 1)),
    weighed("keys of probabilities rolled", "no core", lambda m, x, p: p.roll(1, -1)),
    weighed("queries of probabilities flipped", "no core", lambda m, x, p: p.flip(-2)),
    weighed("probabilities of another image", "no core", lambda m, x, p: p.flip(0)),
    weighed("probabilities turned over", "not a site", lambda m, x, p: p.mT),
    weighed("probabilities scaled", "no core", lambda m, x, p: p * 2),
    weighed("probabilities dropped", "no core", lambda m, x, p: F.dropout(p, 0.3, training=True)),
    weighed("probabilities dropped in evaluation", "right", lambda m, x, p: F.dropout(p, 0.3, training=False)),
    weighed("probabilities rounded", "no core", lambda m, x, p: p.to(torch.int32).double()),
    weighed("probabilities masked", "no core", lambda m, x, p: p * NEAR),
    # exponentials, over what is their sum or only looks like it
    shared_out("over their sum", "right", lambda s, e: e / e.sum(-1, keepdim=True)),
    shared_out("over their sum, spread", "not a site", lambda s, e: e / e.sum(-1, keepdim=True).expand_as(e)),
    shared_out("over their sum, turned over", "not a site", lambda s, e: e / e.sum(-1).unsqueeze(-2)),
    shared_out("over the sum of another head's", "not a site", lambda s, e: e / e.sum(-1, keepdim=True).roll(1, 1)),
    shared_out("over the sum of another query's", "not a site", lambda s, e: e / e.sum(-1, keepdim=True).flip(2)),
    shared_out("over the sum of each key's", "not a site", lambda s, e: e / e.sum(-2, keepdim=True)),
    shared_out("over the sum of all", "not a site", lambda s, e: e / e.sum((-2, -1), keepdim=True)),
    shared_out("over their sum and a little", "not a site", lambda s, e: e / (e.sum(-1, keepdim=True) + 0.1)),
    shared_out("over their mean", "not a site", lambda s, e: e / e.mean(-1, keepdim=True)),
    shared_out("over the sum of those near", "not a site", lambda s, e: e / (e * NEAR).sum(-1, keepdim=True)),
    shared_out("over the sum of others", "not a site", lambda s, e: e / (s - 0.5).exp().sum(-1, keepdim=True)),
    shared_out("the sum over them", "not a site", lambda s, e: e.sum(-1, keepdim=True) / e),
    shared_out("over their sum, and read again", "no core",
               lambda s, e: e / e.sum(-1, keepdim=True) + e.mean(-1, keepdim=True)),
    # powers of other numbers are exponentials, too
    shared_out("powers of two, over their sum", "right", lambda s, e: over_sum(s.exp2())),
    shared_out("powers of a number, over their sum", "right", lambda s, e: over_sum(3.0**s)),
    shared_out("powers of less than one, over their sum", "right", lambda s, e: over_sum(0.5**s)),
    shared_out("powers of a constant, over their sum", "right",
               lambda s, e: over_sum(torch.pow(torch.full((1,), 2.5), s))),
    shared_out("powers of a constant, alone", "not a site", lambda s, e: torch.pow(torch.full((1,), 2.5), s)),
    shared_out("powers of a constant of more axes, over their sum", "not a site",
               lambda s, e: over_sum(torch.pow(torch.full((1, 1, 1, 1, 1), 2.5), s))[0]),
    # divided by what is their sum, or only looks like it, once they have met the values
    divided_later("values, over the sum", "right", lambda e, v: (e @ v) / e.sum(-1, keepdim=True)),
    divided_later("values, over the sum spread", "right", lambda e, v: (e @ v) / e.sum(-1)[..., None].expand_as(v)),
    divided_later("values turned, over the sum", "right", lambda e, v: ((v.mT @ e.mT) / e.sum(-1)[..., None, :]).mT),
    divided_later("values, by heads in the batch, over the sum", "right",
                  lambda e, v: (e.flatten(0, 1).bmm(v.flatten(0, 1)) / e.sum(-1).view(-1, TOKENS, 1)).view_as(v)),
    divided_later("values, over each key's sum", "not a site", lambda e, v: (e @ v) / e.sum(-2)[..., None]),
    divided_later("values, over another query's sum", "not a site",
                  lambda e, v: (e @ v) / e.sum(-1, keepdim=True).flip(2)),
    divided_later("values, over another head's sum", "not a site",
                  lambda e, v: (e @ v) / e.sum(-1, keepdim=True).roll(1, 1)),
    divided_later("values, over the sum of all", "not a site", lambda e, v: (e @ v) / e.sum((-2, -1), keepdim=True)),
    divided_later("values, over the sum and a little", "not a site",
                  lambda e, v: (e @ v) / (e.sum(-1, keepdim=True) + 0.1)),
    divided_later("values, over the sum, and read again", "not a site",
                  lambda e, v: (e @ v) / e.sum(-1, keepdim=True) + e.mean(-1, keepdim=True)),
    divided_later("values, over the sum, and added", "not a site",
                  lambda e, v: (mixed := e @ v) / e.sum(-1, keepdim=True) + mixed),
    shared_out("powers of two, over the sum of powers of e", "not a site",
               lambda s, e: s.exp2() / e.sum(-1, keepdim=True)),
    divided_later("the sum over values", "not a site", lambda e, v: e.sum(-1, keepdim=True) / (e @ v)),
    Odd("a softmax over half of the keys", "no core", packed, halves),
    Odd("a softmax over the keys of two queries", "not a site", packed, pairs_of_queries),
    operands("values flipped", "no core", lambda q, k, v: (q, k, v.flip(2))),
    operands("values rolled", "no core", lambda q, k, v: (q, k, v.roll(3, 2))),
    operands("keys shuffled", "no core", lambda q, k, v: (q, k[:, :, SHUFFLED], v)),
    operands("keys and values shuffled alike", "right", lambda q, k, v: (q, k[:, :, SHUFFLED], v[:, :, SHUFFLED])),
    operands("keys and values flipped", "right", lambda q, k, v: (q, k.flip(2), v.flip(2))),
    operands("all rolled", "right", lambda q, k, v: (q.roll(1, 2), k.roll(1, 2), v.roll(1, 2))),
    operands("queries flipped", "right", lambda q, k, v: (q.flip(2), k, v)),
    operands("values of other heads", "right", lambda q, k, v: (q, k, v.roll(1, 1))),
    operands("some keys and values", "right", lambda q, k, v: (q, k[:, :, 2:9], v[:, :, 2:9])),
    operands("every other key", "right", lambda q, k, v: (q, k[:, :, ::2], v[:, :, ::2])),
    operands("keys and values of unlike slices", "right", lambda q, k, v: (q, k[:, :, :6], v[:, :, 6:])),
    operands("queries whole numbers", "right", lambda q, k, v: (q.to(torch.int32).double(), k, v)),
    operands("queries divided down", "right", lambda q, k, v: (torch.div(q, 0.3, rounding_mode="floor"), k, v)),
    operands("keys through dropout of nothing", "right", lambda q, k, v: (q, F.dropout(k, 0.0, training=True), v)),
    operands("queries clamped", "right", lambda q, k, v: (q.clamp(-1, 1), k, v)),
    operands("keys masked", "right", lambda q, k, v: (q, k * (k[:, :, :, :1] > 0), v)),
    operands("values padded with zeros", "right", lambda q, k, v: (q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)))),
    Odd("each image by vmap", "right", separate, lambda m, x: torch.vmap(lambda one: one_image(m, one))(x)),
    Odd("some queries", "right", packed, some_queries),
    Odd("other tokens for queries than for keys", "right", separate, some_tokens_first),
    Odd("some channels", "right", packed, subset),
    Odd("values of a convolution by steps", "right",
        lambda: separate() | {"conv": nn.Conv2d(WIDTH, WIDTH, 1, stride=2, padding=1)}, strided),
    Odd("values of a transposed convolution", "right",
        lambda: separate() | {"conv": nn.ConvTranspose2d(WIDTH, WIDTH, 1)}, transposed),
    Odd("tokens in place of channels normalised", "right", lambda: separate() | {"norm": nn.BatchNorm1d(TOKENS)},
        lambda m, x: m.proj(merged(attend(heads(m.norm(m.q(x))), heads(m.norm(m.k(x))), heads(m.norm(m.v(x))))))),
    Odd("values of flipped tokens", "no core", separate, with_values(lambda x: x.flip(1))),
    Odd("values of another image", "right", separate, with_values(lambda x: x.flip(0))),
    Odd("values of shifted tokens", "no core", separate, with_values(lambda x: x.roll(1, 1))),
)  # fmt: skip
