"""The rule for products of integers of eight bits: what is rounded as it comes, times weights that are such numbers."""

import math

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly
from attnrewrite.targets.tvm.schedules.cpu.int8.dot import DEEPEST, dot_of, packed, starts
from attnrewrite.targets.tvm.schedules.cpu.int8.kernels import IntegerProduct, Words
from attnrewrite.targets.tvm.schedules.cpu.integers import integer_weights, rounded
from attnrewrite.targets.tvm.schedules.expression import Arguments, joined, loads
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import trace

OTHER = "other-operator"


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, ("relax.matmul",))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    weight, rows = integer_weights(call.graph, node.args[1]), rounded(call.graph, node.args[0])
    if weight is None or rows is None:
        return Refusal(OTHER, "is no product of integers with constant ones")
    dot = dot_of(profile)
    if dot is None:
        return Refusal(OTHER, "is a product of integers, for which the processor has no instructions")
    depth = len(weight)
    if depth > DEEPEST:
        return Refusal(OTHER, "sums more products of integers than fit in 32 bits")
    value, covers = rows
    *lead, _ = shape(node.args[0])
    read, tile = Arguments(), Tile(min(profile.dot_tile.rows, math.prod(lead)), profile.dot_tile.columns)
    _, value = joined([], read.loading(value), len(lead))
    assembly = Assembly((*traced.covers, *covers))
    words = Words(next(loads(value)).layout.shape[:-1], depth, tile.rows, value)
    left = assembly.add(words, read.bases, words.shape, "int32")
    given = Arguments()
    after = given.loading(traced.epilogue)
    (out,), after = joined([traced.out], after, len(lead))
    first, second = (given.number(base) for base in (left, packed(weight, tile.columns)))
    start = given.number(starts(weight, tile.columns)) if dot.unsigned else None
    assembly.add(IntegerProduct(depth, first, second, start, out, after, tile), given.bases, shape(call.var))
    return assembly.kernel()


MATMUL_INT8 = Rule("matmul int8", _apply)
