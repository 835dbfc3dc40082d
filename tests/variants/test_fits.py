"""What the closed-form fits find, and that a fitted form can be built again from its variant and its tensors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from variant_sites import make_heads, make_site

from attnrewrite.site import Grid
from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.parts.qk_maps import score_factors, signed_pairs
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import softmax_attention, with_outputs
from attnrewrite.variants.polynomial import PolynomialForm, feature_count, monomials, multinomials
from attnrewrite.variants.registry import get_variant, variants

SITE = make_site(heads=2, head_dim=4, grid=Grid(5, 5, 1))
BATCHES = [make_heads(SITE, batch=6, seed=seed) for seed in range(4)]
CASES = [(name, {}) for name in sorted(variants())] + [
    ("masked", {"heads": "error"}),
    ("masked", {"heads": "paper-search"}),
    ("masked", {"heads": 1}),
    ("masked", {"soft": True}),
    ("mobile", {"keep_heads": 0.5}),
    ("polynomial", {"rank": 4, "max_features": 20}),
    ("additive", {"queries": 1}),
    ("additive", {"queries": 4}),
    ("separable", {"latents": 1}),
    ("separable", {"latents": 4}),
    ("l1", {"local": True}),
]


def fitted(name: str, options: dict) -> Form:
    form = get_variant(name, options).build(SITE).double()
    form.refine(lambda: iter(BATCHES))
    return form


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_fitted_form_is_built_again_from_its_resolved_variant_and_its_tensors(name: str, options: dict) -> None:
    form = fitted(name, options)
    resolved = replace(get_variant(name, options), **form.resolved())
    again = resolved.build(SITE).double()
    again.load_state_dict(form.state_dict())
    assert torch.equal(again(*BATCHES[0]), form(*BATCHES[0]))
    deployed = form.deploy()
    if not options.get("soft"):
        torch.testing.assert_close(deployed(*BATCHES[0]), again(*BATCHES[0]), rtol=0, atol=1e-12)


@torch.no_grad()
def explained(form: Form) -> float:
    """How much of softmax's output the form explains, 1 at best, on the grid rows."""
    error, energy = 0.0, 0.0
    for heads, exact in with_outputs(BATCHES, SITE.scale):
        error += float((form(*heads) - exact)[:, :, 1:].square().sum())
        energy += float((exact - exact.mean((0, 2), keepdim=True))[:, :, 1:].square().sum())
    return 1 - error / energy


LEAST_EXPLAINED = {
    "elu": 0.5,
    "hedgehog": 0.65,
    "l1": 0.7,
    "mobile": 0.4,
    "polynomial": 0.98,
    "relu-linear": 0.4,
    "separable": 0.4,
    "taylor": 0.7,
}


@pytest.mark.parametrize(("name", "least"), LEAST_EXPLAINED.items())
def test_fits_explain_softmax_where_the_mean_of_the_values_explains_little_more_than_two_fifths(
    name: str, least: float
) -> None:
    assert explained(fitted(name, {})) > least


