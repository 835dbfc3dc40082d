"""What each label of an einsum of two operands is in the matrix product that it is written as."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self


@dataclass(frozen=True)
class Contraction:
    """The labels of both operands that the result keeps (`batch`) and those that it sums; of each operand alone, what
    leads, and the tokens: the `rows` of the left one, the `columns` of the right one.
    """

    batch: list[str]
    summed: list[str]
    left_leads: list[str]
    rows: list[str]
    right_leads: list[str]
    columns: list[str]

    @classmethod
    def of(cls, left: str, right: str, result: str, key: str) -> Self:
        """Of two operands with these labels. `key` is the label that a softmax runs over, empty for none: what else
        the operand of the keys alone has tells keys of one attention from those of another, and leads.
        """
        shared = [label for label in left if label in right]
        batch = [label for label in shared if label in result]
        rows = [label for label in left if label not in right]
        columns = [label for label in right if label not in left]
        key = key if batch or (rows and key in columns) else ""  # else a linear layer of tokens: a matrix, or a vector
        summed = [label for label in shared if label not in result]
        return cls(batch, summed, *_beside_keys(rows, key), *_beside_keys(columns, key))

    @cached_property
    def leads(self) -> list[str]:
        return self.left_leads + self.right_leads

    @cached_property
    def order(self) -> list[str]:
        """The labels of the matrix product, its rows and columns apart."""
        return self.leads + self.batch + self.rows + self.columns

    @cached_property
    def by_one_matrix(self) -> bool:
        """Whether the right operand is one matrix, so that the left one's rows can stay axes of their own."""
        return not (self.batch or self.leads)


def _beside_keys(own: list[str], key: str) -> tuple[list[str], list[str]]:
    """Of the labels that one operand alone has: those that lead, and those of its tokens."""
    return ([label for label in own if label != key], [key]) if key and key in own else ([], own)
