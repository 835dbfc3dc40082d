"""An Einsum as the transposes and the products that it is."""

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attnrewrite.errors import Refusal
from attnrewrite.patterns.contraction import Contraction
from attnrewrite.patterns.onnx.writer import Writer

Size = Callable[[ir.Value], tuple[int, ...]]


_MORE = Refusal("not-a-product", "it is more than transposes and products: a trace, or a sum of one operand")


def write_einsum(
    writer: Writer, equation: str, operands: list[ir.Value], size: Size, keys: int | None = None
) -> ir.Value | Refusal:
    """Write the einsum as transposes and matrix products, two operands at a time; as Mul where nothing is summed.

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
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, sizes, strict=True):
        lengths |= {label: length for label, length in zip(term, shape, strict=True) if lengths.get(label, 1) == 1}
    key = "" if keys is None or not -len(result) <= keys < len(result) else result[keys]
    made = _Labelled(operands[0], terms[0])
    for place in range(1, len(terms)):
        last, read = place == len(terms) - 1, result + "".join(terms[place + 1 :])
        kept = "".join(dict.fromkeys(label for label in made.labels + terms[place] if label in read))
        step = _Step(writer, lengths, "" if last else f"{place}.")
        found = step.product(made, _Labelled(operands[place], terms[place]), result if last else kept, key * last)
        if isinstance(found, Refusal):
            return found
        made = found
    return made.value


@dataclass(frozen=True)
class _Labelled:
    """A value, and the label of each of its axes."""

    value: ir.Value
    labels: str


@dataclass(frozen=True)
class _Step:
    """A product of two operands of an einsum, whose labels have these `lengths`; its values are called by `name`."""

    writer: Writer
    lengths: Mapping[str, int]
    name: str

    def product(self, left: _Labelled, right: _Labelled, result: str, key: str) -> _Labelled | Refusal:
        """The two multiplied and summed to `result`; `key` is the label that a softmax runs over, empty for none."""
        each = Contraction.of(left.labels, right.labels, result, key)
        if set(result) != set(each.order):
            return _MORE
        if not each.summed:
            across = [self._across(operand, result, side) for operand, side in ((left, "left"), (right, "right"))]
            return _Labelled(self.writer.one("Mul", across, f"{self.name}product"), result)
        whole, rows = each.by_one_matrix, each.rows
        kept, tokens = [*each.left_leads, *each.batch, *(rows if whole else [])], [] if whole else [rows]
        operands = [
            self._arranged(left, kept, [*tokens, each.summed], each.summed, "left"),
            self._arranged(right, [*each.right_leads, *each.batch], [each.summed, each.columns], each.summed, "right"),
        ]
        product = self.writer.one("MatMul", operands, f"{self.name}product")
        split_rows, split_columns = len(rows) != 1 and not whole, len(each.columns) != 1
        if split_rows or split_columns:
            apart = [*each.leads, *each.batch, *(rows if whole else [])]
            inner = [] if whole else _lengths(rows, self.lengths, open_first=split_rows)
            shape = [0] * len(apart) + inner + _lengths(each.columns, self.lengths, open_first=-1 not in inner)
            product = self.writer.reshape(product, shape, f"{self.name}unmerged")
        return _Labelled(self._turned(_Labelled(product, "".join(each.order)), result, "turned"), result)

    def _turned(self, operand: _Labelled, labels: Sequence[str], name: str) -> ir.Value:
        order = [operand.labels.index(label) for label in labels]
        return self.writer.transpose(operand.value, order, f"{self.name}{name}")

    def _across(self, operand: _Labelled, result: str, name: str) -> ir.Value:
        """An operand along the axes of the result, of one where it has none behind its own first."""
        own = [label for label in result if label in operand.labels]
        turned = self._turned(operand, own, f"{name}_turned")
        behind = result[result.index(own[0]) :] if own else ""
        if len(behind) == len(own):
            return turned
        shape = [1 if label not in own else self._length(label, own, place) for place, label in enumerate(behind)]
        return self.writer.reshape(turned, shape, f"{self.name}{name}_across")

    def _length(self, label: str, own: list[str], place: int) -> int:
        """What Reshape calls the length of an axis that stays in its place, which may be open; else a number."""
        return 0 if own[place : place + 1] == [label] else self.lengths[label]

    def _arranged(
        self, operand: _Labelled, kept: list[str], groups: list[list[str]], summed: list[str], name: str
    ) -> ir.Value:
        """An operand as [kept..., groups...], each group merged into one axis; one that is not summed may be open."""
        value = self._turned(operand, [*kept, *(label for group in groups for label in group)], f"{name}_turned")
        if all(len(group) == 1 for group in groups):
            return value
        merged = [math.prod(self.lengths[label] for label in group) if group == summed else -1 for group in groups]
        return self.writer.reshape(value, [0] * len(kept) + merged, f"{self.name}{name}_merged")


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


def _lengths(labels: list[str], lengths: Mapping[str, int], open_first: bool) -> list[int]:
    return [-1 if open_first and place == 0 else lengths[label] for place, label in enumerate(labels)]
