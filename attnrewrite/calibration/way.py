"""The way from a linear map to the residual stream, of operations that move and scale; and what is read of a graph's
nodes to follow it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from attnrewrite.calibration.segments import Values

MOVES = {"alias", "clone", "contiguous", "dropout", "view", "_unsafe_view", "reshape", "permute", "transpose"}
MOVES |= {"unsqueeze", "squeeze", "flatten", "unflatten", "slice", "roll", "constant_pad_nd"}
_NORMS = {
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
}


@dataclass(frozen=True)
class Step:
    """One operation on the way from a linear map to the stream; `carried` is the operand that comes from the map.

    It moves and scales. A normalisation scales and shifts by what it has stored, or, of a layer, by what it measures of
    each token as it is now: to first order that is what a change of the token makes, but for its own length.
    """

    node: Node
    carried: Node

    @property
    def operands(self) -> set[Node]:
        """The nodes whose values `apply` reads, beside what it is given."""
        own = {operand for operand in self.node.all_input_nodes if operand is not self.carried}
        return own | {self.carried} if operation_of(self.node) == "layer_norm" else own

    @property
    def shifts(self) -> bool:
        return operation_of(self.node) in _NORMS

    def apply(self, moved: Tensor, values: Values) -> Tensor:
        """What the operation makes of a change of what it carries."""
        if self.shifts:
            return moved * self._scale_and_shift(values)[0]
        return self._run(moved, values)

    def apply_whole(self, moved: Tensor, values: Values) -> Tensor:
        """What it makes of a value itself."""
        if self.shifts:
            scale, shift = self._scale_and_shift(values)
            return moved * scale + shift
        return self._run(moved, values)

    def _run(self, moved: Tensor, values: Values) -> Tensor:
        args, kwargs = self._arguments({**values, self.carried: moved})
        target: Any = self.node.target
        return target(*args, **kwargs)

    def _arguments(self, values: Values) -> Any:
        def value(argument: Any) -> Any:
            return values[argument] if isinstance(argument, Node) else argument

        return map_aggregate(self.node.args, value), map_aggregate(self.node.kwargs, value)

    @torch.no_grad()
    def _scale_and_shift(self, values: Values) -> tuple[Tensor, Tensor]:
        args, kwargs = self._arguments({self.carried: None, **values})
        kind = operation_of(self.node)
        given = {"weight": None, "bias": None, "eps": 1e-5} | dict(zip(_NORMS[kind], args, strict=False)) | kwargs
        if kind == "layer_norm":
            variance, mean = torch.var_mean(given["input"], -1, correction=0, keepdim=True)
        else:
            channels = (-1, *[1] * (len(shape_of(self.node)) - 2))  # of [B, C, ...]
            given |= {name: part.reshape(channels) for name, part in given.items() if isinstance(part, Tensor)}
            variance, mean = given["running_var"], given["running_mean"]
        scale = (variance + given["eps"]).rsqrt() * (1.0 if given["weight"] is None else given["weight"])
        return scale, (0.0 if given["bias"] is None else given["bias"]) - mean * scale


def way_to_stream(node: Node, varying: set[Node]) -> tuple[tuple[Step, ...], Node, Node | None]:
    """The steps from `node` to the addition that takes it into the stream, that addition, and what it is added to; no
    steps, `node` and None where there is none.
    """
    path: list[Step] = []
    current = node
    while (following := _reader(current)) is not None:
        operands = [operand for operand in following.all_input_nodes if operand is not current]
        kind = operation_of(following)
        if list(following.args).count(current) != 1:
            break
        if kind == "add" and not following.kwargs and any(operand in varying for operand in operands):
            if shape_of(following) != shape_of(current):  # one row for several tokens of the stream
                break
            return tuple(path), following, operands[0]
        first, settled = following.args[0] is current, not any(operand in varying for operand in operands)
        scales = kind == "mul" or (first and _is_settled_norm(following))
        if not ((scales and settled) or (kind in MOVES and first)):
            break
        path.append(Step(following, current))
        current = following
    return (), node, None


def _is_settled_norm(node: Node) -> bool:
    """Whether a normalisation's scales are stored, or are of each token [..., C] by itself."""
    if operation_of(node) == "layer_norm":
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    return operation_of(node) == "batch_norm" and not node.args[5]


def _reader(node: Node) -> Node | None:
    """The one operation that reads more than a length of `node`; None where there are none, or several."""
    readers = [user for user in node.users if operation_of(user) != "sym_size"]
    return readers[0] if len(readers) == 1 else None


def varying_nodes(module: GraphModule) -> set[Node]:
    """The nodes that depend on an input of the graph."""
    found: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def shape_of(node: Node) -> tuple[str, ...]:
    """The lengths of a node's value, as text, so that open ones compare; empty where it is no tensor."""
    return tuple(map(str, getattr(node.meta.get("val"), "shape", ())))


def operation_of(node: Node) -> str:
    """The name of the aten operation, without its overload; empty where the node calls none."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""
