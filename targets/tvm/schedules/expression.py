"""Elementwise arithmetic over views: what a kernel does with a value on the way, and with what else it reads for that.

An expression stands in an index space (a shape); each of its leaves is a view with that shape.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnrewrite.targets.tvm.schedules.graph import same
from attnrewrite.targets.tvm.schedules.view import Layout, View, merged


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Result:
    """What the kernel around the expression has computed at this place."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A view of a tensor of the graph."""

    view: View


@dataclass(frozen=True)
class Load:
    """A leaf as a kernel knows it: the number of its argument, and where the values lie in it."""

    argument: int
    layout: Layout


@dataclass(frozen=True)
class Apply:
    """An operation of `vectors.OPERATIONS` on expressions."""

    operation: str
    operands: tuple["Expression", ...]


Expression = Number | Result | Leaf | Load | Apply


def leaves(expression: Expression) -> Iterator[Leaf]:
    if isinstance(expression, Leaf):
        yield expression
    elif isinstance(expression, Apply):
        for operand in expression.operands:
            yield from leaves(operand)


def loads(expression: Expression) -> Iterator[Load]:
    if isinstance(expression, Load):
        yield expression
    elif isinstance(expression, Apply):
        for operand in expression.operands:
            yield from loads(operand)


def replaced(expression: Expression, put: Callable[[Expression], Expression | None]) -> Expression | None:
    """The expression with each of its leaves and loads as `put` gives it; None where it gives None for one."""
    if isinstance(expression, Apply):
        operands = [replaced(operand, put) for operand in expression.operands]
        found = [operand for operand in operands if operand is not None]
        return Apply(expression.operation, tuple(found)) if len(found) == len(operands) else None
    return put(expression) if isinstance(expression, Leaf | Load) else expression


def moved(expression: Expression, move: Callable[[Layout], Layout | None]) -> Expression | None:
    """The expression in another index space: its leaves' layouts as `move` gives them; None where it gives None."""

    def put(leaf: Expression) -> Expression | None:
        if isinstance(leaf, Load):
            layout = move(leaf.layout)
            return None if layout is None else replace(leaf, layout=layout)
        assert isinstance(leaf, Leaf)
        layout = move(leaf.view.layout)
        return None if layout is None else Leaf(replace(leaf.view, layout=layout))

    return replaced(expression, put)


def ordered(expression: Expression, axes: Sequence[int]) -> Expression:
    """The expression with the axes of its index space in another order."""
    made = moved(expression, lambda layout: layout.permute(axes))
    assert made is not None
    return made


def factored(expression: Expression) -> tuple[Expression, float]:
    """An expression as another one times a number."""
    if isinstance(expression, Apply) and expression.operation in ("multiply", "divide"):
        left, right = expression.operands
        if isinstance(right, Number):
            inner, factor = factored(left)
            return inner, factor * right.value if expression.operation == "multiply" else factor / right.value
        if isinstance(left, Number) and expression.operation == "multiply":
            inner, factor = factored(right)
            return inner, factor * left.value
    return expression, 1.0


@dataclass
class Arguments:
    """The tensors that a kernel reads, in order, each once: filled while its expressions are turned into loads."""

    bases: list[Any] = field(default_factory=list)

    def load(self, view: View) -> Load:
        return Load(self.number(view.base), view.layout)

    def number(self, base: Any) -> int:
        for index, known in enumerate(self.bases):
            if same(known, base):
                return index
        self.bases.append(base)
        return len(self.bases) - 1

    def loading(self, expression: Expression) -> Expression:
        """The expression with loads in the place of its leaves."""
        made = replaced(expression, lambda leaf: self.load(leaf.view) if isinstance(leaf, Leaf) else leaf)
        assert made is not None
        return made


def substituted(expression: Expression, value: Expression) -> Expression:
    """The expression with `value` in the place of what the kernel has computed."""
    if isinstance(expression, Apply):
        return Apply(expression.operation, tuple(substituted(operand, value) for operand in expression.operands))
    return value if isinstance(expression, Result) else expression


def joined(layouts: Sequence[Layout], expression: Expression, lead: int) -> tuple[list[Layout], Expression]:
    """Layouts and an expression's loads with their first `lead` axes in as few as all of them allow."""
    read = list(dict.fromkeys(loads(expression)))
    simple = merged([*layouts, *(load.layout for load in read)], lead)
    found = dict(zip(read, simple[len(layouts) :], strict=True))
    put = replaced(expression, lambda load: Load(load.argument, found[load]) if isinstance(load, Load) else load)
    assert put is not None
    return simple[: len(layouts)], put
