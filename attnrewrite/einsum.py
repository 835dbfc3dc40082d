"""einsum of two operands, written as the batched matrix product that it is.

torch's own decomposition turns products over axes of length one into elementwise ones, and an attention over a single
key would no longer look like one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def einsum_as_product(equation: str, operands: Sequence[Tensor], *, path: object = None) -> Tensor:
    """The decomposition of aten.einsum: permute, reshape, matmul. Other than two plain operands: torch's own way."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    plain = arrow and "." not in equation and all(len(set(term)) == len(term) for term in [*terms, output])
    if len(terms) != 2 or not plain:
        fallback = torch.export.default_decompositions()[torch.ops.aten.einsum.default]
        result = fallback(equation, list(operands))
        assert isinstance(result, Tensor)
        return result
    left, right = operands
    left, terms[0] = _sum_alone(left, terms[0], terms[1] + output)
    right, terms[1] = _sum_alone(right, terms[1], terms[0] + output)
    sizes = dict(zip(terms[0] + terms[1], (*left.shape, *right.shape), strict=False))
    batch = [a for a in terms[0] if a in terms[1] and a in output]
    summed = [a for a in terms[0] if a in terms[1] and a not in output]
    rows = [a for a in terms[0] if a not in terms[1]]
    columns = [a for a in terms[1] if a not in terms[0]]
    product = torch.matmul(
        _grouped(left, terms[0], [batch, rows, summed], sizes),
        _grouped(right, terms[1], [batch, summed, columns], sizes),
    )
    order = batch + rows + columns
    spread = product.reshape([sizes[a] for a in order])
    return _permuted(spread, [order.index(a) for a in output])


def _sum_alone(tensor: Tensor, term: str, others: str) -> tuple[Tensor, str]:
    """Sum away the axes that nothing else mentions."""
    alone = [place for place, a in enumerate(term) if a not in others]
    return (tensor.sum(alone) if alone else tensor), "".join(a for a in term if a in others)


def _grouped(tensor: Tensor, term: str, groups: list[list[str]], sizes: dict[str, int]) -> Tensor:
    """The axes of `tensor` permuted into groups, each merged into one axis."""
    moved = _permuted(tensor, [term.index(a) for group in groups for a in group])
    return moved.reshape([math.prod(sizes[a] for a in group) for group in groups])


def _permuted(tensor: Tensor, order: list[int]) -> Tensor:
    return tensor if order == sorted(order) else tensor.permute(order)
