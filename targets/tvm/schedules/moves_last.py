"""Arithmetic before movement: f(moved(x)) as moved(f(x)), which is the same numbers.

A kernel writes what it makes as its own axes lie, and whoever reads it can go by strides. Arithmetic behind a movement
would have it written in another order, one number far from the next.
"""

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.trace import BINARY, UNARY

ARITHMETIC = frozenset({*UNARY, *BINARY, "relax.clip", "relax.nn.leakyrelu"})
MOVES = frozenset({"relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.permute_dims"})


def moves_last(module: Any) -> Any:
    """The module with arithmetic on moved values before their movement: of one value, of several that are moved alike,
    and of numbers.
    """
    writer = _Writer(module)
    main = module.get_global_var("main")
    moved = writer.visit_expr(module[main])
    writer.builder_.update_func(main, relax.analysis.remove_all_unused(moved))
    return writer.builder_.get()


@mutator
class _Writer(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        return self.before_moves(super().visit_call_(call))

    def before_moves(self, call: Any) -> Any:
        if not _is_call(call) or call.op.name not in ARITHMETIC:
            return call
        values = [operand for operand in call.args if not _is_number(operand)]
        moves = [self.move(value) for value in values]
        if not moves or not all(move is not None and _alike(move, moves[0]) for move in moves):
            return call
        sources = iter([move.args[0] for move in moves])
        operands = [operand if _is_number(operand) else next(sources) for operand in call.args]
        inner = self.builder_.normalize(relax.Call(call.op, operands, call.attrs))
        made = self.builder_.emit(self.before_moves(inner))
        return relax.Call(moves[0].op, [made, *moves[0].args[1:]], moves[0].attrs)

    def move(self, value: Any) -> Any:
        """The movement that gives a value, or None."""
        found = self.builder_.lookup_binding(value) if isinstance(value, relax.Var) else None
        return found if found is not None and _is_call(found) and found.op.name in MOVES else None


def _is_call(value: Any) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)


def _is_number(operand: Any) -> bool:
    return not isinstance(operand.ty, relax.TensorType) or shape(operand) == ()


def _alike(one: Any, other: Any) -> bool:
    """Whether two movements do the same with values of the same shape."""
    same = one.op == other.op and shape(one) == shape(other) and shape(one.args[0]) == shape(other.args[0])
    return same and _axes(one) == _axes(other)


def _axes(move: Any) -> list[int]:
    return [int(axis) for axis in move.attrs.axes or ()] if move.op.name == "relax.permute_dims" else []
