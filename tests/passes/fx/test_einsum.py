"""The einsum decomposition against torch's einsum."""

import pytest
import torch
from equations import equations
from hypothesis import given
from torch.fx.experimental.proxy_tensor import make_fx

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

# (equation, the axis that a softmax runs over, shapes), and the shapes of the operands of its product
LED = [
    (("md,bnd->bmn", -1, (3, 4), (2, 5, 4)), ((3, 4), (2, 4, 5))),
    (("hmd,bnhd->bhmn", -1, (2, 3, 4), (7, 5, 2, 4)), ((2, 3, 4), (7, 2, 4, 5))),
    (("bnhd,hmd->bhnm", 2, (7, 5, 2, 4), (2, 3, 4)), ((7, 2, 5, 4), (2, 4, 3))),
    (("bmd,bhnd->bhmn", -1, (7, 3, 4), (7, 2, 5, 4)), ((7, 3, 4), (2, 7, 4, 5))),
    (("mhd,bnd->bhmn", -1, (3, 2, 4), (7, 5, 4)), ((6, 4), (7, 4, 5))),
    # one attention, or layers of tokens: nothing leads
    (("bhmd,bhnd->bhmn", -1, (7, 2, 3, 4), (7, 2, 5, 4)), ((14, 3, 4), (14, 4, 5))),
    (("bhmd,bnd->bhmn", -1, (7, 2, 3, 4), (7, 5, 4)), ((7, 6, 4), (7, 4, 5))),
    (("bnd,md->bnm", 1, (7, 5, 4), (3, 4)), ((7, 5, 4), (4, 3))),
    (("d,bnd->bn", -1, (4,), (7, 5, 4)), ((4,), (4, 35))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_products_are_einsum(case: tuple) -> None:
    equation, *shapes = case
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(einsum_as_product(equation, operands), torch.einsum(equation, *operands))


@given(case=equations())
def test_any_equation_is_einsum(case: tuple[str, list[tuple[int, ...]], int | None]) -> None:
    equation, shapes, keys = case
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    torch.testing.assert_close(einsum_as_product(equation, operands, keys=keys), torch.einsum(equation, *operands))


@pytest.mark.parametrize(("case", "product"), LED, ids=lambda each: each[0] if isinstance(each[0], str) else "")
def test_what_else_the_keys_alone_have_leads(case: tuple, product: tuple[tuple[int, ...], ...]) -> None:
    equation, keys, *shapes = case
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    graph = make_fx(lambda *given: einsum_as_product(equation, given, keys=keys), pre_dispatch=True)(*operands)
    torch.testing.assert_close(graph(*operands), torch.einsum(equation, *operands))
    (made,) = [node for node in graph.graph.nodes if node.target is torch.ops.aten.matmul.default]
    assert tuple(tuple(operand.meta["val"].shape) for operand in made.args) == product


@pytest.mark.parametrize("equation", ["bii->bi", "bij->bji"])
def test_what_is_no_product_is_left_alone(equation: str) -> None:
    assert einsum_as_product(equation, [torch.randn(2, 3, 3)]) is NotImplemented
