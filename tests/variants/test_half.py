"""Every form in half precision: nothing overflows, and the result is the exact one but for rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.registry import get_variant, variants

CASES = [(name, {}) for name in variants() if name != "softmax"] + [
    ("l1", {"centred": False}),
    ("l1", {"single_head": True}),
    ("mobile", {"reading": "code"}),
    ("mobile", {"reading": "paper"}),
    ("mobile", {"keep_heads": (0,)}),
    ("masked", {"soft": True}),
    ("masked", {"size": 5, "heads": (1,)}),
    ("separable", {"latents": 1}),
    ("additive", {"queries": 1}),
    ("polynomial", {"rank": 2}),
    ("relu-linear", {"local": True}),
]
LABELS = [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in CASES]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=LABELS)
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
both_types = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def uniform(site: AttentionSite, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value between -100 and 100."""
    generator = torch.Generator().manual_seed(0)
    sizes = (site.n_queries, site.head_dim), (site.n_keys, site.head_dim), (site.n_keys, site.value_dim)
    query, key, value = (
        (200 * torch.rand(1, site.heads, *size, generator=generator, dtype=torch.float64) - 100).to(dtype)
        for size in sizes
    )
    return query, key, value


def towards(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All queries and keys on one side, near 100: every score is about 100 * 100 * sqrt(d)."""
    return 100 + query / 100, 100 + key / 100, value


def away(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries on one side and keys on the other, so that features of keys come near zero."""
    return 100 + query / 100, -100 - key / 100, value


def as_they_are(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value


def one_token_stands_out(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A massive activation: one token a thousand times the others, which lie between -1 and 1."""
    size = torch.full((query.shape[2], 1), 0.01, dtype=query.dtype)
    size[5] = 10
    return query * size, key * size.roll(2), value * size.roll(4)


def error(name: str, options: dict, site: AttentionSite, parts: tuple[Tensor, ...]) -> float:
    """How far the form in the parts' type is from the form in float64 on the same numbers, relative, beyond what
    float32 loses there: scores of 80,000 have few digits left for what they differ by.
    """
    form = get_variant(name, options).build(site)
    with torch.no_grad():
        rounded = form.to(parts[0].dtype)(*parts)
        assert rounded.dtype == parts[0].dtype
        single = form.float()(*(part.float() for part in parts))
        exact = form.double()(*(part.double() for part in parts))
    return float(((rounded.double() - exact).norm() - (single - exact).norm()) / exact.norm())


@both_types
@pytest.mark.parametrize("shape", [as_they_are, towards, away, one_token_stands_out])
@every_case
def test_large_queries_and_keys(
    name: str, options: dict, shape: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    """Heads of 64 channels over 257 tokens."""
    site = make_site(heads=2, head_dim=64, grid=Grid(16, 16, prefix=1))
    assert error(name, options, site, shape(*uniform(site, dtype))) <= ROUNDING[dtype]


@both_types
@every_case
def test_many_tokens(name: str, options: dict, dtype: torch.dtype) -> None:
    """4,097 tokens of up to 100: their sums are far beyond what float16 holds.

    Dense forms see 257, and so does the code's reading of Mobile-Attention, whose own result grows with the tokens.
    """
    few = options.keys() & {"soft", "heads"} or options.get("reading") == "code"
    site = make_site(heads=2, head_dim=16, grid=Grid(16, 16, prefix=1) if few else Grid(64, 64, prefix=1))
    assert error(name, options, site, uniform(site, dtype)) <= ROUNDING[dtype]


@pytest.mark.parametrize("reading", ["conversion", "code", "paper"])
def test_mobile_attention_divides_by_no_nought(reading: str) -> None:
    """Sigmoids of -100 are below what float32 holds as a normal number, and their products are zero."""
    site = make_site(heads=2, head_dim=8, grid=Grid(8, 8))
    query, key, value = away(*uniform(site, torch.float32))
    form = get_variant("mobile", {"reading": reading}).build(site)
    for parts in ((query, key, value), (-query, key, value)):
        assert torch.isfinite(form(*parts)).all()


@both_types
def test_small_queries_and_keys_keep_their_length(dtype: torch.dtype) -> None:
    """Squares of 0.001 are below what float16 holds as a normal number."""
    site = make_site(heads=2, head_dim=8, grid=Grid(8, 8))
    query, key, value = (part.to(dtype) for part in make_heads(site)[:3])
    for name in ("additive", "hydra", "xca", "relu-linear"):
        assert error(name, {}, site, (query / 1000, key / 1000, value)) <= ROUNDING[dtype], name


@every_case
def test_forms_train_under_autocast(name: str, options: dict) -> None:
    """As calibration does on a GPU: products in bfloat16, the form's own constants in float32."""
    site = make_site(heads=2, head_dim=16, grid=Grid(8, 8, prefix=1))
    form = get_variant(name, options).build(site)
    heads = [part.requires_grad_() for part in make_heads(site, dtype=torch.float32)[:3]]
    exact = form(*heads).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = form(*heads)
    assert (found - exact).norm() <= ROUNDING[torch.bfloat16] * exact.norm()
    found.float().square().mean().backward()
    made = [tensor.grad for tensor in (*heads, *form.parameters()) if tensor.grad is not None]
    assert made
    assert all(torch.isfinite(gradient).all() for gradient in made)
