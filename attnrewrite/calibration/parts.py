"""Parts of a graph that can be run by themselves, for other images, and as few as one likes."""

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.calibration.way import map_axis, operation_of, shape_of, varying_nodes

_MAPS = {"linear", "conv2d", "matmul"}
_DIVIDES = {"view", "reshape", "flatten", "unflatten", "permute", "transpose"}  # or moves
_DIVIDES |= {"select", "slice", "unbind", "chunk", "split", "split_with_sizes"}


@dataclass(frozen=True)
class Part:
    """The nodes from what is made of `inputs`, of which each image has rows of its own, to `end`, with the constants
    that they read; `lengths` are batches'.
    """

    inputs: tuple[Node, ...]
    end: Node
    nodes: frozenset[Node]
    lengths: frozenset[Node]

    @property
    def sound(self) -> bool:
        """Whether all rows that come in or go out are of the batch."""
        batches = {shape_of(node)[:1] for node in (*self.inputs, self.end)}
        return () not in batches and len(batches | {(_length(node),) for node in self.lengths}) == 1

    def as_module(self, module: GraphModule, inside: Collection[Node] = ()) -> GraphModule:
        """A module of its inputs, which are the part's of `module`: matrices that nothing but `inside` reads are the
        graph's own. Norms and biases are constants: a form's maps follow them, and files store those that are ones or
        zeros once for many.
        """
        graph = Graph()
        made = {node: graph.placeholder(node.name) for node in self.inputs}
        batch = graph.call_function(torch.ops.aten.sym_size.int, (made[self.inputs[0]], 0))
        made |= dict.fromkeys(self.lengths, batch)
        stored: dict[str, Tensor] = {}
        constants: dict[Node, Any] = {}

        def place(node: Node) -> Node:
            if node not in made:
                name = f"stored{len(stored)}"
                stored[name], made[node] = constants[node], graph.get_attr(name)
            return made[node]

        for node in module.graph.nodes:
            if node not in self.nodes:
                continue
            if node.op == "get_attr":
                tensor = attrgetter(str(node.target))(module)
                matrix = isinstance(tensor, nn.Parameter) and tensor.dim() > 1
                own = matrix and all(each in inside for each in _readers(module, node))
                constants[node] = tensor if own else tensor.detach()
                if own:
                    place(node)
            elif all(each in constants and each not in made for each in node.all_input_nodes):
                constants[node] = node.target(*map_arg(node.args, constants.get), **map_arg(node.kwargs, constants.get))
            else:
                made[node] = graph.node_copy(node, place)
        place(self.end)
        graph.output(made[self.end])
        return GraphModule(stored, graph)


def back_from(module: GraphModule, end: Node, varying: Collection[Node]) -> Part | None:
    """From `end` back to the tokens [B, ..., C], or pixels [B, C, H, W], that the linear maps read that all comes
    through that varies.
    """
    found: set[Node] = set()
    lengths: set[Node] = set()
    tokens: set[Node] = set()
    axes: set[int] = set()
    batch, walk = shape_of(end)[:1], [end]
    while walk:
        node = walk.pop()
        if node in found or node in lengths:
            continue
        if not _can_hold(module, node):
            return None
        behind = node.all_input_nodes
        if is_length(node) and ((_length(node),) == batch or not all(map(is_length, behind))):
            lengths.add(node)  # what is computed of it, as images times heads, is a node like any
            continue
        found.add(node)
        axis = map_axis(node)
        if node in varying and axis is not None:
            tokens.add(behind[0])
            axes.add(axis)
            behind = behind[1:]
        walk += behind
    if len(tokens) != 1 or len(axes) != 1 or tokens & found or len(shape_of(*tokens)) < 3:
        return None
    part = Part(tuple(tokens), end, frozenset(found), frozenset(lengths))
    return part if part.sound else None


