"""Hard masks in O(N R^2) against the dense formula, where they go, and soft masks as they harden."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.base import Heads
from attnrewrite.variants.masked import HardMask, Masked, MaskedForm, SoftMaskedForm, hard_mask
from attnrewrite.variants.parts.masked_heads import heads_by_locality
from attnrewrite.variants.parts.softmax_rows import softmax_attention

GRIDS = [Grid(4, 7), Grid(7, 4, 1), Grid(1, 6, 2), Grid(5, 1), Grid(2, 2, 3), Grid(6, 5, 5), Grid(1, 1, 1)]


def dense_mask(grid: Grid, size: int) -> Tensor:
    """1 between neighbours and wherever a prefix token takes part, by comparing coordinates."""
    index = torch.arange(grid.rows * grid.columns)
    row, column = index // grid.columns, index % grid.columns
    far = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    mask = torch.ones(grid.tokens, grid.tokens, dtype=torch.float64)
    mask[grid.prefix :, grid.prefix :] = (far <= size // 2).double()
    return mask


def dense(heads: Heads, grid: Grid, size: int, scale: float) -> Tensor:
    scores = heads.query @ heads.key.transpose(2, 3) * scale
    scores = scores if heads.bias is None else scores + heads.bias
    return (scores * dense_mask(grid, size)).softmax(-1) @ heads.value


def assert_is(variant: Masked, site: AttentionSite, heads: Heads, expected: Tensor) -> None:
    """The form that is trained gives `expected`, and so does what is deployed."""
    form = variant.build(site).double()
    for each in (form, form.deploy()):
        torch.testing.assert_close(each(*heads), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_hard_masks_equal_the_dense_formula(grid: Grid, size: int, biased: bool) -> None:
    site = make_site(heads=2, head_dim=4, value_dim=6, grid=grid)
    heads = make_heads(site, batch=3)
    if biased:
        generator = torch.Generator().manual_seed(7)
        bias = torch.randn(1, 2, grid.tokens, grid.tokens, generator=generator, dtype=torch.float64)
        heads = heads._replace(bias=bias)
    assert_is(Masked(size=size), site, heads, dense(heads, grid, size, site.scale))


def test_a_bias_that_shuts_out_neighbours_shuts_out_no_others() -> None:
    """As a shifted window's mask does with -inf: neighbours across its border weigh nothing, the rest e^0."""
    grid = Grid(4, 4)
    site = make_site(heads=2, head_dim=4, grid=grid)
    side = torch.arange(16) % 4 < 2
    border = torch.zeros(16, 16, dtype=torch.float64).masked_fill(side[:, None] != side, -torch.inf)
    heads = make_heads(site)._replace(bias=border)
    scores = heads.query @ heads.key.transpose(2, 3) * site.scale
    near = dense_mask(grid, 3).bool()
    expected = torch.where(near, scores + border, 0.0).softmax(-1) @ heads.value
    assert_is(Masked(size=3, approximate=True), site, heads, expected)


@pytest.mark.parametrize("factor", [-60.0, 60.0])
def test_large_scores_of_either_sign_stay_exact(factor: float) -> None:
    site = make_site(heads=1, head_dim=4, grid=Grid(4, 4, 1))
    heads = make_heads(site)
    heads = heads._replace(query=heads.query.abs() * factor, key=heads.key.abs())
    assert_is(Masked(size=3), site, heads, dense(heads, Grid(4, 4, 1), 3, site.scale))


