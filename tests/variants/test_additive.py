"""Additive attention against the paper's own, what its fit leaves in the slots, and inputs with nothing in them."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite
from attnrewrite.variants import additive
from attnrewrite.variants.additive import (
    LEVEL,
    Additive,
    AdditiveForm,
    EfficientAdditiveAttention,
    additive_attention,
    steadiest_channel,
)
from attnrewrite.variants.base import Heads
from attnrewrite.variants.parts import tensors
from attnrewrite.variants.parts.softmax_rows import softmax_attention
from attnrewrite.variants.parts.tensors import merge_heads, split_heads

SITE = make_site(heads=2, head_dim=6, n_queries=15)
WIDTH = 12
QUERIES = [0, 1, 4, 12]
every_number_of_queries = pytest.mark.parametrize("queries", QUERIES)


def stream(site: AttentionSite = SITE, size: float = 1.0) -> Callable[[], Iterator[Heads]]:
    """A repeatable stream of activations at `site`, `size` times as large."""
    batches = [make_heads(site, batch=8, seed=seed) for seed in range(3)]
    return lambda: (Heads(*(size * part for part in heads[:3])) for heads in batches)


def refined(queries: int = 0, site: AttentionSite = SITE, size: float = 1.0) -> AdditiveForm:
    form = AdditiveForm(site.heads, site.head_dim, queries or site.heads, site.head_dim**-0.5).double()
    form.refine(stream(site, size))
    return form


def scattered(queries: int) -> AdditiveForm:
    """A form whose every constant is drawn."""
    torch.manual_seed(0)
    form = AdditiveForm(2, 6, queries, 6**-0.5).double()
    for parameter in form.parameters():
        torch.nn.init.normal_(parameter)
    return form


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_one_global_query_is_the_papers() -> None:
    query, key = drawn(2, 3, 15, WIDTH)
    weight = drawn(WIDTH, 1)
    query, key = F.normalize(query, dim=2), F.normalize(key, dim=2)
    alpha = F.normalize(query @ weight * WIDTH**-0.5, dim=1)
    close(additive_attention(2 * query, 3 * key, weight)[0], (alpha * query).sum(1, keepdim=True) * key)


@pytest.mark.parametrize("queries", [2, 3, 12])
def test_of_several_global_queries_each_is_the_papers_by_weights_of_its_own(queries: int) -> None:
    query, key = drawn(2, 3, 15, WIDTH)
    weight = drawn(WIDTH, queries)
    found, token = additive_attention(query, key, weight)
    own = [additive_attention(query, key, weight[:, [part]])[0].chunk(queries, dim=2)[part] for part in range(queries)]
    close(found, torch.cat(own, dim=2))
    close(token, F.normalize(query, dim=2))


@torch.no_grad()
def test_a_form_of_one_global_query_is_the_published_block() -> None:
    """Where value and query are the same tokens, the published projections are what fills the slots."""
    form, block = scattered(queries=1), EfficientAdditiveAttention(WIDTH).double()
    gate, values = form.slots.taken_out()
    for projection, own in ((block.to_query, values), (block.to_key, gate)):
        projection.load_state_dict({"weight": own.weight, "bias": own.bias})
    block.w_g.copy_(form.weight)
    block.proj.load_state_dict({
        "weight": torch.linalg.solve(form.final.weight, form.context.weight), "bias": torch.zeros(WIDTH)
    })  # fmt: skip
    block.final.load_state_dict({"weight": form.final.weight, "bias": form.context.bias})
    x = drawn(3, 15, WIDTH)
    close(merge_heads(form(*3 * [split_heads(x, 2)])), block(x))


@every_number_of_queries
def test_uncalibrated_it_is_the_paper_on_value_and_query(queries: int) -> None:
    heads, weight = make_heads(SITE), torch.ones(WIDTH, queries or 2, dtype=torch.float64)
    context, token = additive_attention(merge_heads(heads.value), merge_heads(heads.query), weight)
    close(merge_heads(Additive(queries=queries).build(SITE).double()(*heads)), context + token)


@every_number_of_queries
@torch.no_grad()
def test_a_fit_comes_closer_to_softmax_on_heads_that_it_never_saw(queries: int) -> None:
    forms = AdditiveForm(2, 6, queries or 2, 6**-0.5).double(), refined(queries)
    heads = make_heads(SITE, batch=8, seed=9)
    exact = softmax_attention(*heads[:3], 6**-0.5)
    before, after = ((form(*heads) - exact).square().mean() for form in forms)
    assert after < 0.4 * before
    assert after < 0.85 * exact.var((0, 2), correction=0).mean(), "and closer than the mean of all tokens"


@torch.no_grad()
def test_one_channel_of_both_slots_is_a_constant_beside_tokens_of_norm_one() -> None:
    form, (heads, *_) = refined(size=50.0), stream(size=50.0)()
    channel, _ = steadiest_channel(stream(size=50.0)(), 6**-0.5)
    for slot in form.slots(heads.query, heads.value):
        close(slot[..., channel], torch.full((8, 15), LEVEL, dtype=torch.float64))
        rest = slot.norm(dim=2).square() - LEVEL**2
        assert 0.5 < float(rest.mean()) < 1.5


@torch.no_grad()
def test_a_gate_is_fitted_to_the_directions_that_queries_have_most_of(monkeypatch: pytest.MonkeyPatch) -> None:
    three = drawn(2, 3, 6)

    def flat() -> Iterator[Heads]:
        return (heads._replace(query=heads.query[..., :3] @ three) for heads in stream()())

    def fitted(channels: int) -> AdditiveForm:
        monkeypatch.setattr(additive, "GATE_CHANNELS", channels)
        form = AdditiveForm(2, 6, 2, 6**-0.5).double()
        form.refine(flat)
        return form

    def error(form: AdditiveForm) -> float:
        return sum(float((form(*h) - softmax_attention(*h[:3], 6**-0.5)).square().mean()) for h in flat())

    every, three_of_them, one = fitted(6), fitted(3), fitted(1)
    assert error(three_of_them) == pytest.approx(error(every), rel=1e-2)
    ranks = [torch.linalg.matrix_rank(form.slots.gate).tolist() for form in (three_of_them, one)]
    assert ranks == [[3, 3], [1, 1]]


def test_a_second_fit_to_the_same_is_the_first() -> None:
    form = refined()
    with torch.no_grad():
        form.slots.level(3)
    form.refine(stream())
    for found, wanted in zip(form.parameters(), refined().parameters(), strict=True):
        close(found, wanted)


def test_the_channel_that_varies_least_is_of_softmaxs_output() -> None:
    """The values of channel 4 vary most within an image, and softmax of equal scores averages that away."""
    alternating = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(7)
    query, key, value, _ = make_heads(make_site(heads=2, head_dim=6, n_queries=14), batch=8)
    value[:, 0, :, 4] = 100 * alternating
    assert steadiest_channel(iter([Heads(query, 0 * key, value)]), 1.0)[0] == 4


@torch.no_grad()
def test_a_device_can_square_what_stands_in_fitted_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that compute in float16 alone have no squares beyond 65,504, and values may be in the hundreds."""
    form, heads = refined(size=100.0), next(stream(size=100.0)())
    exact = form(*heads)
    monkeypatch.setattr(tensors, "wide", lambda x: x)
    found = form.half()(*(part.half() for part in heads[:3]))
    assert (found.double() - exact).norm() <= 2e-3 * exact.norm()


