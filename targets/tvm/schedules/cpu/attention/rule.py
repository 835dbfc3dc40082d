"""The rule for attention: a product with the softmax of another product, in one kernel."""

import math
from dataclasses import dataclass
from typing import Any

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly, expanded, scaled
from attnrewrite.targets.tvm.schedules.cpu.attention.across import BASE, AttentionAcross
from attnrewrite.targets.tvm.schedules.cpu.attention.along import Attention
from attnrewrite.targets.tvm.schedules.cpu.attention.order import Order, order_for
from attnrewrite.targets.tvm.schedules.cpu.operands import Panels
from attnrewrite.targets.tvm.schedules.cpu.register_tile import best_tiles, packed_tile
from attnrewrite.targets.tvm.schedules.expression import (
    Apply,
    Arguments,
    Expression,
    Leaf,
    Number,
    Result,
    factored,
    loads,
    ordered,
)
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import operand, scaled_view, trace
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous


@dataclass(frozen=True)
class _Operands:
    """What attention is of: `query` over [batch..., queries, depth], `key` over [batch..., depth, keys], `value` over
    [batch..., keys, channels]; scores are `scores` of the products times `factor`.
    """

    batch: Shape
    queries: int
    keys: int
    depth: int
    channels: int
    query: Leaf
    key: Expression
    value: Expression
    factor: float
    scores: Expression
    out: Layout
    epilogue: Expression

    @property
    def matrices(self) -> int:
        return math.prod(self.batch)


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    graph = call.graph
    mixed = trace(graph, call.var, ("relax.matmul",))
    if isinstance(mixed, Refusal):
        return mixed
    product = graph.call(mixed.anchor)
    assert product is not None
    softmax = _softmax_behind(call, product.args[0])
    if isinstance(softmax, Refusal):
        return softmax
    scores = trace(graph, graph.value(softmax).args[0], ("relax.matmul",))
    if isinstance(scores, Refusal) or not scores.out.is_contiguous():
        return Refusal("scores", "is a softmax of something else than a product with arithmetic after it")
    inner = graph.call(scores.anchor)
    assert inner is not None
    space = shape(mixed.anchor)
    *batch, queries, channels = space
    keys, depth = shape(product.args[0])[-1], shape(inner.args[0])[-1]
    if shape(scores.anchor) != (*batch, queries, keys):
        return Refusal("scores", f"has scores of {shape(scores.anchor)} for an output of {space}")
    query, first, query_covers = scaled_view(graph, inner.args[0])
    key, value = operand(graph, inner.args[1]), operand(graph, product.args[1])
    packed, second = factored(key.expression)
    covers = (*mixed.covers, softmax, *scores.covers, *query_covers, *key.covers, *value.covers)
    assembly, arguments = Assembly(covers), Arguments()
    operands = _Operands(
        tuple(batch),
        queries,
        keys,
        depth,
        channels,
        _over(query, (*batch, queries, depth)),
        expanded(packed, (*batch, depth, keys)),
        expanded(value.expression, (*batch, keys, channels)),
        first * second,
        arguments.loading(scores.epilogue),
        mixed.out,
        arguments.loading(mixed.epilogue),
    )
    made = _across if _goes_across(operands, profile) else _along
    function = made(operands, assembly, arguments, profile)
    assembly.add(function, arguments.bases, shape(call.var))
    return assembly.kernel()


def _goes_across(of: _Operands, profile: Profile) -> bool:
    """Whether queries go side by side in vectors: whatever is read beside the scores must lie so."""
    if not profile.packed:
        return False
    widest = profile.packed[0]
    beside = all(load.layout.strides[-2] in (0, 1) for load in loads(of.scores))
    return beside and of.queries >= widest.columns and min(of.keys, of.channels) >= widest.rows


def _across(of: _Operands, assembly: Assembly, arguments: Arguments, profile: Profile) -> AttentionAcross:
    tile = packed_tile(profile, of.queries, (of.keys, of.depth), (of.channels, of.keys))

    def pack(value: Expression, columns: int, depth: int, width: int) -> Panels:
        return assembly.pack(value, of.batch, columns, depth, width, arguments, profile, shared=True)

    turned = (*range(len(of.batch)), -1, -2)
    # The base is in the queries already, where nothing comes between products and softmax.
    plain = isinstance(of.scores, Result)
    factor, base = (of.factor * BASE, 1.0) if plain else (of.factor, BASE)
    query = pack(Apply("multiply", (ordered(of.query, turned), Number(factor))), of.queries, of.depth, tile.columns)
    key = pack(of.key, of.keys, of.depth, tile.rows)
    value = pack(of.value, of.channels, of.keys, tile.rows)
    order = order_for(profile, of.matrices, of.queries, tile.columns, key, (of.keys, of.channels))
    return AttentionAcross(query, key, value, ordered(of.scores, turned), base, of.out, of.epilogue, order)


def _along(of: _Operands, assembly: Assembly, arguments: Arguments, profile: Profile) -> Attention:
    query = arguments.load(of.query.view)
    score_tile, value_tile = best_tiles(profile, of.queries, (of.keys, of.depth), (of.channels, of.keys))
    key = assembly.pack(of.key, of.batch, of.keys, of.depth, score_tile.columns, arguments, profile)
    order = order_for(profile, of.matrices, of.queries, score_tile.rows, key, (of.keys, of.channels))
    value = arguments.load(_rows(assembly, of.value, (*of.batch, of.keys, of.channels), order))
    scores = scaled(of.scores, of.factor)
    return Attention(query, key, value, scores, of.out, of.epilogue, order, value_tile.columns)


def _softmax_behind(call: Call, var: Any) -> Any:
    """The softmax over keys that a product's left operand is, perhaps reshaped."""
    graph = call.graph
    while graph.call(var, "relax.nn.softmax") is None:
        moved = graph.call(var, "relax.reshape", "relax.squeeze", "relax.expand_dims")
        if moved is None or not graph.is_sole(var):
            return Refusal("other-operator", "multiplies by no softmax")
        var = moved.args[0]
    node = graph.call(var)
    assert node is not None
    if not graph.is_sole(var):
        return Refusal("escapes", "has attention whose probabilities are read elsewhere, too")
    if not graph.is_sole(node.args[0]):
        return Refusal("escapes", "has attention whose scores are read elsewhere, too")
    if int(node.attrs.axis) % len(shape(var)) != len(shape(var)) - 1:
        return Refusal("axis", "has a softmax along another axis than the keys'")
    return var


def _over(leaf: Leaf, space: Shape) -> Leaf:
    made = expanded(leaf, space)
    assert isinstance(made, Leaf)
    return made


def _rows(assembly: Assembly, value: Expression, space: Shape, order: Order) -> View:
    """Values whose channels are neighbours: as they lie, or copied so.

    Where there are several blocks of keys, rows are neighbours, too: apart, each lies on another page of memory.
    """
    axes = 1 if order.blocks == 1 else 2
    if isinstance(value, Leaf) and value.view.layout.strides[-axes:] == contiguous(space).strides[-axes:]:
        return value.view
    return assembly.copy(value, space)


ATTENTION = Rule("attention", _apply)
