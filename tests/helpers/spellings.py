"""One attention in as many spellings as people use: modules for the matcher's tests, with what is true of them.

Every spelling takes x [batch, 12, 24] (a 3 x 4 grid where it needs one) and has 4 heads of 6 unless it says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, WIDTH, HEADS = 2, 12, 24, 4
DIM = WIDTH // HEADS
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Spelling:
    """`parts` are the module's children by name, `run(module, x)` its forward; `truth` overrides what all share."""

    name: str
    parts: Callable[[], dict[str, Any]]
    run: Callable[[Any, Tensor], Tensor]
    truth: dict[str, Any] = field(default_factory=dict)
    traced: bool = True  # all four projections lead to parameters
    inputs: Callable[[], Tensor] = lambda: torch.randn(BATCH, TOKENS, WIDTH)


class Spelled(nn.Module):
    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        for name, part in spelling.parts().items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling.run(self, x)


def build(spelling: Spelling) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(7)
    module = Spelled(spelling).eval()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(-0.6, 0.6) if tensor.dim() > 1 else tensor.uniform_(0.2, 1.0)
    return module, spelling.inputs()


def packed() -> dict[str, Any]:
    return {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)}


def separate(out: int = WIDTH) -> dict[str, Any]:
    return {name: nn.Linear(WIDTH, out) for name in ("q", "k", "v")} | {"proj": nn.Linear(out, WIDTH)}


def conv() -> dict[str, Any]:
    return {"qkv": nn.Conv2d(WIDTH, 3 * WIDTH, 1), "proj": nn.Conv2d(WIDTH, WIDTH, 1)}


def heads(t: Tensor) -> Tensor:
    return t.view(t.shape[0], -1, HEADS, DIM).transpose(1, 2)


def merged(t: Tensor) -> Tensor:
    return t.transpose(1, 2).reshape(t.shape[0], -1, HEADS * DIM)


def unpacked(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    return m.qkv(x).reshape(x.shape[0], -1, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float = SCALE, bias: Any = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * scale
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def folded_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(p(x)).reshape(-1, TOKENS, DIM) for p in (m.q, m.k, m.v))
    out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(SCALE).softmax(-1), v)
    return m.proj(merged(out.view(-1, HEADS, TOKENS, DIM)))


def head_before_batch(m: Any, x: Tensor) -> Tensor:
    q, k, v = (p(x).view(-1, TOKENS, HEADS, DIM).permute(2, 0, 1, 3).reshape(-1, TOKENS, DIM) for p in (m.q, m.k, m.v))
    out = attend(q, k, v).view(HEADS, -1, TOKENS, DIM)
    return m.proj(out.permute(1, 2, 0, 3).reshape(-1, TOKENS, WIDTH))


