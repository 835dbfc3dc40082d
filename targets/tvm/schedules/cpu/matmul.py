"""The rule for products: of a tensor with weights, which are packed as the model is compiled, or of two tensors."""

from dataclasses import dataclass
from typing import Any

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly, expanded, is_shared, scaled
from attnrewrite.targets.tvm.schedules.cpu.integers import is_of_integers
from attnrewrite.targets.tvm.schedules.expression import Expression, factored
from attnrewrite.targets.tvm.schedules.graph import is_float, shape
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import operand, scaled_view, trace
from attnrewrite.targets.tvm.schedules.view import Layout


@dataclass(frozen=True, eq=False)
class Factors:
    """A product of matrices as a graph has it: out = epilogue(left right), of which `left` is over [batch..., rows,
    depth] and `right` over [batch..., depth, columns]; and the variables whose operators that does the work of.
    """

    left: Expression
    right: Expression
    depth: int
    out: Layout
    epilogue: Expression
    of_integers: bool
    covers: tuple[Any, ...]


def factors(call: Call) -> Factors | Refusal:
    """What a value is the product of; why it is none."""
    traced = trace(call.graph, call.var, ("relax.matmul",))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    if not all(map(is_float, node.args)):
        return Refusal("dtype", "multiplies what is not float32")
    if min(len(shape(argument)) for argument in node.args) < 2:
        return Refusal("vector", "multiplies by a vector")
    *batch, rows, columns = shape(traced.anchor)
    depth = shape(node.args[0])[-1]
    right = operand(call.graph, node.args[1])
    second, other = factored(right.expression)
    left, factor, scaling = scaled_view(call.graph, node.args[0])
    first: Expression = left
    if not is_shared(expanded(second, (*batch, depth, columns)), len(batch)):
        # Packed for this product alone, arithmetic is done on the way.
        computed = operand(call.graph, node.args[0])
        (first, factor), scaling = factored(computed.expression), computed.covers
    return Factors(
        expanded(first, (*batch, rows, depth)),
        expanded(second, (*batch, depth, columns)),
        depth,
        traced.out,
        scaled(traced.epilogue, factor * other),
        is_of_integers(call.graph, node),
        (*traced.covers, *scaling, *right.covers),
    )


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    found = factors(call)
    if isinstance(found, Refusal):
        return found
    if found.of_integers:
        profile = profile.storing(FLOAT32)  # float16 holds few sums of integers
    assembly = Assembly(found.covers)
    assembly.product(found.left, found.right, found.depth, found.out, found.epilogue, profile, shape(call.var))
    return assembly.kernel()


MATMUL = Rule("matmul", _apply)
