"""The matcher on one attention in many spellings, and on what only looks like one."""

from typing import Any

import pytest
import torch
from identity import identity_errors
from spellings import (
    DIM,
    HEADS,
    MIXED,
    NEAR_MISSES,
    SCALE,
    SPELLINGS,
    TOKENS,
    WIDTH,
    Spelling,
    attend,
    build,
    heads,
    merged,
    separate,
)  # fmt: skip
from torch import Tensor, nn

from attnrewrite.frontends.capture import Captured, capture
from attnrewrite.passes.draws import drawn
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import relative_error
from attnrewrite.passes.wide import Wide
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.graph import ComputedConstants, Operation
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import OutputProjection, Projection, Scan
from attnrewrite.variants.registry import get_variant

SHARED = {
    "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "value_dim": DIM, "n_queries": TOKENS, "n_keys": TOKENS,
    "windows": 1, "scale": SCALE, "bias": "none", "kind": "self", "axis": "token", "rope": False, "qk_norm": False,
    "talking_heads": False, "probs_escape": False, "core_reason": None,
}  # fmt: skip


def scanned(spelling: Spelling) -> tuple[Captured, Scan]:
    module, x = build(spelling)
    captured = capture(spelling.name, module, (x,))
    return captured, scan(FxGraph(captured.module), spelling.name)


def identity(found: Scan) -> FxRewrite:
    softmax = get_variant("softmax")
    return FxRewrite(Plan(found.model, tuple(Placement.at(site, softmax) for site in found.sites)))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_every_spelling_is_one_site_and_rewrites_to_itself(spelling: Spelling) -> None:
    captured, found = scanned(spelling)
    assert captured.fixed_batch is None, captured.note
    assert len(found.sites) == 1
    assert not found.near_misses
    (site,) = found.sites
    truth = {**SHARED, **{key: value for key, value in spelling.truth.items() if key not in ("grid", "output_shape")}}
    assert {key: getattr(site, key) for key in truth} == {
        key: pytest.approx(value) if key == "scale" and value is not None else value for key, value in truth.items()
    }
    if "grid" in spelling.truth:
        assert site.grid is not None
        assert (site.grid.rows, site.grid.columns, site.grid.prefix) == spelling.truth["grid"]
    assert all(isinstance(projection, Projection) for projection in site.projections)
    assert isinstance(site.output, OutputProjection)
    assert site.fingerprint is not None
    rewritten, edits = identity(found).apply(captured.module)
    assert [edit.site for edit in edits] == [site.id]
    assert not [
        node
        for node in rewritten.graph.nodes
        if "softmax" in str(node.target) or "attention.default" in str(node.target)
    ]
    x = torch.randn(3, *captured.example_inputs[0].shape[1:])
    with torch.no_grad():
        assert relative_error(rewritten(x), captured.module(x)) < 1e-6
    draws = drawn(captured.module, captured.example_inputs)
    assert list(identity_errors(captured.module, rewritten, found, draws)) == [site.id]
    for draw in draws:
        assert relative_error(*(Wide(each).run(*draw.inputs) for each in (rewritten, captured.module))) < 1e-6


@pytest.mark.parametrize("spelling", MIXED, ids=lambda s: s.name)
def test_mixed_heads_are_a_site_that_says_so(spelling: Spelling) -> None:
    _, found = scanned(spelling)
    (site,) = found.sites
    assert (site.n_queries, site.kind, site.talking_heads) == (*spelling.truth.values(), True)
    assert str(site.core_reason) == "scores or probabilities are mixed across heads"
    assert all(isinstance(projection, Projection) for projection in site.projections)


@pytest.mark.parametrize(("reason", "words", "spelling"), NEAR_MISSES, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_no_attention_is_a_near_miss_with_its_reason(reason: str, words: str, spelling: Spelling) -> None:
    _, found = scanned(spelling)
    assert not found.sites
    assert [miss.code for miss in found.near_misses] == [reason]
    assert words in found.near_misses[0].sentence


@pytest.mark.parametrize("stored", [True, False])
def test_a_batch_norm_by_its_batch_is_no_part_of_a_projection(stored: bool) -> None:
    """Stored statistics make it an affine map of each channel; the batch's own mix the images."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(m.norm(m.q(x).mT).mT), heads(m.k(x)), heads(m.v(x)))
        return m.proj(merged(attend(q, k, v)))

    norm = {"norm": nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=stored)}
    _, found = scanned(Spelling("normed", lambda: separate() | norm, run))
    (site,) = found.sites
    assert isinstance(site.query, Projection)
    assert (site.query.direct, site.query.normalization is not None) == (stored, stored)


class _Deep:
    """A chain of maps, each named by how many there are before it."""

    def is_constant(self, value: str) -> bool:
        return False

    def operation(self, value: str) -> Operation:
        return Operation(value, "map", "sin", (str(int(value) - 1),) if value != "0" else ())


def test_graphs_may_be_deeper_than_a_stack() -> None:
    assert not ComputedConstants(_Deep()).is_constant("5000")  # type: ignore[arg-type]
