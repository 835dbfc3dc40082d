"""What is done to attention on its way is understood, refused or stopped; never silently lost.

Each drawn module is refused (an error that says why), stopped by the check, or converted to a model that gives the
original's outputs on new inputs of another batch size, and whose sites see the original's own probabilities and values.
`make test` draws 80 modules, the same each time; `make fuzz` draws others, many more.
"""

import copy
import math
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from disturbed import PLACES, Disturbance, Recipe, answers, build, example, inputs, jumps, recipes, unrounded
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.conversion.proof import prove
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import load_source
from attnrewrite.passes.fx.rewrite import scan_graph, with_variants
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.verify import float64_errors, known_error, rewritten_sites
from attnrewrite.passes.wide import Wide, wide_copy
from attnrewrite.variants.parts.softmax_rows import SoftmaxForm
from attnrewrite.variants.registry import get_variant, variants

Reads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # query, key, value and bias
FORMS = tuple(name for name in variants() if name != "softmax")


def verdict(recipe: Recipe) -> str:
    """What becomes of the module of `recipe`: "refused", "stopped" or "equal"; or it "jumps" and nobody can tell.

    Raises AssertionError where it is wrong.
    """
    model = build(recipe)
    try:
        source = load_source(copy.deepcopy(model), example(recipe))
        captured = capture("disturbed", source.model, source.example_inputs)  # type: ignore[arg-type]
        scanned = scan_graph(captured.module, "disturbed")
        sites = [site for site in scanned.scan.sites if get_variant("softmax").refuse(site) is None]
        if not sites or not captured.exact:
            return "refused"
        proof = prove(source, captured, scanned, sites)
    except InputError:
        return "refused"
    except CheckFailedError:
        return "stopped"
    new = inputs(recipe, captured.fixed_batch or 3, seed=1)
    own = answers(model, new)
    found = Wide(proof.teacher).run(*new)
    allowed = 5e-2 if unrounded(recipe) != recipe else 1e-5
    jumping = jumps(model, build(unrounded(recipe)), new, own, allowed)
    if "answer" in jumping:
        return "jumps"
    assert known_error(found, own["answer"]) <= allowed, "softmax re-emitted is not the original"
    kept = every_value(scanned.graph.module, new)
    (softmax,) = rewritten_sites(proof.teacher).values()
    reads = wide_reads(softmax, kept)
    steady = {name: tensor for name, tensor in own.items() if name not in jumping}
    assert_own_inputs(softmax.form, reads, steady, allowed)  # type: ignore[arg-type]
    for name in FORMS:
        if any(get_variant(name).refuse(site) for site in sites):
            continue
        student = with_variants(scanned, dict.fromkeys((site.id for site in sites), get_variant(name)))
        assert_reads_alike(name, student, kept, reads)
        try:
            float64_errors(student, new)
        except CheckFailedError:
            return "stopped"
    return "equal"


def every_value(graph: GraphModule, given: tuple[Tensor, ...]) -> dict[str, Any]:
    """What each node of the captured graph makes of the inputs, in float64: all forms are held against it."""
    recorder = Wide(graph, [node.name for node in graph.graph.nodes])
    recorder.run(*given)
    return recorder.kept


@torch.no_grad()
def wide_reads(site: SiteModule, kept: Mapping[str, Any]) -> Reads:
    """The query, key, value and bias that a site's form is given, in float64."""
    return wide_copy(site).attend_inputs(*(kept[value] for value in site.values))  # type: ignore[operator]


@torch.no_grad()
def assert_own_inputs(form: SoftmaxForm, reads: Reads, own: Mapping[str, Tensor], allowed: float) -> None:
    """The site's query, key and bias make the original's probabilities, and its value is the original's."""
    query, key, value, bias = reads
    scores = query @ key.mT * form.scale
    if bias is not None:
        scores = (scores + bias).masked_fill(bias == -math.inf, form.filling)
    found = {"probabilities": scores.softmax(-1), "value": value}
    for name in found.keys() & own.keys():
        wanted = own[name].reshape(-1, *found[name].shape[1:])
        assert known_error(found[name].expand_as(wanted), wanted) <= allowed, f"the site's own {name}"


@torch.no_grad()
def assert_reads_alike(name: str, student: GraphModule, kept: Mapping[str, Any], wanted: Reads) -> None:
    """A form is given the query, key, value and bias that softmax is, and what its mask drops changes no other row."""
    (site,) = rewritten_sites(student).values()
    found = wide_reads(site, kept)
    for part, own in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(part.nan_to_num(), own.nan_to_num()), f"{name} reads another tensor"
    query, key, value, bias = found
    assert (bias is None) == (wanted[3] is None), f"{name} has another bias"
    if bias is None or bias.isnan().any():
        return
    wide = bias.expand(*bias.shape[:-2], query.shape[-2], key.shape[-2])
    assert torch.equal(wide.nan_to_num(), wanted[3].expand_as(wide).nan_to_num()), f"{name} has another bias"
    dropped = wide.isneginf().all(-2).expand(*key.shape[:-1])
    form = wide_copy(site).form
    before = form(query, key, value, bias)  # type: ignore[operator]
    after = form(query, key.masked_fill(dropped[..., None], 3.0), value.masked_fill(dropped[..., None], -7.0), bias)  # type: ignore[operator]
    rows = ~dropped if query.shape[-2] == key.shape[-2] else torch.ones_like(before[..., 0], dtype=torch.bool)
    assert known_error(after[rows], before[rows]) <= 1e-6, f"{name} reads keys that the mask drops"


# 4 x 20 modules, always the same; with ATTNREWRITE_FUZZ=SEED (make fuzz), 100 x 100 of that seed.
FUZZ = os.environ.get("ATTNREWRITE_FUZZ")
SEEDS, EXAMPLES = (range(4), 20) if FUZZ is None else (range(int(FUZZ) * 100, int(FUZZ) * 100 + 100), 100)
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink], report_multiple_bugs=False,
)  # fmt: skip


@pytest.mark.parametrize("number", SEEDS)
def test_drawn_disturbances_are_understood_refused_or_stopped(number: int) -> None:
    @seed(number)
    @PROFILE
    @given(recipe=recipes)
    def judge(recipe: Recipe) -> None:
        verdict(recipe)

    judge()


def plain(place: str, kind: str) -> Recipe:
    axes = (False, True, True) if place not in ("scores", "probabilities") else (True, True, True)
    return Recipe("separate", "matmul", "plain", "after", "none", (Disturbance(place, kind, axes, 0, 1),))


@pytest.mark.parametrize("place", PLACES)
def test_attention_is_still_found_beside_most_that_is_done(place: str) -> None:
    """The judge judges: what leaves the attention alone is converted, and what random numbers do is refused."""
    assert verdict(plain(place, "copied")) == "equal"
    assert verdict(plain(place, "dropped out")) == "refused"
    assert verdict(plain(place, "counted in a buffer")) == "refused"
