"""einsum, written as the batched matrix products that it is.

torch's own decomposition turns products over axes of length one into elementwise ones, and an attention over a single
key would no longer look like one.
"""

import math
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from attnrewrite.patterns.contraction import Contraction


def einsum_as_product(
    equation: str, operands: Sequence[Tensor], *, path: object = None, keys: int | None = None
) -> Tensor:
    """The decomposition of aten.einsum: permute, reshape, matmul, two operands at a time; mul where nothing is summed.

    `keys` is the axis of the result that a softmax runs over, where one does. What else the operand of the keys alone
    has tells keys of one attention from those of another, as images do that share learned queries: these axes lead.

    NotImplemented, which leaves the einsum as it is, where an index repeats within one operand or nothing is paired.
    """
    terms, output = _spelled_out(equation.replace(" ", ""), operands)
    if len(terms) < 2 or any(len(set(term)) != len(term) for term in [*terms, output]):
        return NotImplemented
    result, term = operands[0], terms[0]
    for place in range(1, len(terms)):
        later = "".join(terms[place + 1 :]) + output
        kept = "".join(dict.fromkeys(a for a in term + terms[place] if a in later))
        last = place == len(terms) - 1
        target, key = (output, "" if keys is None else output[keys]) if last else (kept, "")
        result, term = _product(result, term, operands[place], terms[place], target, key), target
    return result


def _spelled_out(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The indices of each operand and of the output, an ellipsis as letters of its own."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        counts = Counter(a for term in terms for a in term if a != ".")
        output = "..." * ("..." in inputs) + "".join(sorted(a for a, count in counts.items() if count == 1))
    free = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [tensor.dim() - len(term) + 3 for term, tensor in zip(terms, operands, strict=True) if "..." in term]
    batch = "".join(free[: max(widths, default=0)])
    spelled = [
        term.replace("...", batch[len(batch) - (tensor.dim() - len(term) + 3) :] if "..." in term else "")
        for term, tensor in zip(terms, operands, strict=True)
    ]
    return spelled, output.replace("...", batch)


def _product(left: Tensor, left_term: str, right: Tensor, right_term: str, output: str, key: str) -> Tensor:
    left, left_term = _sum_alone(left, left_term, right_term + output)
    right, right_term = _sum_alone(right, right_term, left_term + output)
    sizes = dict(zip(left_term, left.shape, strict=True)) | dict(zip(right_term, right.shape, strict=True))
    for a in left_term:  # an axis of length one is read again and again
        if a in right_term:
            sizes[a] = left.shape[left_term.index(a)] if right.shape[right_term.index(a)] == 1 else sizes[a]
    left, right = _expanded(left, left_term, sizes), _expanded(right, right_term, sizes)
    each = Contraction.of(left_term, right_term, output, key)
    if not each.summed:
        return _across(left, left_term, output, sizes) * _across(right, right_term, output, sizes)
    batch = [each.batch] if each.batch else []
    tokens = [[a] for a in each.rows] if each.by_one_matrix else [each.rows]
    product = torch.matmul(
        _grouped(left, left_term, [*([a] for a in each.left_leads), *batch, *tokens, each.summed], sizes),
        _grouped(right, right_term, [*([a] for a in each.right_leads), *batch, each.summed, each.columns], sizes),
    )
    return _permuted(product.reshape([sizes[a] for a in each.order]), [each.order.index(a) for a in output])


def _expanded(tensor: Tensor, term: str, sizes: dict[str, int]) -> Tensor:
    full = [sizes[a] for a in term]
    return tensor if list(tensor.shape) == full else tensor.expand(full)


def _across(tensor: Tensor, term: str, output: str, sizes: dict[str, int]) -> Tensor:
    """`tensor` along the axes of the output, of one where it has none."""
    moved = _permuted(tensor, [term.index(a) for a in output if a in term])
    return moved.reshape([sizes[a] if a in term else 1 for a in output])


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