NOTHING = {
    "no values": (make_site(n_queries=5), (1.0, 1.0, 0.0)),
    "no queries": (make_site(n_queries=5), (0.0, 1.0, 1.0)),
    "nothing at all": (make_site(n_queries=5), (0.0, 0.0, 0.0)),
    "one token": (make_site(n_queries=1), (1.0, 1.0, 1.0)),
    "one head": (make_site(heads=1), (1.0, 1.0, 1.0)),
    "channels of their own": (make_site(heads=3, head_dim=1), (1.0, 1.0, 1.0)),
    "one number": (make_site(heads=1, head_dim=1, n_queries=1), (1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", NOTHING)
def test_where_there_is_little_to_fit_all_is_finite(case: str, dtype: torch.dtype) -> None:
    site, sizes = NOTHING[case]
    form = Additive(exact_prefix=False).build(site).to(dtype)
    images = [make_heads(site, seed=seed, dtype=dtype)[:3] for seed in range(2)]
    given = [Heads(*(part * size for part, size in zip(parts, sizes, strict=True))) for parts in images]
    form.refine(lambda: iter(given))
    for heads in (*given, make_heads(site, seed=5, dtype=dtype)):
        out = form(*heads)
        assert torch.isfinite(out).all()
        out.float().square().mean().backward()
    assert all(torch.isfinite(tensor).all() for tensor in form.parameters())
    assert all(torch.isfinite(tensor.grad).all() for tensor in form.parameters() if tensor.grad is not None)


@every_number_of_queries
def test_multiplies_are_those_of_its_products_and_five_a_channel_beside(queries: int) -> None:
    variant = Additive(queries=queries)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        variant.build(SITE).double()(*make_heads(SITE, batch=1))
    sums = SITE.n_queries * WIDTH  # of the global queries: a product to torch
    assert variant.multiplies(SITE) == counter.get_total_flops() // 2 - sums + 5 * SITE.n_queries * WIDTH