def test_masked_and_free_heads_stand_in_their_own_places() -> None:
    site = make_site(heads=4, head_dim=4, grid=Grid(4, 5, 1))
    bias = torch.randn(2, 4, 21, 21, dtype=torch.float64)
    heads = make_heads(site)._replace(bias=bias)
    masked, free = dense(heads, Grid(4, 5, 1), 3, site.scale), softmax_attention(*heads[:3], site.scale, bias)
    expected = torch.stack([masked[:, 0], free[:, 1], free[:, 2], masked[:, 3]], dim=1)
    assert_is(Masked(size=3, heads=(0, 3)), site, heads, expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, ("query", "key")), ({"heads": 1}, ())],
    ids=str,
)
def test_projections_are_searched_where_no_head_keeps_softmaxs_probabilities(
    options: dict, expected: tuple[str, ...]
) -> None:
    form = Masked(**options).build(make_site(heads=2, head_dim=4, grid=Grid(4, 4, 1)))
    assert form.searched == form.deploy().searched == expected


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation makes, backward ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        made = operation(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            self.elements = max(self.elements, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return made


@pytest.mark.parametrize(("size", "prefix"), [(3, 1), (5, 0), (5, 5)])
def test_nothing_quadratic_in_the_tokens_is_made_forward_backward_or_where_heads_are_chosen(
    size: int, prefix: int
) -> None:
    site = make_site(heads=1, head_dim=4, grid=Grid(40, 40, prefix))
    heads = make_heads(site, batch=1, dtype=torch.float32)
    form = Masked(size=size, heads="error").build(site)
    assert isinstance(form, MaskedForm)
    with Largest() as seen:
        form(*(part.requires_grad_() for part in heads[:3])).sum().backward()
        heads_by_locality(form.mask.locality, [heads])
    assert site.n_queries * 8 < seen.elements < site.n_queries * (size**2 + prefix + 4)


@pytest.mark.parametrize(("soft", "side"), [(True, 40), (False, 40), (False, 20)])
def test_what_is_deployed_is_the_hard_mask(soft: bool, side: int) -> None:
    site = make_site(heads=2, head_dim=4, grid=Grid(side, side))
    form = Masked(size=3, soft=soft, approximate=True).build(site)
    if isinstance(form, SoftMaskedForm):
        with torch.no_grad():
            form.logit.fill_(-1.0)
    heads = make_heads(site, batch=1, dtype=torch.float32)
    with Largest() as seen, torch.no_grad():
        form.deploy()(*heads)
    assert seen.elements < 2 * site.n_queries * 16


def peaked(site: AttentionSite, near: tuple[float, ...]) -> Heads:
    """Queries and keys whose scores are `near[h]` at the token itself and zero elsewhere."""
    tokens = site.n_queries
    one_hot = torch.eye(tokens, dtype=torch.float64).expand(1, site.heads, tokens, tokens)
    strength = torch.tensor(near, dtype=torch.float64).reshape(1, -1, 1, 1) / site.scale
    value = torch.randn(1, site.heads, tokens, site.value_dim, dtype=torch.float64)
    return Heads(one_hot * strength, one_hot, value)


LOCALITY = [
    ((9.0, 9.0, 0.0), (0, 1)),  # head 0 is local: all are masked, head 2 is not local and is freed again
    ((2.7, 9.0, 0.0), (0,)),  # in between: head 0 alone
    ((0.0, 9.0, 9.0), ()),  # head 0 is not local: none
]


@pytest.mark.parametrize(("near", "expected"), LOCALITY)
def test_the_papers_search(near: tuple[float, ...], expected: tuple[int, ...]) -> None:
    grid = Grid(6, 6)
    site = make_site(heads=3, head_dim=grid.tokens, value_dim=4, grid=grid)
    heads = peaked(site, near)
    variant = Masked(size=3, heads="paper-search")
    form = variant.build(site).double()
    assert isinstance(form, MaskedForm)
    form.refine(lambda: iter([heads]))
    assert form.masked == expected
    assert replace(variant, **form.resolved()) == Masked(size=3, heads=expected)


@pytest.mark.parametrize(
    ("sides", "size", "prefix"), [((4, 4), 5, 1), ((5, 3), 5, 0), ((3, 3), 3, 0), ((21, 21), 21, 0)]
)
@pytest.mark.parametrize("soft", [False, True])
def test_a_square_that_covers_the_grid_is_right_where_no_score_is_near_zero(
    sides: tuple[int, int], size: int, prefix: int, soft: bool
) -> None:
    """The token in the middle sees every key: nothing of score 0 is beside its own, which are all far below."""
    grid = Grid(*sides, prefix)
    site = make_site(heads=2, head_dim=4, grid=grid)
    heads = make_heads(site)
    query, key = 40 + heads.query, -(4 + heads.key.abs())
    assert (query @ key.transpose(2, 3) * site.scale).amax() < -100
    wanted = ((query @ key.transpose(2, 3) * site.scale * dense_mask(grid, size)).softmax(-1)) @ heads.value
    form = Masked(size=size, soft=soft).build(site)
    if isinstance(form, SoftMaskedForm):
        with torch.no_grad():
            form.logit.fill_(-1.0)
    with torch.no_grad():
        found = form.deploy()(query.float(), key.float(), heads.value.float())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-4)  # scores of 300 have so many digits
    own = hard_mask(grid, size, site.scale).locality(query.float(), key.float())
    weights = (query @ key.transpose(2, 3) * site.scale * dense_mask(grid, size)).softmax(-1) * dense_mask(grid, size)
    torch.testing.assert_close(own.double(), weights.sum(-1)[:, :, prefix:].mean(2), rtol=0, atol=3e-4)


def test_locality_is_the_weight_of_the_mask_under_the_masked_softmax() -> None:
    grid = Grid(4, 5, 1)
    site = make_site(heads=2, head_dim=4, grid=grid)
    heads = make_heads(site)
    mask = dense_mask(grid, 3)
    weights = (heads.query @ heads.key.transpose(2, 3) * site.scale * mask).softmax(-1)
    expected = (weights * mask).sum(-1)[:, :, grid.prefix :].mean(2)
    found = HardMask(grid, 3, site.scale).double().locality(heads.query, heads.key)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "expected"), [({"heads": "error"}, (1,)), ({"heads": 2}, (1, 2))])
