"""flex_attention is written out as the attention that it computes, of any batch, and is then a site as any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from attnrewrite.api import explain
from attnrewrite.passes.fx.flex import WriteOutFlex
from attnrewrite.targets.prepare import arrays, canonical, specialise

TOKENS, HEADS = 10, 4


class Flexible(nn.Module):
    """Attention of four heads on two of keys and values; `change` gives a score_mod from the module's table."""

    def __init__(self, change: Callable[[Tensor], Any] | None, causal: bool, asks: bool = False) -> None:
        super().__init__()
        self.q, self.kv, self.table = nn.Linear(16, 32), nn.Linear(16, 32), nn.Parameter(torch.randn(HEADS, TOKENS))
        self.change, self.causal, self.asks = change, causal, asks

    def forward(self, x: Tensor) -> Tensor:
        query = self.q(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)
        given = {
            "score_mod": self.change and self.change(self.table),
            "block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, "cpu")
            if self.causal
            else None,
        }
        if self.asks:
            out, more = flex_attention(
                query, key, value, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True), **given
            )
            return out + more.lse[..., None]
        return flex_attention(query, key, value, scale=0.3, enable_gqa=True, **given).transpose(1, 2).flatten(2)


def program(module: nn.Module) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    with torch.no_grad():
        open_batch = ({0: torch.export.Dim("batch")},)
        return torch.export.export(module.eval(), (torch.randn(2, TOKENS, 16),), dynamic_shapes=open_batch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda table: lambda score, b, h, i, j: score + table[h, (i - j).abs()],
        lambda table: lambda score, b, h, i, j: torch.where(b > 0, torch.tanh(score / 2) * 2, score - 0.1 * (i - j)),
    ],
    ids=["plain", "bias by distance", "capped in later images"],
)
def test_it_is_written_out_for_any_batch(change: Callable[[Tensor], Any] | None, causal: bool) -> None:
    module, x = Flexible(change, causal), torch.randn(3, TOKENS, 16)
    result = WriteOutFlex().apply(program(module))
    assert len(result.edits) == 1
    assert not WriteOutFlex().apply(result.graph).edits
    with torch.no_grad():
        torch.testing.assert_close(result.graph.module()(x), module(x), atol=1e-6, rtol=1e-5)


def test_it_is_a_site_and_reaches_compilers() -> None:
    module, x = Flexible(None, causal=True), torch.randn(1, TOKENS, 16)
    (site,) = explain(module, (x,)).sites
    assert (site.heads, site.n_keys, site.scale) == (HEADS, TOKENS, 0.3)
    written = canonical(specialise(module, (x,)))
    assert not any("flex" in str(node.target) for node in written.graph.nodes)
    with torch.no_grad():
        (found,), (expected,) = arrays(written.module()(x)), arrays(module(x))
    assert abs(found - expected).max() < 1e-6


def test_one_whose_sums_are_asked_for_stays() -> None:
    module = Flexible(None, causal=False, asks=True)
    assert not WriteOutFlex().apply(program(module)).edits
    found = explain(module, (torch.randn(1, TOKENS, 16),))
    assert not found.sites
    (near_miss,) = found.near_misses
    assert near_miss.code == "fused-layer"
    assert "return_lse" in near_miss.sentence
