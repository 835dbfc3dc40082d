"""Heads of a loop joined into one attention: the number of edits, the numbers, and what is refused."""

import pytest
import torch
from head_loops import APART, HEADS, JOINED, TOKENS, WIDTH, Loop
from torch import nn
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes import FxRewrite
from attnrewrite.passes.fx.join_heads import JoinHeads, with_joined_heads
from attnrewrite.passes.fx.rewrite import scan_graph
from attnrewrite.passes.verify import relative_error
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import OutputProjection, Projection, Scan
from attnrewrite.variants.registry import get_variant

TOLERANCE = 1e-6
X = torch.randn(2, TOKENS, WIDTH)


def graph_of(*spelled: object) -> tuple[nn.Module, GraphModule]:
    torch.manual_seed(0)
    model = Loop(*spelled).eval()  # type: ignore[arg-type]
    return model, capture("loop", model, (X,)).module


def groups_of(found: Scan) -> dict[str, tuple[str, ...]]:
    return {group.id: group.members for group in found.groups}


def attentions(graph: GraphModule) -> int:
    return sum("softmax" in str(n.target) or "scaled_dot" in str(n.target) for n in graph.graph.nodes)


@pytest.mark.parametrize("name", JOINED)
def test_a_group_becomes_one_traced_site_of_all_heads(name: str) -> None:
    model, graph = graph_of(*JOINED[name])
    apart = scan_graph(graph, "loop")
    joined = with_joined_heads(apart, groups_of(apart.scan))
    (site,) = joined.scan.sites
    assert (attentions(graph), attentions(joined.graph.module)) == (HEADS, 1)
    assert (site.id, site.members, site.heads) == (apart.scan.groups[0].id, apart.scan.groups[0].members, HEADS)
    assert all(isinstance(each, Projection) and each.direct for each in site.projections)
    assert isinstance(site.output, OutputProjection)
    assert site.output.direct
    assert site.bias_of_keys == apart.scan.sites[0].bias_of_keys
    assert site.bias == apart.scan.sites[0].bias
    for images in (1, 5):
        x = torch.randn(images, TOKENS, WIDTH)
        with torch.no_grad():
            assert relative_error(joined.graph.module(x), model(x)) < TOLERANCE


@pytest.mark.parametrize("name", ["slices, stacked", "a projection for each"])
def test_a_plan_joins_the_heads_that_it_was_made_for(name: str) -> None:
    model, graph = graph_of(*JOINED[name])
    apart = scan_graph(graph, "loop")
    (site,) = with_joined_heads(apart, groups_of(apart.scan)).scan.sites
    result, edits = FxRewrite(Plan("loop", (Placement.at(site, get_variant("softmax")),))).apply(graph)
    assert len(edits) == 1
    with torch.no_grad():
        assert relative_error(result(X), model(X)) < TOLERANCE


def test_sites_beside_a_group_keep_their_ids_and_names() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Loop(*JOINED["slices, stacked"]), Loop(*JOINED["keys shared"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    apart = scan_graph(capture("two", Two().eval(), (X,)).module, "two")
    one = with_joined_heads(apart, {"site0": ("site0", "site1", "site2")})
    assert [(site.id, site.heads) for site in one.scan] == [("site0", 3), ("site3", 1), ("site4", 1), ("site5", 1)]
    assert {(site.id, site.name) for site in one.scan} < {(site.id, site.name) for site in apart.scan}
    assert groups_of(one.scan) == {"site3": ("site3", "site4", "site5")}
    assert with_joined_heads(apart, {"site0": ("site0", "site1")}) is apart, "another group is wanted"


def test_heads_that_stay_apart_are_refused() -> None:
    _, graph = graph_of(APART[0].heads, APART[0].join)
    apart = scan_graph(graph, "loop")
    with pytest.raises(InputError, match="keeps site0, site1, site2 apart: site0 and site1 differ in their scale"):
        JoinHeads(apart, apart.scan.groups).apply(graph)
    with pytest.raises(InputError, match="not the one that was scanned"):
        JoinHeads(apart, ()).apply(graph_of(*JOINED["slices, stacked"])[1])
