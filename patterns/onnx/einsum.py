"""An Einsum of one or two operands as the transposes and the matrix product it is."""

import re
import string
from collections.abc import Callable

import onnx_ir as ir

from attnrewrite.errors import Refusal
from attnrewrite.patterns.onnx.writer import Writer

Size = Callable[[ir.Value], tuple[int, ...]]


_MORE = Refusal("not-a-product", "it is more than transposes and one product: a trace, a sum, three operands")


def write_einsum(
    writer: Writer, equation: str, operands: list[ir.Value], size: Size, keys: int | None = None
) -> ir.Value | Refusal:
    """Write the einsum as transposes and one matrix product.

    `keys` is the axis of the result that a softmax runs over, where one does. What else the operand of the keys alone
    has tells keys of one attention from those of another, as images do that share learned queries: these axes lead.
    """
    sizes = [size(value) for value in operands]
    parsed = parse(equation, [len(shape) for shape in sizes])
    if isinstance(parsed, Refusal):
        return parsed
    terms, result = parsed
    if any(len(set(term)) != len(term) for term in (*terms, result)):
        return _MORE
    if len(terms) == 1:
        order = [terms[0].index(label) for label in result] if set(result) == set(terms[0]) else None
        return writer.one("Transpose", operands, "turned", perm=order) if order else _MORE
    if len(terms) != 2:
        return _MORE
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, sizes, strict=True):
        lengths |= {label: length for label, length in zip(term, shape, strict=True) if lengths.get(label, 1) == 1}
    left, right = terms
    shared = [label for label in left if label in right and label in result]
    summed = [label for label in left if label in right and label not in result]
    rows, columns = ([label for label in term if label not in other] for term, other in ((left, right), (right, left)))
    if not summed or set(result) != {*shared, *rows, *columns}:
        return _MORE
    key = "" if keys is None or not -len(result) <= keys < len(result) else result[keys]
    key = key if shared or (rows and key in columns) else ""  # else a linear layer of tokens: a matrix, or a vector
    left_leads, rows = _beside_keys(rows, key)
    right_leads, columns = _beside_keys(columns, key)
    leads = [*left_leads, *right_leads]
    whole = not (shared or leads)  # leading axes need no merging when the right operand is one matrix
    first = _arranged(
        writer, operands[0], left, [*left_leads, *shared], (rows, summed), lengths, "left", keep_rows=whole
    )
    second = _arranged(writer, operands[1], right, [*right_leads, *shared], (summed, columns), lengths, "right")
    product = writer.one("MatMul", [first, second], "product")
    split_rows, split_columns = len(rows) != 1 and not whole, len(columns) != 1
    if split_rows or split_columns:
        kept = [*leads, *shared, *(rows if whole else [])]
        inner = [] if whole else _lengths(rows, lengths, open_first=split_rows)
        product = writer.reshape(product, [0] * len(kept) + inner + [lengths[c] for c in columns], "unmerged")
    made = [*leads, *shared, *rows, *columns]
    return writer.transpose(product, [made.index(label) for label in result], "turned")


def _beside_keys(own: list[str], key: str) -> tuple[list[str], list[str]]:
    """Of the axes that one operand alone has: those that lead, and those of its tokens."""
    return ([label for label in own if label != key], [key]) if key and key in own else ([], own)


def parse(equation: str, ranks: list[int]) -> tuple[list[str], str] | Refusal:
    """The operands' labels and the result's, with labels for an ellipsis; `ranks` are the operands' numbers of axes."""
    unsound = Refusal("unsound-equation", f"the equation {equation!r} does not fit its operands")
    equation = equation.replace(" ", "")
    if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", equation):
        return unsound
    inputs, arrow, result = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "").replace("...", "")
        result = ("..." if "..." in inputs else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(terms) != len(ranks):
        return unsound
    free = [c for c in string.ascii_letters if c not in equation]
    covered = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True) if "..." in t]
    widest = max(covered, default=0)
    if widest < 0 or widest > len(free):
        return unsound
    labels = []
    for term, rank in zip(terms, ranks, strict=True):
        own = rank - len(term.replace("...", ""))
        if own < 0 or (own and "..." not in term):
            return unsound
        labels.append(term.replace("...", "".join(free[widest - own : widest])))
    return labels, result.replace("...", "".join(free[:widest]))


def _arranged(
    writer: Writer,
    value: ir.Value,
    labels: str,
    shared: list[str],
    groups: tuple[list[str], list[str]],
    lengths: dict[str, int],
    name: str,
    keep_rows: bool = False,
) -> ir.Value:
    """An operand as [shared..., first group, second group], each group merged into one axis."""
    order = [*shared, *groups[0], *groups[1]]
    value = writer.transpose(value, [labels.index(label) for label in order], f"{name}_turned")
    if len(groups[1]) == 1 and (len(groups[0]) == 1 or keep_rows):
        return value
    kept = [*shared, *(groups[0] if keep_rows else [])]
    merged = [] if keep_rows else [_merged(groups[0], lengths)]
    return writer.reshape(value, [0] * len(kept) + merged + [_merged(groups[1], lengths)], f"{name}_merged")


def _merged(labels: list[str], lengths: dict[str, int]) -> int:
    total = 1
    for label in labels:
        total *= lengths[label]
    return total


def _lengths(labels: list[str], lengths: dict[str, int], open_first: bool) -> list[int]:
    return [-1 if open_first and place == 0 else lengths[label] for place, label in enumerate(labels)]
