"""What holds for every form, and what each wrapper adds."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.base import Heads
from attnrewrite.variants.l1 import l1_attention, l1_deviation
from attnrewrite.variants.parts import value_mean
from attnrewrite.variants.parts.exact_prefix import ExactPrefix
from attnrewrite.variants.parts.foldable import Affine
from attnrewrite.variants.parts.local_branch import LocalBranch
from attnrewrite.variants.parts.softmax_rows import softmax_attention, with_outputs
from attnrewrite.variants.parts.tensors import merge_heads, split_heads
from attnrewrite.variants.parts.value_mean import ValueMean
from attnrewrite.variants.registry import get_variant, variants
from attnrewrite.variants.softmax import Softmax

GRID = Grid(rows=3, columns=5, prefix=2)
SITE = make_site(heads=2, head_dim=8, grid=GRID)
LINEAR = sorted(set(variants()) - {"softmax"})
SITES = {
    "grid with prefix": SITE,
    "one head, wide values": make_site(heads=1, head_dim=8, value_dim=16, grid=Grid(4, 4)),
    "more tokens than channels": make_site(heads=3, head_dim=4, grid=Grid(6, 7, 1)),
}


def test_softmax_is_the_plain_formula_with_bias_and_causal_mask() -> None:
    heads = make_heads(SITE)
    bias = torch.randn(1, 2, 17, 17, dtype=torch.float64)
    scores = heads.query @ heads.key.transpose(2, 3) * SITE.scale
    torch.testing.assert_close(
        Softmax().build(SITE)(*heads[:3], bias), (scores + bias).softmax(-1) @ heads.value, rtol=0, atol=1e-12
    )
    causal = Softmax().build(dataclasses.replace(SITE, causal=True))(*heads)
    later = torch.ones(17, 17).triu(1).bool()
    torch.testing.assert_close(
        causal, scores.masked_fill(later, -torch.inf).softmax(-1) @ heads.value, rtol=0, atol=1e-12
    )


SUPPORTED = [
    pytest.param(name, site, id=f"{name}, {label}")
    for name in LINEAR
    for label, site in SITES.items()
    if get_variant(name).refuse(site) is None
]


@pytest.mark.parametrize(("name", "site"), SUPPORTED)
def test_images_of_a_batch_do_not_mix(name: str, site: AttentionSite) -> None:
    form = get_variant(name).build(site).double().eval()
    heads = make_heads(site, batch=3)
    alone = torch.cat([form(*(part[i : i + 1] for part in heads[:3])) for i in range(3)])
    assert alone.shape == heads.value.shape
    torch.testing.assert_close(form(*heads), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LINEAR)
def test_prefix_rows_are_softmax_rows_bias_included(name: str) -> None:
    heads = make_heads(SITE)
    bias = torch.randn(1, 2, 17, 17, dtype=torch.float64)
    exact = softmax_attention(*heads[:3], SITE.scale, bias)
    kept = get_variant(name).build(SITE).double()(*heads[:3], bias)
    torch.testing.assert_close(kept[:, :, :2], exact[:, :, :2], rtol=0, atol=1e-12)
    plain = get_variant(name, {"exact_prefix": False}).build(SITE).double()(*heads)
    assert (plain[:, :, :2] - exact[:, :, :2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LINEAR)
def test_no_exact_rows_where_no_token_comes_before_the_grid(name: str) -> None:
    assert not isinstance(get_variant(name).build(make_site(grid=Grid(4, 4))), ExactPrefix)


ELSEWHERE = {"mobile", "additive", "xca", "masked"}  # these need as many keys as queries, or a grid


@pytest.mark.parametrize("name", LINEAR)
def test_a_query_that_is_alone_keeps_softmax_bias_included(name: str) -> None:
    """No form has a mean to take over one query, and l1 norms would leave its signs alone."""
    site = make_site(heads=2, head_dim=8, n_queries=1, n_keys=12, bias="constant")
    variant = get_variant(name)
    if name in ELSEWHERE:
        assert variant.refuse(site) is not None
        return
    assert variant.refuse(site) is None
    heads, bias = make_heads(site), torch.randn(1, 2, 1, 12, dtype=torch.float64)
    exact = softmax_attention(*heads[:3], site.scale, bias)
    torch.testing.assert_close(variant.build(site)(*heads[:3], bias), exact, rtol=0, atol=1e-12)
    assert variant.multiplies(site) == Softmax().multiplies(site)
    assert "only query keeps softmax" in (variant.note(site) or "")
    refused = get_variant(name, {"exact_prefix": False}).refuse(site)
    assert refused is not None
    assert refused.code == "constant-bias"


MIXED = make_site(heads=2, head_dim=4, grid=Grid(5, 6, 1))
MIXERS: dict[str, Callable[[], ValueMean]] = {
    "value mean": lambda: ValueMean(Softmax().build(MIXED), 2, 4, MIXED.scale, prefix=1),
    "local branch": lambda: LocalBranch(Softmax().build(MIXED), Grid(5, 6, 1), 2, 4, MIXED.scale),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_what_stands_beside_a_form_starts_as_the_form_alone_and_finds_a_known_mixture(mixer: str) -> None:
    """The teacher is the mixture itself: least squares must find its constants again."""
    torch.manual_seed(0)
    site = MIXED
    batches = [make_heads(site, batch=4, seed=seed) for seed in range(3)]
    teacher = MIXERS[mixer]().double()
    torch.testing.assert_close(teacher(*batches[0]), Softmax().build(site)(*batches[0]))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter))
    student = MIXERS[mixer]().double()
    targets = iter([(heads, teacher(*heads)) for heads in batches])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_mean, "with_outputs", lambda batches, scale: targets)
        patch.setattr(value_mean, "RIDGE", 1e-10)
        student.refine(lambda: iter(batches))
    for found, true in zip(student.parameters(), teacher.parameters(), strict=True):
        torch.testing.assert_close(found, true, rtol=0, atol=1e-6)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("single_head", [True, False])
def test_both_orders_of_l1_agree_and_the_cheaper_is_chosen(centred: bool, single_head: bool) -> None:
    heads = make_heads(SITE)
    options = {"centred": centred, "single_head": single_head, "exact_prefix": False}
    first, second = (get_variant("l1", {**options, "order": order}).build(SITE).double() for order in ("qk", "kv"))
    torch.testing.assert_close(first(*heads), second(*heads), rtol=0, atol=1e-12)
    few, many = make_site(n_queries=5, head_dim=8), make_site(n_queries=50, head_dim=8)
    assert [get_variant("l1").form(site).order for site in (few, many)] == ["qk", "kv"]


def test_what_centred_l1_adds_to_the_mean_is_simas_of_centred_keys_times_the_tokens() -> None:
    query, key, value, _ = make_heads(SITE)
    expected = l1_attention(query, key - key.mean(2, keepdim=True), value) * key.shape[2]
    torch.testing.assert_close(l1_deviation(query, key, value), expected, rtol=0, atol=1e-12)


def test_centred_l1_of_constant_keys_is_the_mean_of_the_values() -> None:
    query, key, value, _ = make_heads(SITE)
    form = get_variant("l1", {"exact_prefix": False}).build(SITE)
    out = form(query, torch.ones_like(key), value)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), rtol=0, atol=1e-12)


@pytest.mark.parametrize("single_head", [True, False])
def test_centred_l1_does_not_enlarge_what_rounding_leaves_of_equal_keys(single_head: bool) -> None:
    """A window of blank background: in float32 equal keys differ from their mean by its rounding."""
    site = make_site(n_queries=49)
    query, key, value, _ = make_heads(site)
    key = (key[:, :, :1] + 1000 / 3).expand_as(key)
    form = get_variant("l1", {"exact_prefix": False, "single_head": single_head}).build(site)
    out = form(query.float(), key.float(), value.float()).double()
    assert (key.float() - key.float().mean(2, keepdim=True)).abs().max() > 1e-6
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), rtol=0, atol=0.05)


REFUSED = [
    ({"axis": "channel"}, "channels"),
    ({"talking_heads": True}, "mixes"),
    ({"probs_escape": True}, "elsewhere"),
    ({"causal": True}, "causal"),
    ({"bias": "depends-on-query"}, "depends on the query"),
    ({"bias": "constant"}, "approximate=true"),
    ({"bias": "input"}, "input of the model"),
    ({"core": None}, "told apart"),
]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_sites_that_a_linear_form_cannot_honour_are_refused(name: str, change: dict, reason: str) -> None:
    site = dataclasses.replace(SITE, **change)
    assert reason in str(get_variant(name).refuse(site))
    dropped = get_variant(name, {"approximate": True})
    if change.get("bias") in ("constant", "depends-on-query"):
        assert dropped.refuse(site) is None
        assert "bias" in (dropped.note(site) or "")
    else:
        assert dropped.refuse(site) is not None


@pytest.mark.parametrize("name", LINEAR)
def test_multiplies_grow_linearly_with_the_tokens(name: str) -> None:
    small, large = (get_variant(name).multiplies(make_site(grid=Grid(64, 16 * k, 1))) for k in (1, 4))
    assert 3.9 < large / small < 4.1


def stream(site: AttentionSite, count: int = 3) -> Callable[[], Iterator[Heads]]:
    """A repeatable stream of activations at `site`."""
    return lambda: iter([make_heads(site, batch=8, seed=seed) for seed in range(count)])


SIGNLESS = {"additive", "hydra", "l1", "separable", "xca"}  # what they read has no sign until they are calibrated


@pytest.mark.parametrize("name", sorted(set(variants()) - SIGNLESS))
def test_a_negative_scale_is_that_of_the_negated_query(name: str) -> None:
    assert SITE.core is not None
    turned = dataclasses.replace(SITE, core=dataclasses.replace(SITE.core, scale=-SITE.core.scale))
    query, *others = make_heads(SITE, batch=2)
    form, plain = (get_variant(name).build(site).double() for site in (turned, SITE))
    torch.testing.assert_close(form(query, *others), plain(-query, *others))


@pytest.mark.parametrize("name", LINEAR)
def test_fitting_brings_the_form_nearer_to_softmax(name: str) -> None:
    site = make_site(heads=2, head_dim=8, grid=Grid(6, 6, 1))
    form = get_variant(name, {"local": True}).build(site).double()

    def error() -> Tensor:
        return sum((form(*heads) - exact).square().sum() for heads, exact in with_outputs(stream(site)(), site.scale))

    before = error()
    form.refine(stream(site))
    assert error() < before


@pytest.mark.parametrize("name", ["l1", "hedgehog", "relu-linear"])
def test_exact_rows_undo_the_maps_that_projections_hold(name: str) -> None:
    """The form of what its maps make of query and key is the form of query and key, its prefix rows too."""
    generator = torch.Generator().manual_seed(0)
    form = get_variant(name).build(SITE).double()
    with torch.no_grad():
        for parameter in form.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    heads = make_heads(SITE)
    folded = form.foldable_maps()
    assert folded is not None
    assert isinstance(folded.form, ExactPrefix)

    def mapped(affine: Affine | None, part: Tensor) -> Tensor:
        assert affine is not None
        return split_heads(F.linear(merge_heads(part), affine.weight, affine.bias), part.shape[1])

    query, key = mapped(folded.query, heads.query), mapped(folded.key, heads.key)
    torch.testing.assert_close(folded.form(query, key, heads.value), form(*heads), rtol=0, atol=1e-12)
    given = Heads(query, key, heads.value)
    for name, found in folded.form.token_maps(given).items():
        torch.testing.assert_close(found, form.token_maps(heads)[name], rtol=0, atol=1e-12)


def test_maps_that_lose_too_much_are_not_undone() -> None:
    form = get_variant("l1").build(SITE).double()
    assert form.foldable_maps() is not None
    with torch.no_grad():
        form.get_parameter("form.form.qk_maps.query")[1, :, 3] *= 1e-3
    assert form.foldable_maps() is None


def test_l1_maps_that_change_nothing_are_not_deployed() -> None:
    names = {name for name, _ in get_variant("l1").build(SITE).deploy().named_parameters()}
    assert not any("qk_maps" in name for name in names)
