"""Quantised files: an attention between two roundings is read in float, without the roundings inside it.

A DequantizeLinear that undoes a QuantizeLinear is the identity but for a rounding and a range: a pair. Between the
projections of an attention and the map that reads it, pairs are left out. Those before and after it stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnrewrite.patterns.graph import ComputedConstants, GraphView
from attnrewrite.patterns.onnx.operators import SHAPE_ONLY
from attnrewrite.patterns.onnx.prepare import inlined
from attnrewrite.patterns.quantised import NEAR, inside

_ROUNDS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_INTEGER_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


@dataclass(frozen=True)
class Rounding:
    """A pair on the way to operand `place` of the node that makes `reader`: without it, the node reads `source`.

    `rounded` is what the pair makes.
    """

    reader: str
    place: int
    source: str
    rounded: str


class QuantisedView(GraphView, Protocol):
    """What looking for pairs needs beyond GraphView."""

    def maker(self, value: str) -> ir.Node | None:
        """The node that makes a value; of a product that is read with its bias, the product's."""


def inner_roundings(graph: QuantisedView, model: ir.Model) -> dict[str, tuple[Rounding, ...]]:
    """The pairs inside the attentions of `graph`, which shows `model`, by the value that each attention's anchor makes:
    all of an attention's, or none, where one is read by what is no node of the model.
    """
    made = {str(value.name): value for node in model.graph for value in node.outputs}
    live = cast(QuantisedView, ComputedConstants(graph))  # learned queries, once projected, are tokens
    found: dict[str, tuple[Rounding, ...]] = {}
    for value in graph.values:
        shown = [each for reader in _readers(live, value) for each in _pairs_before(live, reader)]
        own = [each for one in shown for each in _in_model(one, made)]
        if own and all(each.reader in made for each in own):
            found[value] = tuple(dict.fromkeys(own))
    return found


def _in_model(shown: Rounding, made: Mapping[str, ir.Value]) -> list[Rounding]:
    """The same, read by a node of the model: what stands for a fused operator is named after it, and a slash."""
    name = shown.reader
    while name not in made and "/" in name:
        name = name.rpartition("/")[0]
    node = made[name].producer() if name in made and name != shown.reader else None
    inputs = enumerate(node.inputs if node is not None else ())
    places = [place for place, operand in inputs if operand is not None and operand.name == shown.rounded]
    return [replace(shown, reader=name, place=place) for place in places] or [shown]


def without(model: ir.Model, roundings: Sequence[Rounding], other: "Instead | None" = None) -> ir.Model:
    """A copy of `model` in which each reader, and what asks for its size, reads the source of its rounding, or what
    `other` makes of that.
    """
    result, read = model.clone(), {}
    values = {str(value.name): value for value in _made(result.graph)}
    for each in roundings:
        reader, source = values[each.reader].producer(), values[each.source]
        assert reader is not None
        if each.rounded not in read:
            read[each.rounded] = source if other is None else other(values[each.rounded], source)
        reader.replace_input_with(each.place, read[each.rounded])
        for sized in values[each.rounded].consumers():  # else the pair would still be there for its size
            if sized.op_type in SHAPE_ONLY:
                sized.replace_input_with(0, read[each.rounded])
    RemoveUnusedNodesPass()(result)
    return result


Instead = Callable[[ir.Value, ir.Value], ir.Value]  # what is read in place of (what a pair makes, its source)


def _readers(graph: QuantisedView, value: str) -> list[str]:
    values = inside(graph, value)
    return [*values, *_maps_before(graph, values), *_way_out(graph, values)] if values else []


def _maps_before(graph: QuantisedView, inside: Sequence[str]) -> Iterator[str]:
    """The projections that integers of the moment are multiplied with: what rounds them belongs to the product."""
    for value in inside:
        for operand in graph.operation(value).inputs:
            node = graph.maker(operand) if graph.operation(operand).kind in ("linear", "conv") else None
            pair = _pair(node.inputs[0]) if node is not None else None
            if pair is not None and pair.op_type == "DynamicQuantizeLinear":
                yield operand


def _way_out(graph: QuantisedView, inside: Sequence[str]) -> list[str]:
    """From the last product, through movement and pairs alone, to the map that reads them; empty where none does."""
    products = [value for value in inside if graph.operation(value).kind in ("matmul", "sdpa")]
    value = next((value for value in products if not set(graph.users(value)) & set(inside)), None)
    way: list[str] = []
    while value is not None and (user := _only_user(graph, value)) is not None and len(way) <= NEAR:
        operation = graph.operation(user)
        way.append(user)
        if operation.kind in ("linear", "conv") and operation.inputs[0] == value:
            return way
        moves = operation.kind == "move" and operation.inputs == (value,)
        value = user if moves or operation.attributes.get("quantized") or operation.name == "identity" else None
    return []


