"""Torch code as a piece of a graph: traced on what nodes of the graph are, and put where they stand; and which nodes
are constants.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

sym_size = torch.ops.aten.sym_size.int


def traced(compute: Callable[..., Any], operands: Sequence[Node]) -> Graph:
    """The graph of what `compute` makes of tensors as `operands` are, its placeholders in their order."""
    values = [operand.meta["val"] for operand in operands]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    with modes[0] if modes else nullcontext():
        return make_fx(compute, pre_dispatch=True)(*values).graph


def constant_nodes(graph: Graph, stored: Iterable[Node] = ()) -> frozenset[Node]:
    """What no input of the graph decides: weights, also those that are `stored` inputs, and what follows from them."""
    found = set(stored)
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def put(piece: Graph, operands: Sequence[Node], before: Node, told: Mapping[str, Any]) -> dict[Node, Node]:
    """Copy `piece`, reading `operands`, into the graph in front of `before`; its nodes, each with the one that stands
    there now. They are told of (scope, origin) as in `told`, the meta of a node. An open size that an input of the
    graph has is read from there: what an operand is computed by need not stay for its size alone.
    """
    outside = {name: each for name, each in told.items() if name not in ("val", "tensor_meta")}
    standing: dict[Node, Node] = dict(zip(piece.nodes, operands, strict=False))
    with before.graph.inserting_before(before):
        for inner in piece.nodes:
            size = _among_inputs(before, inner.meta["val"]) if inner.target is sym_size else None
            if size is not None:
                standing[inner] = size
            elif inner.op == "call_function":
                standing[inner] = before.graph.node_copy(inner, standing.__getitem__)
                standing[inner].meta = {**outside, "val": inner.meta["val"]}
    return standing


def _among_inputs(before: Node, size: Any) -> Node | None:
    """What reads the size of an input, in front of `before`, that is `size` whatever that is: one that stands there, or
    one behind the inputs, so that the input itself is not needed further on.
    """
    inputs = before.graph.find_nodes(op="placeholder")
    for node in inputs:
        value = node.meta.get("val")
        for axis, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not _is_same(length, size):
                continue
            for user in node.users:
                if user.target is sym_size and user.args == (node, axis) and user < before:
                    return user
            with before.graph.inserting_after(inputs[-1]):
                made = before.graph.call_function(sym_size, (node, axis))
            made.meta["val"] = size
            return made
    return None


def _is_same(one: int | SymInt, other: Any) -> bool:
    """Whether two open sizes are one symbol, of one environment."""
    if not isinstance(one, SymInt) or not isinstance(other, SymInt):
        return False
    return one.node.shape_env is other.node.shape_env and one.node.expr == other.node.expr
