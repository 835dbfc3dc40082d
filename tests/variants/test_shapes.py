"""Any sizes that a form accepts give outputs of the right shape, finite, and independent of the order of the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.registry import get_variant, variants

NAMES = sorted(variants())
UNORDERED = sorted(set(variants()) - {"masked"})


@st.composite
def sites(draw: st.DrawFn) -> AttentionSite:
    """Self-attention over an image, or cross-attention over tokens that are no image."""
    size = st.integers(1, 6)
    heads, head_dim, value_dim = draw(size), draw(size), draw(size)
    if draw(st.booleans()):
        grid = Grid(draw(size), draw(size), draw(st.integers(0, 3)))
        return make_site(heads=heads, head_dim=head_dim, value_dim=value_dim, grid=grid)
    queries, keys = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    return make_site(heads=heads, head_dim=head_dim, value_dim=value_dim, n_queries=queries, n_keys=keys)


@pytest.mark.parametrize("name", NAMES)
@given(site=sites(), batch=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_shapes(name: str, site: AttentionSite, batch: int) -> None:
    variant = get_variant(name)
    if variant.refuse(site) is not None:
        return
    heads = make_heads(site, batch=batch)
    out = variant.build(site).double()(*heads)
    assert out.shape == (batch, site.heads, site.n_queries, site.value_dim)
    assert torch.isfinite(out).all()
    assert variant.multiplies(site) > 0


@pytest.mark.parametrize("name", UNORDERED)
@given(site=sites(), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_tokens_have_no_order(name: str, site: AttentionSite, seed: int) -> None:
    """Shuffling query, key and value together shuffles the output; shuffling only keys and values changes nothing."""
    variant = get_variant(name, {} if name == "softmax" else {"exact_prefix": False})
    if variant.refuse(site) is not None:
        return
    form = variant.build(site).double()
    query, key, value, _ = make_heads(site, seed=seed)
    shuffled = torch.randperm(site.n_keys, generator=torch.Generator().manual_seed(seed))
    together = site.n_queries == site.n_keys
    rows = shuffled if together else torch.arange(site.n_queries)
    out = form(query[:, :, rows], key[:, :, shuffled], value[:, :, shuffled])
    torch.testing.assert_close(out, form(query, key, value)[:, :, rows], rtol=0, atol=1e-9)
