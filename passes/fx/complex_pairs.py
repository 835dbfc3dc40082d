"""Complex numbers as pairs of real ones, [..., 2]: what matchers follow, and compilers for phones take.

Rotary embeddings are written so: a query's channels, two by two, times numbers on the unit circle (Su et al. 2021,
RoFormer, equation 13).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.pieces import constant_nodes, put, traced
from attnrewrite.passes.fx.signature import other_signature
from attnrewrite.passes.fx.weights_as_linear import STORED
from attnrewrite.patterns.fx.operators import asserts

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """Complex numbers [...] by their parts [..., 2], real and imaginary."""

    parts: Tensor

    @property
    def rank(self) -> int:
        return self.parts.dim() - 1

    @classmethod
    def of(cls, real: Tensor, imaginary: Tensor) -> "Pair":
        return cls(torch.stack([real, imaginary], -1))

    @property
    def real(self) -> Tensor:
        return self.parts.select(-1, 0)

    @property
    def imaginary(self) -> Tensor:
        return self.parts.select(-1, 1)

    def turned(self) -> "Pair":
        """Times the imaginary unit."""
        return Pair.of(-self.imaginary, self.real)


def _product(one: Any, other: Any) -> Pair:
    """x times c + i s is x c + (i x) s (equation 34)."""
    if isinstance(one, Pair) and isinstance(other, Pair):
        turned = one.turned().parts * other.imaginary.unsqueeze(-1)
        return Pair(one.parts * other.real.unsqueeze(-1) + turned)
    pair, factor = (one, other) if isinstance(one, Pair) else (other, one)
    if isinstance(factor, complex):
        return NotImplemented
    return Pair(pair.parts * (factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor))


def _along(operator: Callable[..., Tensor], added: int = 0) -> Callable[..., Pair]:
    """An operator whose second argument is an axis, counted from the front; `added` axes come in."""
    return lambda pair, axis=0, *rest: Pair(operator(pair.parts, axis % (pair.rank + added), *rest))


def _joined(operator: Callable[..., Tensor], added: int = 0) -> Callable[..., Pair]:
    def join(pairs: list[Any], axis: int = 0) -> Pair:
        if not all(isinstance(each, Pair) for each in pairs):
            return NotImplemented
        return Pair(operator([pair.parts for pair in pairs], axis % (pairs[0].rank + added)))

    return join


def _reshaped(pair: Pair, shape: list[int]) -> Pair:
    return Pair(pair.parts.reshape([*shape, 2]))


def _flattened(pair: Pair, start: int = 0, end: int = -1) -> Pair:
    if not pair.rank:
        return NotImplemented
    return Pair(pair.parts.flatten(start % pair.rank, end % pair.rank))


def _same(pair: Pair, *how: Any, **options: Any) -> Pair:
    return pair


IN_PAIRS: dict[Any, Callable[..., Any]] = {
    aten.view_as_complex.default: Pair,
    aten.complex.default: Pair.of,
    aten.polar.default: lambda radius, angle: Pair.of(radius * angle.cos(), radius * angle.sin()),
    aten.view_as_real.default: lambda pair: pair.parts,
    aten.real.default: lambda pair: pair.real,
    aten.imag.default: lambda pair: pair.imaginary,
    aten._conj.default: lambda pair: Pair.of(pair.real, -pair.imaginary),
    aten.mul.Tensor: _product,
    aten.view.default: _reshaped,
    aten.reshape.default: _reshaped,
    aten.flatten.using_ints: _flattened,
    aten.unsqueeze.default: _along(torch.unsqueeze, 1),
    aten.squeeze.dim: _along(torch.squeeze),
    aten.select.int: _along(torch.select),
    aten.slice.Tensor: _along(aten.slice.Tensor),
    aten.transpose.int: lambda pair, one, other: Pair(pair.parts.transpose(one % pair.rank, other % pair.rank)),
    aten.mT.default: lambda pair: Pair(pair.parts.transpose(-3, -2)),
    aten.permute.default: lambda pair, order: Pair(pair.parts.permute([a % pair.rank for a in order] + [pair.rank])),
    aten.expand.default: lambda pair, sizes: Pair(pair.parts.expand([*sizes, 2])),
    aten.index.Tensor: lambda pair, places: Pair(aten.index.Tensor(pair.parts, places)),
    aten.cat.default: _joined(torch.cat),
    aten.stack.default: _joined(torch.stack, 1),
    aten.sym_size.int: lambda pair, axis: pair.parts.shape[axis % pair.rank],
    **dict.fromkeys((aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default), _same),
}


@dataclass(frozen=True)
class ComplexAsPairs(Pass[ExportedProgram]):
    """No complex number but those that come in, where every operation on them is known; else all stay."""

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if not any(map(_touches, graph.graph.nodes)):
            return PassResult(graph)
        edited = copied(graph.graph)
        specs = input_specs(graph, edited)
        edits = _in_place(edited, [node for node, spec in specs.items() if spec.kind in STORED])
        if not edits:
            return PassResult(graph)
        return PassResult(with_graph(graph, edited, specs, {**graph.constants, **graph.state_dict}), edits)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)


def _in_place(graph: Graph, stored: Sequence[Node]) -> tuple[Edit, ...]:
    """What was changed in `graph`; nothing, where it has an operation on complex numbers that is not known."""
    nodes, constants = list(graph.nodes), constant_nodes(graph, stored)
    touched = [node for node in nodes if _touches(node) and not asserts(node)]
    made: dict[Node, Node] = {}
    for node in touched:
        if node.target is aten.mul.Tensor and node.args[0] in constants:
            node.args = node.args[::-1]  # what is turned comes first, as matchers take it
        found = _parts_of(node) if node.op == "placeholder" else _in_pairs(node, made)
        if found is None:
            return ()
        made[node] = found
    for node in nodes:
        if asserts(node) and _touches(node):
            graph.erase_node(node)
    for node in reversed(touched):
        if node.op != "placeholder":
            node.replace_all_uses_with(made[node])
            graph.erase_node(node)
    return tuple(Edit(node.name, made[node].name) for node in touched)


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _touches(node: Node) -> bool:
    return _is_complex(node) or any(map(_is_complex, node.all_input_nodes))


def _parts_of(node: Node) -> Node:
    """Both parts of numbers that come in."""
    with node.graph.inserting_after(node):
        parts = node.graph.call_function(aten.view_as_real.default, (node,))
    parts.meta["val"] = torch.view_as_real(node.meta["val"])
    return parts


def _in_pairs(node: Node, made: Mapping[Node, Node]) -> Node | None:
    """What `node` computes, in front of it, of pairs in place of complex numbers; None where that is not known."""
    given = node.all_input_nodes
    if node.target not in IN_PAIRS:
        return None

    def compute(*operands: Any) -> Any:
        known = zip(given, operands, strict=True)
        values = {each: Pair(operand) if _is_complex(each) else operand for each, operand in known}
        arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
        result = IN_PAIRS[node.target](*arguments, **keywords)
        if result is NotImplemented:
            return ()
        return result.parts if isinstance(result, Pair) else result

    operands = [made[each] if _is_complex(each) else each for each in given]
    piece = traced(compute, operands)
    result = piece.output_node().args[0]
    return put(piece, operands, node, node.meta)[result] if isinstance(result, Node) else None
