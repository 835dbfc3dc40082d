"""The search of a form's own maps: closer to softmax, the same from any batches, and undone where others disagree."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from variant_sites import make_heads, make_site

from attnrewrite.calibration import maps
from attnrewrite.calibration.maps import search
from attnrewrite.site import Grid
from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.parts.softmax_rows import SoftmaxForm
from attnrewrite.variants.registry import get_variant, variants

SITE = make_site(heads=2, head_dim=4, grid=Grid(5, 5, 1))
SOFTMAX = SoftmaxForm(SITE.scale)
SEARCHED = ["elu", "hedgehog", "l1", "mobile", "relu-linear"]
MIXING = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def drawn(images: int, seed: int) -> Heads:
    """Heads whose channels depend on one another, and values on the keys, as they do in a model."""
    query, key, value = make_heads(SITE, batch=images, seed=seed)[:3]
    return Heads(query @ MIXING[0], key @ MIXING[1], value + key @ MIXING[2])


HEADS, OTHERS = drawn(120, seed=0), drawn(40, seed=9)


def batches(size: int, heads: Heads = HEADS) -> Iterator[Heads]:
    for parts in zip(*(part.split(size) for part in heads[:3]), strict=True):
        yield Heads(*parts)


def refined(name: str) -> Form:
    form = get_variant(name).build(SITE).double()
    form.refine(lambda: batches(30))
    return form


@torch.no_grad()
def error(form: Form, heads: Heads = OTHERS) -> float:
    return float((form(*heads) - SOFTMAX(*heads)).square().mean())


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site has 26 tokens: parts of ten images, eighty of which are searched with and twenty checked."""
    monkeypatch.setattr(maps, "TOKENS_AT_ONCE", 260)
    monkeypatch.setattr(maps, "MOST_TOKENS", 8 * 260)
    monkeypatch.setattr(maps, "CHECKED_TOKENS", 2 * 260)


def test_these_forms_have_maps_that_no_closed_form_gives() -> None:
    assert [name for name in sorted(variants()) if get_variant(name).build(SITE).searched()] == SEARCHED


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_brings_a_refined_form_closer_to_softmax_on_heads_that_it_never_saw(name: str) -> None:
    form = refined(name)
    before = error(form)
    search(form, SOFTMAX, batches(30))
    assert error(form) < 0.97 * before


@pytest.mark.parametrize("size", [1, 7, 10, 120])
def test_the_batches_that_heads_come_in_do_not_matter(size: int) -> None:
    form, other = refined("mobile"), refined("mobile")
    search(form, SOFTMAX, batches(30))
    search(other, SOFTMAX, batches(size))
    for found, expected in zip(other.parameters(), form.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_a_bias_is_read_with_its_images(shared: bool) -> None:
    """A mask on the keys of every image, or one for all, in batches that parts do not end with."""
    kept = torch.rand(1 if shared else 120, 1, 1, 26, generator=torch.Generator().manual_seed(0)) < 0.8
    bias = torch.zeros(kept.shape, dtype=torch.float64).masked_fill(~kept, -torch.inf)

    def masked(size: int) -> Iterator[Heads]:
        for number, heads in enumerate(batches(size)):
            yield heads._replace(bias=bias if shared else bias[number * size : (number + 1) * size])

    form, other = refined("elu"), refined("elu")
    search(form, SOFTMAX, masked(120))
    search(other, SOFTMAX, masked(7))
    for found, expected in zip(other.parameters(), form.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_what_is_no_closer_on_other_images_is_left_alone() -> None:
    """The images that check are softmax of other queries: what fits the first ones is of no use there."""

    class Turned(Form):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
            return SOFTMAX(query if float(query[0, 0, 0, 0]) < 50 else -query, key, value, bias)

    query = HEADS.query.clone()
    query[80:] += 100
    form = refined("hedgehog")
    before = {name: tensor.clone() for name, tensor in form.state_dict().items()}
    search(form, Turned(), batches(10, HEADS._replace(query=query)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in form.state_dict().items())


def test_too_few_tokens_to_check_with_are_not_searched_with() -> None:
    form = refined("l1")
    before = {name: tensor.clone() for name, tensor in form.state_dict().items()}
    assert not search(form, SOFTMAX, batches(19, Heads(*(part[:19] for part in HEADS[:3]))))
    assert all(torch.equal(tensor, before[name]) for name, tensor in form.state_dict().items())


def test_a_form_in_half_precision_is_searched_in_float32() -> None:
    form = refined("l1").half()
    half = Heads(*(part.half() for part in HEADS[:3]))
    before = error(form.double())
    search(form.half(), SOFTMAX, batches(30, half))
    assert all(parameter.dtype == torch.float16 for parameter in form.parameters())
    assert error(form.double()) < before
