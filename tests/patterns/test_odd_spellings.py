"""What is accepted is right for every input: odd spellings of attention are equal once rewritten, or have no core."""

import pytest
import torch
from odd_spellings import ODD, Odd, build_odd, drawn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import relative_error
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant

DRAWS = ((3, 0.3), (2, 4.0), (5, 40.0))  # batch and scale of inputs that no graph was captured with


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_spelling_is_right_or_refused(odd: Odd) -> None:
    module, softmax = build_odd(odd), get_variant("softmax")
    captured = capture(odd.name, module, (drawn(2, 1.0, 0),))
    found = scan(FxGraph(captured.module), odd.name)
    refusals = [softmax.refuse(site) for site in found.sites]
    outcome = "not a site" if not found.sites else "right" if refusals == [None] else "no core"
    assert outcome == odd.expected, refusals or found.near_misses
    assert found.sites or found.near_misses, "missed in silence"
    if outcome != "right":
        for site, refusal in zip(found.sites, refusals, strict=True):
            assert site.core_reason is None or (refusal and site.core_reason.sentence in refusal.sentence)
        return
    rewritten = FxRewrite(Plan(odd.name, tuple(Placement.at(site, softmax) for site in found.sites)))(captured.module)
    for seed, (batch, scale) in enumerate(DRAWS, 1):
        x = drawn(captured.fixed_batch or batch, scale, seed)
        with torch.no_grad():
            wanted = module(x)
            seen = ~wanted.isnan()  # a query that sees nothing has no weights: torch says nan, or zero
            assert relative_error(rewritten(x)[seen], wanted[seen]) < 1e-5, (batch, scale)