def _only_user(graph: QuantisedView, value: str) -> str | None:
    """What is made of `value` where one node reads it."""
    users = graph.users(value)
    return users[0] if len(users) == 1 else None


def _pairs_before(graph: QuantisedView, reader: str) -> Iterator[Rounding]:
    node = graph.maker(reader)
    if node is None or node.op_type in (*_ROUNDS, "DequantizeLinear"):
        return
    for place, operand in enumerate(node.inputs):
        rounds, source = _pair(operand), operand
        while rounds is not None and source is not None:
            source = rounds.inputs[0]
            rounds = _pair(source)
        if source is not None and operand is not None and source is not operand:
            yield Rounding(str(node.outputs[0].name), place, str(source.name), str(operand.name))


def _pair(value: ir.Value | None) -> ir.Node | None:
    """The node that rounds what `value` has again as fractions, by the same scale."""
    undoes = value.producer() if value is not None else None
    if undoes is None or undoes.op_type != "DequantizeLinear" or undoes.inputs[0] is None:
        return None
    rounds = undoes.inputs[0].producer()
    if rounds is None or rounds.op_type not in _ROUNDS:
        return None
    scales = rounds.outputs[1:] if rounds.op_type == "DynamicQuantizeLinear" else rounds.inputs[1:]
    same = len(scales) == len(undoes.inputs) - 1 and all(map(_equal, scales, undoes.inputs[1:]))
    axes = [node.attributes["axis"].as_int() if "axis" in node.attributes else 1 for node in (rounds, undoes)]
    return rounds if same and axes[0] == axes[1] else None


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    mine, theirs = ir.convenience.get_const_tensor(one), ir.convenience.get_const_tensor(other)
    return mine is not None and theirs is not None and np.array_equal(mine.numpy(), theirs.numpy())


def as_pairs(model: ir.Model) -> ir.Model:
    """`model` with products of integers (MatMulInteger, ConvInteger) as products of pairs, which are the same numbers.

    onnxruntime's dynamic quantisation writes Mul(Cast(MatMulInteger(a, b)), Mul(scale of a, scale of b)): what is
    written otherwise stays. The model given is not changed.
    """
    if not any(node.op_type in _INTEGER_PRODUCTS for graph in model.graphs() for node in graph):
        return model
    result = inlined(model)
    for node in list(result.graph):
        write_as_pairs(result.graph, node)
    RemoveUnusedNodesPass()(result)
    return result


def write_as_pairs(graph: ir.Graph, node: ir.Node) -> None:
    """Let the product of integers that `node` scales, where it does, be one of pairs, named after its value."""
    if node.op_type != "Mul":
        return
    cast, scale = (operand.producer() if operand is not None else None for operand in node.inputs)
    product = cast.inputs[0].producer() if cast is not None and cast.op_type == "Cast" and cast.inputs[0] else None
    if product is None or scale is None or product.op_type not in _INTEGER_PRODUCTS or scale.op_type != "Mul":
        return
    operands, name = [], str(node.outputs[0].name)
    for place, role in enumerate(("left", "right")):
        integers = product.inputs[place]
        zero = product.inputs[place + 2] if len(product.inputs) > place + 2 else None
        unit = _unit_of(integers, scale, first=place == 0)
        if integers is None or unit is None:
            return
        units, sizes = list(unit.shape or ()), list(integers.shape or ())
        if units and (product.op_type == "ConvInteger" or units != sizes[-1:]):
            return
        axis = {"axis": len(sizes) - 1} if units else {}
        operands.append(ir.node("DequantizeLinear", [integers, unit, zero], axis, name=f"{name}/{role}"))
        operands[-1].outputs[0].name = f"{name}/{role}"
    plain = ir.node(
        _INTEGER_PRODUCTS[product.op_type],
        [operand.outputs[0] for operand in operands],
        {key: attribute.value for key, attribute in product.attributes.items()},
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    new, old = plain.outputs[0], node.outputs[0]
    new.type, new.shape = old.type, old.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], [*operands, plain], [old], [new])


def _unit_of(integers: ir.Value | None, scale: ir.Node, first: bool) -> ir.Value | None:
    """The factor of `scale` that belongs to `integers`: that of the node that made them, or the stored one."""
    rounds = integers.producer() if integers is not None else None
    if rounds is not None and rounds.op_type == "DynamicQuantizeLinear":
        return next((unit for unit in scale.inputs if unit is rounds.outputs[1]), None)
    unit = scale.inputs[0 if first else 1]
    return unit if unit is not None and unit.is_initializer() and integers is not None else None


def _made(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