def test_heads_are_chosen_by_the_error_that_masking_makes(options: dict, expected: tuple[int, ...]) -> None:
    """Head 1 is local, so masking changes nothing; heads 0 and 2 look far away, head 2 at values near zero."""
    grid = Grid(5, 5)
    site = make_site(heads=3, head_dim=grid.tokens, value_dim=4, grid=grid)
    heads = peaked(site, (8.0, 8.0, 8.0))
    key = heads.key.clone()
    key[:, 0], key[:, 2] = key[:, 0].roll(12, 1), key[:, 2].roll(12, 1)
    value = heads.value * torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64).reshape(1, -1, 1, 1)
    form = Masked(**options).build(site).double()
    form.refine(lambda: iter([Heads(heads.query, key, value)]))
    assert isinstance(form, MaskedForm)
    assert form.masked == expected


def test_a_soft_mask_is_softmax_at_alpha_one_and_the_hard_mask_at_alpha_nought_and_hardens_by_head() -> None:
    grid = Grid(4, 5, 1)
    site = make_site(heads=2, head_dim=4, grid=grid)
    heads = make_heads(site)
    soft = Masked(soft=True).build(site).double()
    assert isinstance(soft, SoftMaskedForm)
    with torch.no_grad():
        soft.logit.copy_(torch.tensor([-80.0, 80.0]).reshape(2, 1, 1))
    hardened = soft.deploy()
    torch.testing.assert_close(hardened(*heads), soft(*heads), rtol=0, atol=1e-12)
    assert replace(Masked(soft=True), **hardened.resolved()) == Masked(heads=(0,))


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, {"grid": None}, "image grid"),
        ({"heads": 3}, {}, "does not fit its 2 heads"),
        ({"heads": (0, 5)}, {}, "beyond its 2"),
        ({}, {"n_keys": 5}, "image grid"),
    ],
)
def test_refusals(options: dict, change: dict, reason: str) -> None:
    site = dataclasses.replace(make_site(grid=Grid(3, 3)), **change)
    assert reason in str(Masked(**options).refuse(site))
