"""Einsums written out in plain operators, against onnxruntime's own."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from equations import equations
from hypothesis import given
from onnx.parser import parse_model
from onnx_runs import run

from attnrewrite.errors import Refusal
from attnrewrite.patterns.onnx.einsum import parse
from attnrewrite.patterns.onnx.prepare import prepare

# equation, shapes with an open B, and the axis that a softmax runs over, where one does
CASES = [
    ("bnhd,bmhd->bhnm", ("B,5,3,4", "B,6,3,4"), None),
    ("b h n m, b m h d -> b n h d", ("B,3,5,6", "B,6,3,4"), -1),
    ("...nd,md->...nm", ("B,3,5,4", "6,4"), None),
    ("bid,bjd", ("2,5,4", "2,6,4"), None),
    ("bhwc,hkc->bhwk", ("B,7,5,4", "7,3,4"), None),
    ("bnd,bn->bd", ("B,5,4", "B,5"), None),
    ("bij,bjk,bkl->bil", ("B,3,4", "B,4,5", "B,5,6"), None),
    ("bhij,hg->bgij", ("B,3,4,5", "3,7"), None),
    ("abc->cab", ("B,3,4",), None),
    # nothing is summed
    ("i,j->ij", ("3", "4"), None),
    ("bhij,h->bhij", ("B,3,4,5", "3"), None),
    ("bhij,bh->bjih", ("B,3,4,5", "B,3"), None),
    ("bj,bhij->bhij", ("B,5", "B,3,4,5"), None),
    ("bhid,bhjd,h->bhij", ("B,3,5,4", "B,3,6,4", "3"), -1),
    # keys of images that share queries, or heads that do
    ("md,bnd->bmn", ("3,4", "B,5,4"), -1),
    ("hmd,bnhd->bhmn", ("2,3,4", "B,5,2,4"), 3),
    ("bnhd,hmd->bhnm", ("B,5,2,4", "2,3,4"), 2),
    ("bmd,bhnd->bhmn", ("B,3,4", "B,2,5,4"), -1),
    ("mhd,bnd->bhmn", ("3,2,4", "B,5,4"), -1),
    ("d,bnd->bn", ("4", "B,5,4"), -1),
]


def einsum(equation: str, shapes: Sequence[str], axis: int | None) -> ir.Model:
    """A model of one einsum, and a softmax of its result along `axis`."""
    names = [f"x{place}" for place in range(len(shapes))]
    inputs = ", ".join(f"float[{shape}] {name}" for shape, name in zip(shapes, names, strict=True))
    after = "Identity(s)" if axis is None else f"Softmax<axis={axis}>(s)"
    body = f's = Einsum<equation="{equation}">({", ".join(names)}) y = {after}'
    header = '<ir_version: 10, opset_import: ["" : 17]>'
    return ir.serde.deserialize_model(parse_model(f"{header} einsum ({inputs}) => (float y) {{ {body} }}"))


def require_equal(written: ir.Model, model: ir.Model, sizes: Sequence[Sequence[int]]) -> None:
    generator = np.random.default_rng(0)
    given = [generator.standard_normal(size, np.float32) for size in sizes]
    np.testing.assert_allclose(run(written, *given)[0], run(model, *given)[0], rtol=1e-5, atol=1e-5)


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize(("equation", "shapes", "axis"), CASES, ids=[case[0] for case in CASES])
def test_what_is_written_out_is_the_einsum(equation: str, shapes: tuple[str, ...], axis: int | None) -> None:
    model = einsum(equation, shapes, axis)
    written = prepare(model).model
    assert "Einsum" not in operators(written)
    for batch in (2, 5):
        sizes = [[batch if size == "B" else int(size) for size in shape.split(",")] for shape in shapes]
        require_equal(written, model, sizes)


@given(case=equations())
def test_any_equation_is_written_out_or_left(case: tuple[str, list[tuple[int, ...]], int | None]) -> None:
    equation, shapes, axis = case
    model = einsum(equation, [",".join(map(str, shape)) for shape in shapes], axis)
    require_equal(prepare(model).model, model, shapes)


@pytest.mark.parametrize("equation", ["ab,cd", "a,b,c->abc", "a.b,c->a", "abc,a->abc", "1a,b->ab"])
def test_an_equation_that_does_not_fit_its_operands_is_refused(equation: str) -> None:
    assert isinstance(parse(equation, [2, 1]), Refusal)
