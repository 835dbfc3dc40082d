"""The einsum decomposition against torch's einsum."""

import pytest
import torch

from attnrewrite.passes.fx.einsum import einsum_as_product

CASES = [
    ("bnhd,bmhd->bhnm", (2, 5, 3, 4), (2, 6, 3, 4)),
    ("b h n m, b m h d -> b n h d", (2, 3, 5, 6), (2, 6, 3, 4)),
    ("...nd,...md->...nm", (2, 3, 5, 4), (2, 3, 6, 4)),
    ("...nd,md->...nm", (2, 3, 5, 4), (6, 4)),
    ("bid,bjd", (2, 5, 4), (2, 6, 4)),
    ("bhwc,hkc->bhwk", (2, 7, 5, 4), (7, 3, 4)),
    ("bnd,bn->bd", (2, 5, 4), (2, 5)),
    ("bnd,bmd->bn", (2, 5, 4), (2, 6, 4)),
    ("bid,bjd->bij", (2, 1, 4), (2, 1, 4)),
    ("i,j->ij", (3,), (4,)),
    ("bij,bjk,bkl->bil", (2, 3, 4), (2, 4, 5), (2, 5, 6)),
    ("bhij,hg->bgij", (2, 3, 4, 5), (3, 7)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_products_are_einsum(case: tuple) -> None:
    equation, *shapes = case
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(einsum_as_product(equation, operands), torch.einsum(equation, *operands))


@pytest.mark.parametrize("equation", ["bii->bi", "bij->bji"])
def test_what_is_no_product_is_left_alone(equation: str) -> None:
    assert einsum_as_product(equation, [torch.randn(2, 3, 3)]) is NotImplemented