def on_to(module: GraphModule, start: Node, end: Node) -> Part | None:
    """From the value of `start`, and at most one other, on to the map of tokens or pixels at `end`, which is the first
    that all that reads `start` comes to.
    """
    found: set[Node] = set()
    walk = list(start.users)
    while walk:
        node = walk.pop()
        if node in found or is_length(node):
            continue
        if not _can_hold(module, node) or (operation_of(node) in _MAPS and node is not end):
            return None
        found.add(node)
        walk += [] if node is end else node.users
    if end not in found or len(shape_of(end)) < 3:
        return None
    varying = varying_nodes(module)
    behind = dict.fromkeys(operand for node in found for operand in node.all_input_nodes if operand not in found)
    lengths = {operand for operand in behind if operand in varying and is_length(operand)}
    inputs = start, *(operand for operand in behind if operand in varying - lengths and operand is not start)
    constants = _constants(module, (operand for operand in behind if operand not in varying))
    if constants is None or len(inputs) > 2:
        return None
    part = Part(inputs, end, frozenset(found | constants), frozenset(lengths))
    return part if part.sound else None


def read_apart(module: GraphModule, parts: Collection[Part], reader: Node, varying: Collection[Node]) -> bool:
    """Whether what the linear maps of `parts` give for `reader`, which stands behind them, nothing else reads: others
    may read other channels of them.
    """
    nodes = {node for part in parts for node in part.nodes if node in varying and not is_length(node)}
    inside = {reader}.union(nodes, *(part.lengths for part in parts))
    reads = [(node, user) for node in nodes for user in node.users if not is_length(user)]
    others = [(node, user) for node, user in reads if user not in inside]
    if not others:
        return True
    places = _places(module, nodes)
    own = _channels(places, ((node, user) for node, user in reads if node in places and user in inside - places.keys()))
    theirs = _channels(places, others)
    return own is not None and theirs is not None and own.isdisjoint(theirs)


def is_length(node: Node) -> bool:
    """Whether a node's value is a number of a shape."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _places(module: GraphModule, nodes: Collection[Node]) -> dict[Node, Any]:
    """Which channel of which of the linear maps among `nodes` stands where, at the maps and at what only moves and
    divides what they give: a number for each, of one image.
    """
    found: dict[Node, Any] = {}
    begun = 0
    for node in module.graph.nodes:
        axis = map_axis(node) if node in nodes else None
        if axis is not None:
            *lengths, channels = map(int, node.meta["val"].movedim(axis, -1).shape[1:])
            found[node] = torch.arange(begun, begun + channels).expand(1, *lengths, -1).movedim(-1, axis)
            begun += channels
        elif _divides(node) and node.args[0] in found:
            args, kwargs = map_arg((node.args, node.kwargs), lambda own: 1 if is_length(own) else found[own])
            found[node] = node.target(*args, **kwargs)
    return found


def _divides(node: Node) -> bool:
    """Whether what it gives are parts of its first operand, or all of that in other places."""
    return node.target is operator.getitem or operation_of(node) in _DIVIDES


def _channels(places: dict[Node, Any], reads: Iterable[tuple[Node, Node]]) -> set[int] | None:
    """The numbers in `places` of what is read, as (node, reader); None where that is not known."""
    found: set[int] = set()
    for node, reader in reads:
        read = places.get(reader, places.get(node))
        if not isinstance(read, Tensor):
            return None
        found.update(read.unique().tolist())
    return found


def _constants(module: GraphModule, ends: Iterable[Node]) -> set[Node] | None:
    """`ends`, and what they are made of; None where a part cannot hold them."""
    found: set[Node] = set()
    walk = list(ends)
    while walk:
        node = walk.pop()
        if not _can_hold(module, node):
            return None
        found.add(node)
        walk += node.all_input_nodes
    return found


def _can_hold(module: GraphModule, node: Node) -> bool:
    """Whether a part can: operations and stored tensors."""
    if node.op == "get_attr":
        return isinstance(attrgetter(str(node.target))(module), Tensor)
    return node.op == "call_function"


def _readers(module: GraphModule, stored: Node) -> Iterator[Node]:
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target == stored.target:
            yield from node.users


def _length(node: Node) -> str:
    return str(node.meta["val"])
