"""Attention sites and inputs for the tests of the forms, without a graph."""

import torch
from torch import Tensor

from attnrewrite.site import AttentionSite, Core, Grid, Layout, Operand, Untraced
from attnrewrite.variants.base import Heads

LAYOUT = Layout(shape=(), split=(), batch=(), heads=(), tokens=(), channels=())
OPERAND = Operand("value", LAYOUT)
UNTRACED = Untraced("test", "a site without a graph")


def make_site(
    heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    grid: Grid | None = None,
    n_queries: int = 10,
    n_keys: int | None = None,
    **changes: object,
) -> AttentionSite:
    """A self-attention site over `grid`, or over `n_queries` tokens that are no grid; `changes` override any field."""
    queries = grid.tokens if grid else n_queries
    scale = head_dim**-0.5
    values: dict[str, object] = {
        "id": "site",
        "name": "block.attn",
        "frontend": "fx",
        "anchor": "softmax",
        "kind": "self" if n_keys in (None, queries) else "cross",
        "axis": "token",
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "value_dim": value_dim or head_dim,
        "n_queries": queries,
        "n_keys": n_keys or queries,
        "windows": 1,
        "scale": scale,
        "bias": "none",
        "core": Core(OPERAND, OPERAND, OPERAND, OPERAND, scale),
        "query": UNTRACED,
        "key": UNTRACED,
        "value": UNTRACED,
        "output": UNTRACED,
        "grid": grid,
    }
    return AttentionSite(**{**values, **changes})  # type: ignore[arg-type]


def make_heads(site: AttentionSite, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Heads:
    """Random query, key and value of the site's sizes, around means that do not depend on the seed."""
    generator, means = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1)

    def draw(tokens: int, channels: int) -> Tensor:
        spread = torch.randn(batch, site.heads, tokens, channels, generator=generator, dtype=torch.float64)
        centre = torch.randn(1, site.heads, 1, channels, generator=means, dtype=torch.float64)
        return (spread + 0.5 * centre).to(dtype)

    return Heads(
        draw(site.n_queries, site.head_dim), draw(site.n_keys, site.head_dim), draw(site.n_keys, site.value_dim)
    )