def keys_as_rows(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    weights = (k @ q.transpose(-2, -1) * SCALE).softmax(-2)
    return m.proj((v.transpose(-2, -1) @ weights).permute(0, 3, 1, 2).flatten(2))


def einsum(m: Any, x: Tensor) -> Tensor:
    q, k, v = (p(x).view(-1, TOKENS, HEADS, DIM) for p in (m.q, m.k, m.v))
    weights = torch.einsum("bnhd,bmhd->bhnm", q * SCALE, k).softmax(-1)
    return m.proj(torch.einsum("b h n m, b m h d -> b n h d", weights, v).flatten(2))


def maps(m: Any, x: Tensor) -> Tensor:
    image = x.transpose(1, 2).reshape(-1, WIDTH, 3, 4)
    q, k, v = m.qkv(image).reshape(-1, 3, HEADS, DIM, TOKENS).unbind(1)
    weights = (q.transpose(-2, -1) @ k * SCALE).softmax(-1)
    return m.proj((v @ weights.transpose(-2, -1)).reshape(-1, WIDTH, 3, 4))


def unfolded_maps(m: Any, x: Tensor) -> Tensor:
    image = x.transpose(1, 2).reshape(-1, WIDTH, 3, 4)
    q, k, v = F.unfold(m.qkv(image), 1).view(-1, 3, HEADS, DIM, TOKENS).unbind(1)
    weights = (q.transpose(-2, -1) @ k * SCALE).softmax(-1)
    return m.proj((v @ weights.transpose(-2, -1)).reshape(-1, WIDTH, 3, 4))


def maps_with_norm(m: Any, x: Tensor) -> Tensor:
    image = x.transpose(1, 2).reshape(-1, WIDTH, 3, 4)
    q, k, v = m.norm(m.qkv(image)).flatten(2).view(-1, HEADS, 3 * DIM, TOKENS).split(DIM, dim=2)
    weights = (q.transpose(-2, -1) @ k * SCALE).softmax(-1)
    return m.proj((v @ weights.transpose(-2, -1)).reshape(-1, WIDTH, 3, 4))


def windows_before(m: Any, x: Tensor) -> Tensor:
    tokens = x.view(-1, 2, 2, 3, 2, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, WIDTH)
    out = m.proj(merged(attend(*unpacked(m, tokens))))
    return out.view(-1, 2, 3, 2, 2, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 24, WIDTH)


def windows_after(m: Any, x: Tensor) -> Tensor:
    qkv = m.qkv(x).view(-1, 2, 2, 3, 2, 3, HEADS, DIM).permute(5, 0, 1, 3, 6, 2, 4, 7)
    q, k, v = (part.reshape(-1, 6, HEADS, 4, DIM) for part in qkv)
    out = attend(q, k, v).view(-1, 2, 3, HEADS, 2, 2, DIM).permute(0, 1, 4, 2, 5, 3, 6)
    return m.proj(out.reshape(-1, 24, WIDTH))


def window_masks(m: Any, x: Tensor) -> Tensor:
    tokens = x.view(-1, 2, 2, 3, 2, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, WIDTH)
    q, k, v = unpacked(m, tokens)
    scores = q @ k.transpose(-2, -1) * SCALE + m.table
    scores = scores.view(-1, 6, HEADS, 4, 4) + m.mask[None, :, None]
    return m.proj(merged(scores.view(-1, HEADS, 4, 4).softmax(-1) @ v))


def rotary(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    turn = lambda t: t * m.cos + torch.cat([-t[..., 3:], t[..., :3]], -1) * m.sin  # noqa: E731
    return m.proj(merged(attend(turn(q), turn(k), v)))


def rotary_in_complex_numbers(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    unit = torch.polar(torch.ones_like(m.angle), m.angle)[None, None]
    turn = lambda t: torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * unit).flatten(3)  # noqa: E731
    return m.proj(merged(attend(turn(q), turn(k), v)))


def cosine(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return m.proj(merged((scores * m.temperature.clamp(max=4.0).exp()).softmax(-1) @ v))


NEAR = torch.ones(TOKENS, TOKENS).tril(3).triu(-3) > 0


def written_over(fill: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Attention whose scores `fill` replaces where the keys are far."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(fill(q @ k.mT * SCALE).softmax(-1) @ v))

    return run


def added(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Attention whose scores `join` makes of the products and a table."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = unpacked(m, x)
        return m.proj(merged(join(q @ k.mT * SCALE, m.table).softmax(-1) @ v))

    return run


def multi_query(m: Any, x: Tensor) -> Tensor:
    k, v = (p(x).unsqueeze(1) for p in (m.k, m.v))
    return m.proj(merged(attend(heads(m.q(x)), k, v)))


def grouped_query(m: Any, x: Tensor) -> Tensor:
    k, v = (p(x).view(-1, TOKENS, 2, DIM).transpose(1, 2).repeat_interleave(2, dim=1) for p in (m.k, m.v))
    return m.proj(merged(attend(heads(m.q(x)), k, v)))


def interleaved(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(-1, TOKENS, DIM, HEADS, 3).permute(4, 0, 3, 1, 2).unbind(0)
    return m.proj(attend(q, k, v).permute(0, 2, 3, 1).reshape(-1, TOKENS, WIDTH))


def bias_by_parts(m: Any, x: Tensor) -> Tensor:
    bias = torch.cat([m.q_bias, torch.zeros_like(m.v_bias), m.v_bias])
    qkv = F.linear(x, m.qkv.weight, bias).view(-1, TOKENS, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
    return m.proj(merged(attend(qkv[0], qkv[1], qkv[2])))


def plain_products(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads((x.reshape(-1, WIDTH) @ w).view(-1, TOKENS, WIDTH)) for w in (m.wq, m.wk, m.wv))
    return merged(attend(q, k, v)) @ m.wo


def steadied(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(DIM)
    return m.proj(merged((scores - scores.amax(-1, keepdim=True)).softmax(-1).to(v.dtype) @ v))


def softmax_by_hand(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = q @ k.transpose(-2, -1) * SCALE
    exponentials = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return m.proj(merged(exponentials / exponentials.sum(-1).unsqueeze(-1) @ v))


def divided_after_the_values(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = q @ k.transpose(-2, -1) * SCALE
    exponentials = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return m.proj(merged((exponentials @ v) / exponentials.sum(-1, keepdim=True)))


def times_the_inverse(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    exponentials = torch.exp(q @ k.transpose(-2, -1) * SCALE)
    return m.proj(merged(exponentials.sum(-1, keepdim=True).reciprocal() * exponentials @ v))


def times_one_over_the_sum_after_the_values(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    exponentials = torch.exp(q @ k.transpose(-2, -1) * SCALE)
    return m.proj(merged((exponentials @ v) * (1 / exponentials.sum(-1, keepdim=True))))


def times_a_power_of_the_sum(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    exponentials = torch.exp(q @ k.transpose(-2, -1) * SCALE)
    return m.proj(merged(exponentials * exponentials.sum(-1, keepdim=True) ** -1 @ v))


def less_their_logsumexp(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = q @ k.transpose(-2, -1) * SCALE
    return m.proj(merged((scores - scores.logsumexp(-1).unsqueeze(-1)).exp() @ v))


def softmax_of_its_logarithm(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.transpose(-2, -1) * SCALE).log_softmax(-1).exp() @ v))


def other_names(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    scores = torch.linalg.matmul(torch.multiply(q, SCALE), torch.moveaxis(k, -1, -2))
    out = torch.linalg.matmul(torch.special.softmax(scores, -1), v).swapdims(1, 2)
    return m.proj(out.mT.adjoint().reshape_as(x))


def reduced_keys(m: Any, x: Tensor) -> Tensor:
    image = x.transpose(1, 2).reshape(-1, WIDTH, 3, 4)
    few = m.norm(m.reduce(image).flatten(2).transpose(1, 2))
    q, k, v = heads(m.q(x)), heads(m.k(few)), heads(m.v(few))
    return m.proj(merged(attend(q, k, v)))


def class_row(m: Any, x: Tensor) -> Tensor:
    return m.proj(merged(attend(heads(m.q(x[:, :1])), heads(m.k(x)), heads(m.v(x)))))


def learned_queries(m: Any, x: Tensor) -> Tensor:
    q = heads(m.q(m.latent).expand(x.shape[0], -1, -1))
    return m.proj(merged(attend(q, heads(m.k(x)), heads(m.v(x)))))


def queries_of_every_image(m: Any, x: Tensor) -> Tensor:
    scores = torch.einsum("hnd,bmhd->bhnm", heads(m.q(m.latent))[0], m.k(x).unflatten(-1, (HEADS, DIM)))
    return m.proj(torch.einsum("bhnm,bhmd->bnhd", (scores * SCALE).softmax(-1), heads(m.v(x))).flatten(-2))


def queries_of_every_image_by_tensordot(m: Any, x: Tensor) -> Tensor:
    scores = torch.tensordot(m.q(m.latent)[0], m.k(x) * WIDTH**-0.5, dims=([1], [2]))
    return m.proj(torch.einsum("nbm,bmd->bnd", scores.softmax(-1), m.v(x)))


def queries_of_every_head(m: Any, x: Tensor) -> Tensor:
    scores = torch.einsum("bnd,bhmd->bhnm", m.q(x) * SCALE, heads(m.k(x)))
    return m.proj(merged(scores.softmax(-1) @ heads(m.v(x))))


def weights_of_three_axes() -> dict[str, Any]:
    shapes = {
        "wq": (WIDTH, HEADS, DIM),
        "wk": (WIDTH, HEADS, DIM),
        "wv": (WIDTH, HEADS, DIM),
        "wo": (HEADS, DIM, WIDTH),
    }
    return with_parameters({}, **shapes, bias=(HEADS, DIM))()


def tokens_by_weights(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bnd,dhk->bnhk", x, weight) for weight in (m.wq, m.wk, m.wv))
    scores = torch.einsum("bnhk,bmhk->bhnm", (q + m.bias) * SCALE, k)
    return torch.einsum("bnhk,hkd->bnd", torch.einsum("bhnm,bmhk->bnhk", scores.softmax(-1), v), m.wo)


def weights_by_tokens(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("dhk,bnd->bhnk", weight, x) for weight in (m.wq, m.wk, m.wv))
    out = torch.einsum("bhnk,bhmk->bhnm", q * SCALE, k).softmax(-1) @ v
    return torch.einsum("hkd,bhnk->bnd", m.wo, out)


def scaled_in_the_einsum(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged(torch.einsum("bhnd,bhmd,h->bhnm", q, k, m.scale).softmax(-1) @ v))


def module_attention(m: Any, x: Tensor) -> Tensor:
    return m.attention(x, x, x, need_weights=False)[0]


def module_with_weights(m: Any, x: Tensor) -> Tensor:
    return m.attention(x, x, x, attn_mask=~NEAR, need_weights=True)[0]


def attention_parts(**options: Any) -> dict[str, Any]:
    return {"attention": nn.MultiheadAttention(WIDTH, HEADS, **options)}


def with_parameters(parts: dict[str, Any], **shapes: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: parts | {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def mixed(m: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhij,hg->bgij", query @ key.mT * SCALE, m.mix)
    return m.proj(merged(scores.softmax(-1) @ value))


def over_parts(m: Any, x: Tensor) -> Tensor:
    parts = x.view(-1, TOKENS, HEADS, DIM)
    scores = (m.k(parts).flatten(0, 2) @ m.q(x.mean(dim=(0, 1)).view(HEADS, DIM)).mT).view(-1, TOKENS, HEADS, HEADS)
    return scores.softmax(dim=2).mT @ parts


def pooled_queries(m: Any, x: Tensor) -> Tensor:
    query = heads(m.q(x)).unflatten(2, (3, TOKENS // 3)).amax(dim=2)
    return m.proj(merged(attend(query, heads(m.k(x)), heads(m.v(x)))))


BIASED = with_parameters(packed(), table=(HEADS, TOKENS, TOKENS))

SPELLINGS = [
    Spelling("packed", packed, lambda m, x: m.proj(merged(attend(*unpacked(m, x))))),
    Spelling("separate", separate, lambda m, x: m.proj(merged(attend(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))))),
    Spelling(
        "chunked", packed, lambda m, x: m.proj(merged(attend(*(heads(part) for part in m.qkv(x).chunk(3, dim=-1)))))
    ),
    Spelling("fused", packed, lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x))))),
    Spelling(
        "fused with scale",
        packed,
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), scale=0.25))),
        {"scale": 0.25},
    ),
    Spelling(
        "fused with bias",
        with_parameters(packed(), table=(HEADS, TOKENS, TOKENS)),
        lambda m, x: m.proj(merged(F.scaled_dot_product_attention(*unpacked(m, x), attn_mask=m.table))),
        {"bias": "constant"},
    ),
    Spelling(
        "activation before the output map",
        packed,
        lambda m, x: m.proj(F.hardswish(merged(attend(*unpacked(m, x))))),
    ),
    Spelling(
        "norm before the output map",
        lambda: packed() | {"norm": nn.LayerNorm(WIDTH)},
        lambda m, x: m.proj(m.norm(merged(attend(*unpacked(m, x))))),
    ),
    Spelling(
        "output read twice",
        packed,
        lambda m, x: (lambda out: torch.cat([m.proj(out), out], dim=-1))(merged(attend(*unpacked(m, x)))),
    ),
    Spelling(
        "channels",
        packed,
        lambda m, x: m.proj(merged(attend(*(part.mT for part in unpacked(m, x))).mT)),
        {"axis": "channel", "n_queries": DIM, "n_keys": DIM, "head_dim": TOKENS, "value_dim": TOKENS},
    ),
    Spelling("pooled queries", separate, pooled_queries, {"n_queries": TOKENS // 3}),
    Spelling("folded heads", separate, folded_heads),
    Spelling("head before batch", separate, head_before_batch),
    Spelling("keys as rows", packed, keys_as_rows),
    Spelling("einsum", separate, einsum),
    Spelling(
        "scale before",
        packed,
        lambda m, x: m.proj(merged(attend(unpacked(m, x)[0] * 0.5, unpacked(m, x)[1] / 4, unpacked(m, x)[2], 1.0))),
        {"scale": 0.125},
    ),
    Spelling("convolutions", conv, maps, {"output_shape": (WIDTH, 3, 4)}),
    Spelling("convolutions, unfolded", conv, unfolded_maps, {"output_shape": (WIDTH, 3, 4)}),
    Spelling("convolutions with norm", lambda: conv() | {"norm": nn.BatchNorm2d(3 * WIDTH)}, maps_with_norm),
    Spelling(
        "convolutions with norm without weights",
        lambda: conv() | {"norm": nn.BatchNorm2d(3 * WIDTH, affine=False)},
        maps_with_norm,
    ),
    Spelling(
        "windows before",
        packed,
        windows_before,
        {"n_queries": 4, "n_keys": 4, "windows": 6, "grid": (2, 2, 0)},
        inputs=lambda: torch.randn(BATCH, 24, WIDTH),
    ),
    Spelling(
        "windows after",
        packed,
        windows_after,
        {"n_queries": 4, "n_keys": 4, "windows": 6},
        inputs=lambda: torch.randn(BATCH, 24, WIDTH),
    ),
    Spelling(
        "window masks",
        with_parameters(packed(), table=(HEADS, 4, 4), mask=(6, 4, 4)),
        window_masks,
        {"n_queries": 4, "n_keys": 4, "windows": 6, "bias": "constant"},
        inputs=lambda: torch.randn(BATCH, 24, WIDTH),
    ),
    Spelling("rotary", with_parameters(packed(), cos=(TOKENS, DIM), sin=(TOKENS, DIM)), rotary, {"rope": True}),
    Spelling(
        "rotary, in complex numbers",
        with_parameters(packed(), angle=(TOKENS, DIM // 2)),
        rotary_in_complex_numbers,
        {"rope": True},
    ),
    Spelling("bias times alpha", BIASED, added(lambda s, t: torch.add(s, t, alpha=2)), {"bias": "constant"}),
    Spelling("bias taken away times alpha", BIASED, added(lambda s, t: s.sub(t, alpha=3)), {"bias": "constant"}),
    Spelling(
        "scores times alpha",
        BIASED,
        added(lambda s, t: torch.add(t, s, alpha=2)),
        {"bias": "constant", "scale": 2 * SCALE},
    ),
    Spelling(
        "scores taken away times alpha",
        BIASED,
        added(lambda s, t: t.sub(s, alpha=-3)),
        {"bias": "constant", "scale": 3 * SCALE},
    ),
    Spelling("mask filled", packed, written_over(lambda s: s.masked_fill(~NEAR, -math.inf)), {"bias": "constant"}),
    Spelling("mask chosen", packed, written_over(lambda s: torch.where(NEAR, s, -1e9)), {"bias": "constant"}),
    Spelling(
        "mask chosen, then scaled",
        packed,
        written_over(lambda s: torch.where(~NEAR, torch.tensor(-1e9), s * 4) / 2),
        {"bias": "constant", "scale": 2 * SCALE},
    ),
    Spelling("mask that keeps all", packed, written_over(lambda s: s.masked_fill(NEAR.new_zeros(1), -1e9))),
    Spelling("cosine", with_parameters(packed(), temperature=(HEADS, 1, 1)), cosine, {"scale": None, "qk_norm": True}),
    Spelling(
        "multi query",
        lambda: {
            "q": nn.Linear(WIDTH, WIDTH),
            "k": nn.Linear(WIDTH, DIM),
            "v": nn.Linear(WIDTH, DIM),
            "proj": nn.Linear(WIDTH, WIDTH),
        },
        multi_query,
        {"kv_heads": 1},
    ),
    Spelling(
        "grouped query",
        lambda: {
            "q": nn.Linear(WIDTH, WIDTH),
            "k": nn.Linear(WIDTH, 2 * DIM),
            "v": nn.Linear(WIDTH, 2 * DIM),
            "proj": nn.Linear(WIDTH, WIDTH),
        },
        grouped_query,
        {"kv_heads": 2},
    ),
    Spelling("interleaved", packed, interleaved),
    Spelling("bias by parts", with_parameters(packed(), q_bias=(WIDTH,), v_bias=(WIDTH,)), bias_by_parts),
    Spelling(
        "plain products",
        with_parameters({}, wq=(WIDTH, WIDTH), wk=(WIDTH, WIDTH), wv=(WIDTH, WIDTH), wo=(WIDTH, WIDTH)),
        plain_products,
    ),
    Spelling("steadied", packed, steadied),
    Spelling("softmax by hand", packed, softmax_by_hand),
    Spelling("softmax by hand, divided after the values", packed, divided_after_the_values),
    Spelling("softmax by hand, times the inverse of the sum", packed, times_the_inverse),
    Spelling("softmax by hand, times one over the sum", packed, times_one_over_the_sum_after_the_values),
    Spelling("softmax by hand, times a power of the sum", packed, times_a_power_of_the_sum),
    Spelling("scores less their logsumexp", packed, less_their_logsumexp),
    Spelling("softmax of its logarithm", packed, softmax_of_its_logarithm),
    Spelling("other names", packed, other_names),
    Spelling(
        "reduced keys",
        lambda: separate() | {"reduce": nn.Conv2d(WIDTH, WIDTH, (1, 2), (1, 2)), "norm": nn.LayerNorm(WIDTH)},
        reduced_keys,
        {"n_keys": 6},
    ),
    Spelling("class row", separate, class_row, {"n_queries": 1}),
    Spelling(
        "learned queries",
        with_parameters(separate(), latent=(1, 3, WIDTH)),
        learned_queries,
        {"n_queries": 3, "kind": "cross"},
    ),
    Spelling(
        "queries of every image",
        with_parameters(separate(), latent=(1, 3, WIDTH)),
        queries_of_every_image,
        {"n_queries": 3, "kind": "cross"},
    ),
    Spelling(
        "queries of every image, by tensordot",
        with_parameters(separate(), latent=(1, 3, WIDTH)),
        queries_of_every_image_by_tensordot,
        {"n_queries": 3, "kind": "cross", "heads": 1, "kv_heads": 1, "head_dim": WIDTH, "value_dim": WIDTH}
        | {"scale": WIDTH**-0.5},
    ),
    Spelling(
        "queries of every head",
        lambda: separate() | {"q": nn.Linear(WIDTH, DIM)},
        queries_of_every_head,
    ),
    Spelling("weights of three axes", weights_of_three_axes, tokens_by_weights),
    Spelling("weights of three axes, before the tokens", weights_of_three_axes, weights_by_tokens),
    Spelling(
        "a scale of each head, in the einsum",
        with_parameters(packed(), scale=(HEADS,)),
        scaled_in_the_einsum,
        {"scale": None},
    ),
    Spelling("module, batch first", lambda: attention_parts(batch_first=True), module_attention),
    Spelling(
        "module that returns its weights, with a mask",
        lambda: attention_parts(batch_first=True),
        module_with_weights,
        {"bias": "constant"},
    ),
    Spelling(
        "module, tokens first", attention_parts, lambda m, x: module_attention(m, x.transpose(0, 1)).transpose(0, 1)
    ),
    Spelling(
        "module, keys of another width",
        lambda: attention_parts(batch_first=True, kdim=8, vdim=8) | {"narrow": nn.Linear(WIDTH, 8)},
        lambda m, x: m.attention(x, m.narrow(x), m.narrow(x), need_weights=False)[0],
    ),
]


def slots(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.transpose(-2, -1)).softmax(-2) @ v))


def over_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.transpose(-2, -1)).softmax(1) @ v))


def scores_alone(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return (q @ k.transpose(-2, -1)).softmax(-1).sum(1) + v.mean()


def learned_values(m: Any, x: Tensor) -> Tensor:
    q, k, _ = unpacked(m, x)
    return m.proj(merged((q @ k.transpose(-2, -1)).softmax(-1) @ m.proj.weight[:, : q.shape[-1]][: k.shape[-2]]))


def exponentials_alone(m: Any, x: Tensor) -> Tensor:
    q, k, v = unpacked(m, x)
    return m.proj(merged((q @ k.transpose(-2, -1)).exp() @ v))


def across_images(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 2) for part in unpacked(m, x))
    return m.proj(attend(q, k, v).transpose(0, 2).transpose(1, 2).reshape(-1, TOKENS, WIDTH))


def two_linears(*names: str) -> Callable[[], dict[str, Any]]:
    return lambda: {name: nn.Linear(WIDTH, WIDTH) for name in names}


NEAR_MISSES: list[tuple[str, str, Spelling]] = [
    (
        "no-product",
        "the softmax's input comes from linear",
        Spelling("gate", two_linears("gate", "value"), lambda m, x: m.gate(x).softmax(-1) * m.value(x)),
    ),
    (
        "no-product",
        "comes from matmul",
        Spelling(
            "a vector of weights",
            with_parameters(two_linears("value")(), weight=(WIDTH,)),
            lambda m, x: (m.weight @ x.flatten(0, 1).T).view(-1, 1, TOKENS).softmax(-1) @ m.value(x),
        ),
    ),
    (
        "output",
        "makes an output of the model",
        Spelling("classifier", two_linears("head"), lambda m, x: m.head(x.mean(1)).softmax(-1)),
    ),
    (
        "constant",
        "does not depend on the input",
        Spelling("mixing", with_parameters({}, mix=(TOKENS, TOKENS)), lambda m, x: m.mix.softmax(-1) @ x),
    ),
    ("normalised-over-queries", "over the other", Spelling("slots", packed, slots)),
    ("wrong-axis", "neither queries nor keys", Spelling("over heads", packed, over_heads)),
    ("no-values", "no product with values", Spelling("scores alone", packed, scores_alone)),
    ("no-values", "weights alone", Spelling("learned values", packed, learned_values)),
    ("unnormalised", "by their own sum", Spelling("exponentials alone", packed, exponentials_alone)),
    ("batch-mixing", "over images", Spelling("across images", packed, across_images)),
    (
        "partial-axis",
        "a part of the product's axis",
        Spelling(
            "over parts of each token",
            lambda: {"k": nn.Linear(DIM, DIM), "q": nn.Linear(DIM, DIM)},
            over_parts,
        ),
    ),
]

# sites that no variant can stand at, with why
MIXED = [
    Spelling(
        "scores mix heads",
        with_parameters(packed(), mix=(HEADS, HEADS)),
        lambda m, x: mixed(m, *unpacked(m, x)),
        {"n_queries": TOKENS, "kind": "self"},
    ),
    Spelling(
        "scores of learned queries mix heads",
        with_parameters(separate(), token=(1, 1, WIDTH), mix=(HEADS, HEADS)),
        lambda m, x: mixed(m, heads(m.q(m.token.expand(x.shape[0], -1, -1))), heads(m.k(x)), heads(m.v(x))),
        {"n_queries": 1, "kind": "cross"},
    ),
]