def test_a_full_rank_factorisation_gives_the_scores_of_centred_keys() -> None:
    query_map, key_map, mean = score_factors(iter(BATCHES), SITE.scale, 4)
    heads = BATCHES[0]
    key = heads.key - heads.key.mean(2, keepdim=True)
    expected = heads.query @ key.transpose(2, 3) * SITE.scale
    found = (heads.query @ query_map) @ (key @ key_map).transpose(2, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    keys = torch.cat([batch.key for batch in BATCHES])
    torch.testing.assert_close(mean, keys.mean((0, 2)).unsqueeze(1), rtol=0, atol=1e-12)


def test_a_low_rank_factorisation_is_better_than_leaving_out_channels() -> None:
    """Keys that lie along one skew direction: rank 1 holds nearly all scores, and no single channel does."""
    skew = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    query, key, value, _ = BATCHES[0]
    heads = Heads(query, key * 0.05 + key[..., :1] * skew, value)
    centred = heads.key - heads.key.mean(2, keepdim=True)
    exact = query @ centred.transpose(2, 3) * SITE.scale
    query_map, key_map, _ = score_factors(iter([heads]), SITE.scale, 1)

    def error(scores: Tensor) -> float:
        return float((scores - exact).square().mean() / exact.square().mean())

    assert error((query @ query_map) @ (centred @ key_map).transpose(2, 3)) < 0.01
    for channel in range(4):
        left, right = query[..., channel : channel + 1], centred[..., channel : channel + 1]
        assert error(left @ right.transpose(2, 3) * SITE.scale) > 0.1


def test_signed_pairs() -> None:
    maps = torch.arange(1.0, 6.0).reshape(1, 1, 5)
    assert signed_pairs(maps, 5).flatten().tolist() == [1, 2, -1, -2, 0]
    assert signed_pairs(maps, 2, gain=3.0).flatten().tolist() == [3, -3, 3, -3, 0]


@pytest.mark.parametrize(("rank", "degree"), [(1, 4), (3, 2), (4, 4)])
def test_monomials_multiply_to_the_powers_of_the_product(rank: int, degree: int) -> None:
    left, right = torch.randn(2, 7, rank, dtype=torch.float64)
    coefficients, degrees = multinomials(rank, degree)
    first, second = monomials(left, degree), monomials(right, degree)
    assert first.shape[1] == feature_count(rank, degree) == len(coefficients)
    for power in range(degree + 1):
        own = torch.where(degrees == power, coefficients, 0.0).double()
        torch.testing.assert_close((first * own * second).sum(1), (left * right).sum(1) ** power)


def test_both_orders_of_the_polynomial_agree() -> None:
    form = fitted("polynomial", {"exact_prefix": False})
    assert isinstance(form, PolynomialForm)
    assert form.query_map is not None
    sizes = (*form.query_map.shape, form.degree, form.scale)
    found = []
    for order in ("qk", "kv"):
        other = PolynomialForm(*sizes, order=order).double()
        other.load_state_dict(form.state_dict())
        found.append(other(*BATCHES[0]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


def test_more_monomials_than_memory_are_never_made() -> None:
    form = get_variant("polynomial", {"rank": 32, "degree": 8}).build(make_site(n_queries=64, head_dim=32))
    assert form.order == "qk"
    assert sum(buffer.numel() for buffer in form.buffers()) == 0


def test_the_polynomials_denominator_is_held_at_the_number_of_keys() -> None:
    """A polynomial that is zero everywhere would divide by zero."""
    for order in ("qk", "kv"):
        form = PolynomialForm(2, 4, rank=2, degree=4, scale=0.5, order=order).double()
        with torch.no_grad():
            form.coefficients.zero_()
        assert form(*BATCHES[0]).abs().max() == 0


def test_pruned_heads_of_mobile_attention_are_nought_and_the_rest_is_as_without_them() -> None:
    options = {"keep_heads": (1,), "exact_prefix": False}
    query, key, value, _ = BATCHES[0]
    pruned = get_variant("mobile", options).build(SITE).double()(query, key, value)
    alone = make_site(heads=1, head_dim=4, grid=SITE.grid)
    whole = get_variant("mobile", {"exact_prefix": False}).build(alone).double()
    assert pruned[:, 0].abs().max() == 0
    torch.testing.assert_close(pruned[:, 1:], whole(query[:, 1:], key[:, 1:], value[:, 1:]), rtol=0, atol=1e-12)


def test_least_squares_streams_to_the_same_solution_and_error() -> None:
    x, y = torch.randn(60, 5, dtype=torch.float64), torch.randn(60, 2, dtype=torch.float64)
    fit = LeastSquares()
    for rows in torch.arange(60).split(17):
        fit.add(x[rows], y[rows])
    weights = fit.solve(1e-12)
    torch.testing.assert_close(weights, torch.linalg.lstsq(x, y).solution, rtol=0, atol=1e-9)
    torch.testing.assert_close(fit.errors(weights), (y - x @ weights).square().sum(0))


def test_uncalibrated_separable_attention_is_the_mean_of_the_values() -> None:
    heads = BATCHES[0]
    form = get_variant("separable", {"exact_prefix": False}).build(SITE).double()
    expected = heads.value.mean(2, keepdim=True).expand_as(heads.value)
    torch.testing.assert_close(form(*heads), expected, rtol=0, atol=1e-12)


def test_softmax_weights_are_the_same_for_shifted_keys() -> None:
    """What every centred form rests on."""
    query, key, value, _ = BATCHES[0]
    shifted = Heads(query, key + 3.0, value)
    torch.testing.assert_close(
        softmax_attention(*shifted[:3], SITE.scale), softmax_attention(query, key, value, SITE.scale), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("name", sorted(variants()))
def test_fits_stay_finite_where_scores_run_to_thousands(name: str) -> None:
    """Weights of e^1000 are beyond float64: such a softmax is one-hot, and the fit is poor but a number."""
    batches = [Heads(100 * heads.query, 100 * heads.key, heads.value) for heads in BATCHES[:2]]
    form = get_variant(name).build(SITE)
    form.refine(lambda: (Heads(*(part.float() for part in heads[:3])) for heads in batches))
    assert all(torch.isfinite(tensor).all() for tensor in form.state_dict().values())
    assert torch.isfinite(form(*(part.float() for part in batches[0][:3]))).all()
