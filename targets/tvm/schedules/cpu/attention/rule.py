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
from attnrewrite.targets.tvm.schedules.cpu.reduction import Reduce
from attnrewrite.targets.tvm.schedules.cpu.register_tile import best_tiles, packed_tile
from attnrewrite.targets.tvm.schedules.cpu.rows import Softmax
from attnrewrite.targets.tvm.schedules.expression import (
    Apply,
    Arguments,
    Expression,
    Leaf,
    Load,
    Number,
    Result,
    factored,
    leaves,
    moved,
    ordered,
)
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import operand, scaled_view, trace
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous


@dataclass(frozen=True)
class _Operands:
    """What attention is of: `query` over [batch..., queries, depth], `key` over [batch..., depth, keys], `value` over
    [batch..., keys, channels]; scores are `scores` of the products times `factor`. What is written has the shape
    `written`.
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
    written: Shape

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
    assembly = Assembly(covers)
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
        scores.epilogue,
        mixed.out,
        mixed.epilogue,
        shape(call.var),
    )
    made = _one_query if operands.queries == 1 else _across if _goes_across(operands, profile) else _along
    made(operands, assembly, profile)
    return assembly.kernel()


def _goes_across(of: _Operands, profile: Profile) -> bool:
    """Whether queries go side by side in vectors: whatever is read beside the scores must lie so."""
    if not profile.packed:
        return False
    widest = profile.packed[0]
    beside = all(leaf.view.layout.strides[-2] in (0, 1) for leaf in leaves(of.scores))
    return beside and of.queries >= widest.columns and min(of.keys, of.channels) >= widest.rows


def _across(of: _Operands, assembly: Assembly, profile: Profile) -> None:
    arguments = Arguments()
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
    scores, epilogue = arguments.loading(ordered(of.scores, turned)), arguments.loading(of.epilogue)
    made = AttentionAcross(query, key, value, scores, base, of.out, epilogue, order)
    assembly.add(made, arguments.bases, of.written)


def _along(of: _Operands, assembly: Assembly, profile: Profile) -> None:
    arguments = Arguments()
    query = arguments.load(of.query.view)
    score_tile, value_tile = best_tiles(profile, of.queries, (of.keys, of.depth), (of.channels, of.keys))
    key = assembly.pack(of.key, of.batch, of.keys, of.depth, score_tile.columns, arguments, profile)
    order = order_for(profile, of.matrices, of.queries, score_tile.rows, key, (of.keys, of.channels))
    value = arguments.load(_rows(assembly, of.value, (*of.batch, of.keys, of.channels), order))
    scores, epilogue = arguments.loading(scaled(of.scores, of.factor)), arguments.loading(of.epilogue)
    made = Attention(query, key, value, scores, of.out, epilogue, order, value_tile.columns)
    assembly.add(made, arguments.bases, of.written)


def _one_query(of: _Operands, assembly: Assembly, profile: Profile) -> None:
    """Sums over the channels of each key and over the keys: no key is read twice, so that none is worth packing."""
    arguments, rows = Arguments(), contiguous((*of.batch, 1, of.keys))
    key = _with_axis(ordered(of.key, (*range(len(of.batch)), -1, -2)), -3, 1)
    products = arguments.loading(Apply("multiply", (_with_axis(of.query, -2, of.keys), key)))
    after = arguments.loading(scaled(of.scores, of.factor))
    summed = Reduce(1, "add", products, (*rows.shape, of.depth), rows, after, name="scores")
    scores = assembly.add(summed, arguments.bases, rows.shape, FLOAT32)

    powers = assembly.add(Softmax(Load(0, rows), rows, Result()), [scores], rows.shape, FLOAT32)

    arguments, space = Arguments(), (*of.batch, 1, of.channels, of.keys)
    value = _with_axis(ordered(of.value, (*range(len(of.batch)), -1, -2)), -3, 1)
    weighed = arguments.loading(Apply("multiply", (_with_axis(Leaf(View(powers, rows)), -2, of.channels), value)))
    mixed = Reduce(1, "add", weighed, space, of.out, arguments.loading(of.epilogue), name="values")
    assembly.add(mixed, arguments.bases, of.written)


def _with_axis(value: Expression, axis: int, size: int) -> Expression:
    """A value that is the same all along another axis, which is `axis` of the new ones, counted from the end."""

    def wider(layout: Layout) -> Layout:
        shape, strides = list(layout.shape), list(layout.strides)
        at = len(shape) + 1 + axis
        return Layout((*shape[:at], size, *shape[at:]), (*strides[:at], 0, *strides[at:]), layout.offset)

    made = moved(value, wider)
    assert made is not None
    return made


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
