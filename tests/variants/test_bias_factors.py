"""What stands for a constant bias beside a linear form: the nearest mixing of the values that a rank allows."""

import dataclasses

import pytest
import torch
from torch import Tensor
from variant_sites import make_heads, make_site

from attnrewrite.errors import InputError
from attnrewrite.site import Grid
from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.masked import MaskedForm, hard_mask
from attnrewrite.variants.parts.bias_factors import MOST_PAIRS, BiasFactors
from attnrewrite.variants.parts.softmax_rows import softmax_attention
from attnrewrite.variants.registry import get_variant, variants

SITE = make_site(heads=2, head_dim=4, grid=Grid(3, 4, 1), bias="constant")
FACTORED = sorted(set(variants()) - {"softmax"})
FAR = {"additive", "hydra", "xca"}  # from softmax in other ways, too


class Mean(Form):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return value.mean(2, keepdim=True).expand_as(value)


def refined(rank: int, *biases: Tensor, beside: Form | None = None) -> Tensor:
    """What factors beside the mean, or another form, are fitted to these biases, a batch each, where there are no
    scores: the weights of both, less the mean, [H, N, M].
    """
    form = BiasFactors(beside or Mean(), SITE.heads, SITE.n_queries, SITE.n_keys, rank, SITE.scale).double()
    nothing = torch.zeros(1, SITE.heads, SITE.n_queries, SITE.head_dim, dtype=torch.float64)
    identity = torch.eye(SITE.n_keys, dtype=torch.float64).expand(1, SITE.heads, -1, -1)
    batches = [
        Heads(*(part.expand(len(bias), -1, -1, -1) for part in (nothing, nothing, identity)), bias) for bias in biases
    ]
    form.refine(lambda: iter(batches))
    (mixed,) = form(nothing, nothing, identity, biases[0][:1]).detach() - 1 / SITE.n_keys
    return mixed


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_at_a_whole_rank_the_factors_are_what_softmax_of_the_bias_adds_to_the_mean() -> None:
    bias = drawn(1, 2, 13, 13)
    torch.testing.assert_close(refined(13, bias), bias[0].softmax(-1) - 1 / 13, rtol=0, atol=1e-12)


@pytest.mark.parametrize("few", [0, 12], ids=["by shifts", "by all scores"])
def test_beside_a_form_that_keeps_a_part_of_the_bias_they_are_what_it_leaves_out(few: int) -> None:
    masked = MaskedForm(hard_mask(Grid(3, 4, 1), 3, SITE.scale, few), SITE.heads, (0,), 0.0)
    bias = drawn(1, 2, 13, 13)
    exact = bias[0].softmax(-1) - 1 / 13
    torch.testing.assert_close(refined(13, bias, beside=masked), exact, rtol=0, atol=1e-12)
    assert (refined(1, bias, beside=masked) - exact)[1].abs().max() < 1e-12, "a head that is not masked lacks nothing"


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_no_mixing_of_the_rank_is_nearer(rank: int) -> None:
    """What is left is the energy of the singular values beyond (Eckart and Young)."""
    bias = drawn(1, 2, 13, 13)
    exact = bias[0].softmax(-1) - 1 / 13
    left = (refined(rank, bias) - exact).square().sum((1, 2))
    torch.testing.assert_close(left, torch.linalg.svdvals(exact)[:, rank:].square().sum(1), rtol=1e-9, atol=0)


def test_images_and_windows_count_alike_whatever_the_batches() -> None:
    several = drawn(5, 2, 13, 13)
    expected = several.softmax(-1).mean(0) - 1 / 13
    for batches in ([several], several.split(2)):
        torch.testing.assert_close(refined(13, *batches), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 13, 13), (1, 2, 1, 13), (1, 2, 13, 1)], ids=str)
def test_a_bias_that_several_share_is_that_of_each(shape: tuple[int, ...]) -> None:
    bias = drawn(*shape)
    whole = bias.expand(1, 2, 13, 13)
    torch.testing.assert_close(refined(13, bias), whole[0].softmax(-1) - 1 / 13, rtol=0, atol=1e-12)


def test_masked_pairs_have_no_part_and_a_row_that_is_masked_whole_the_mean() -> None:
    bias = drawn(1, 2, 13, 13)
    bias[:, :, 2, 5:], bias[:, :, 7] = -torch.inf, -torch.inf
    weights = refined(13, bias) + 1 / 13
    assert weights[:, 2, 5:].abs().max() < 1e-12
    torch.testing.assert_close(weights[:, 7], torch.full((2, 13), 1 / 13, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FACTORED)
def test_calibrated_they_bring_every_form_closer_to_softmax_on_other_images(name: str) -> None:
    """Neighbours along a row of 13 tokens count most; scores are small beside that."""
    apart = torch.arange(13.0, dtype=torch.float64)
    bias = -(apart[:, None] - apart).square().expand(1, 2, -1, -1)
    seen, other = (Heads(*make_heads(SITE, batch=32, seed=seed)[:3], bias) for seed in (0, 1))
    exact = softmax_attention(*other[:3], SITE.scale, bias)
    errors = []
    for rank in (0, 8):
        form = get_variant(name, {"approximate": True, "bias_rank": rank}).build(SITE).double()
        form.refine(lambda: iter([seen]))
        errors.append((form(*other) - exact).square().mean())
    assert errors[1] < errors[0] * (1.0 if name in FAR else 0.5)


@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (16, 4), (31, 8), (49, 8)])
def test_the_rank_is_a_quarter_of_the_tokens_at_most(tokens: int, rank: int) -> None:
    site = make_site(n_queries=tokens, bias="constant")
    assert get_variant("l1", {"approximate": True, "exact_prefix": False}).factors(site) == rank


@pytest.mark.parametrize("name", FACTORED)
def test_every_linear_form_has_them_and_counts_and_names_them(name: str) -> None:
    kept, left = (get_variant(name, {"approximate": True, "bias_rank": rank}) for rank in (3, 0))
    assert any(isinstance(part, BiasFactors) for part in kept.build(SITE).modules())
    assert not any(isinstance(part, BiasFactors) for part in left.build(SITE).modules())
    assert kept.multiplies(SITE) - left.multiplies(SITE) == SITE.heads * 3 * (13 + 13) * SITE.value_dim
    said = "is kept between neighbours only" if name == "masked" else "on the scores is left out"
    assert left.note(SITE) == f"the constant bias {said}"
    assert kept.note(SITE) == f"{left.note(SITE)}, but for factors of rank 3 that calibration gives"


def test_what_has_no_bias_or_too_many_pairs_has_none_and_uncalibrated_ones_are_not_deployed() -> None:
    variant = get_variant("l1", {"approximate": True})
    side = int(MOST_PAIRS**0.5) + 1
    for site in (dataclasses.replace(SITE, bias="none"), make_site(n_queries=side, bias="constant")):
        assert not any(isinstance(part, BiasFactors) for part in variant.build(site).modules())
    deployed = variant.build(SITE).deploy()
    assert not any(isinstance(part, BiasFactors) for part in deployed.modules())


def test_a_rank_below_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="bias_rank=-1"):
        get_variant("l1", {"bias_rank": -1})
