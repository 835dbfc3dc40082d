"""The way from a linear map to the residual stream, of operations that move, scale and shift; and what is read of a
graph's nodes to follow it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from attnrewrite.calibration.segments import Values

MOVES = {"alias", "clone", "contiguous", "dropout", "view", "_unsafe_view", "reshape", "permute", "transpose"}
MOVES |= {"unsqueeze", "squeeze", "flatten", "unflatten", "slice", "roll", "constant_pad_nd"}
_CASTS = {"to", "_to_copy", "type_as"}
_SCALES = {"mul", "div"}
_SHIFTS = {"add", "sub"}
_EITHER_WAY = {"add", "mul"}
_NORMS = {
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_OF_TOKENS = {"layer_norm", "rms_norm"}
_STATISTICS = {"mean", "sum", "var", "std", "norm", "linalg_vector_norm", "pow", "square", "abs", "sqrt", "rsqrt"}
_STATISTICS |= {"reciprocal", "clamp", "clamp_min", "maximum", "expand", "expand_as"} | _SCALES | _SHIFTS


@dataclass(frozen=True)
class Step:
    """One operation on the way from a linear map to the stream; `carried` is the operand that comes from the map.

    It moves, scales and shifts. A normalisation scales and shifts by what it has stored, or, of a token, by what it
    measures of it as it is now, be it one operation or written out: to first order that is what a change of the token
    makes, but for its own length. `measures`: whether it does the latter.
    """

    node: Node
    carried: Node
    measures: bool = False

    @property
    def others(self) -> set[Node]:
        """What it reads the values of, beside what it carries: of what it casts to it reads the type alone."""
        if operation_of(self.node) in _CASTS:
            return set()
        return {operand for operand in self.node.all_input_nodes if operand is not self.carried}

    @property
    def operands(self) -> set[Node]:
        """The nodes whose values `apply` reads, beside what it is given."""
        return self.others | {self.carried} if operation_of(self.node) in _OF_TOKENS else self.others

    @property
    def shifts(self) -> bool:
        return operation_of(self.node) in _SHIFTS | {"cat"} or self._normalises

    @property
    def independent(self) -> set[Node]:
        """What the carried value must be no part of: of that, a number for several elements at most may be measured."""
        joined = operation_of(self.node) == "cat"
        return {operand for operand in self.others if joined or not _repeats(operand, self.carried)}

    @property
    def _normalises(self) -> bool:
        return operation_of(self.node) in _NORMS

    def apply(self, moved: Tensor, values: Values) -> Tensor:
        """What the operation makes of a change of what it carries."""
        if self._normalises:
            return moved * self._scale_and_shift(values)[0]
        if operation_of(self.node) == "cat":
            return self._run(moved, {operand: torch.zeros_like(values[operand]) for operand in self.others})
        return moved if self.shifts else self._run(moved, values)

    def apply_whole(self, moved: Tensor, values: Values) -> Tensor:
        """What it makes of a value itself."""
        if self._normalises:
            scale, shift = self._scale_and_shift(values)
            return moved * scale + shift
        return self._run(moved, values)

    def _run(self, moved: Tensor, values: Values) -> Tensor:
        if operation_of(self.node) in _CASTS:
            return moved.to(self.node.meta["val"].dtype)
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
        epsilon = None if kind == "rms_norm" else 1e-5
        given = {"weight": None, "bias": None, "eps": epsilon} | dict(zip(_NORMS[kind], args, strict=False)) | kwargs
        if kind == "layer_norm":
            variance, mean = torch.var_mean(given["input"], -1, correction=0, keepdim=True)
        elif kind == "rms_norm":
            variance = given["input"].square().mean(-1, keepdim=True)
            mean = torch.zeros_like(variance)
            given["eps"] = torch.finfo(variance.dtype).eps if given["eps"] is None else given["eps"]
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
    for *taken, stream in _chains(node, varying):
        carried = [node, *taken]
        measured = _measured(carried, [*taken, stream])
        if measured is None:
            continue
        path = tuple(_step(reader, of, measured) for of, reader in zip(carried, taken, strict=False))
        beside = next(operand for operand in stream.all_input_nodes if operand is not carried[-1])
        independent = {beside}.union(*(step.independent for step in path))
        if measured.union(carried).isdisjoint(independent):
            return path, stream, beside
    return (), node, None


def _step(node: Node, carried: Node, measured: set[Node]) -> Step:
    step = Step(node, carried)
    return replace(step, measures=operation_of(node) in _OF_TOKENS or not measured.isdisjoint(step.others))


def _chains(carried: Node, varying: set[Node]) -> Iterator[tuple[Node, ...]]:
    """Operations one after the other that move, scale and shift, and the addition to another value that ends them."""
    for reader in carried.users:
        if _operands(reader).count(carried) != 1:
            continue
        if _adds_to_another(reader, carried, varying):
            yield (reader,)
        elif _moves(reader, carried) or _scales_or_shifts(reader, carried, varying):
            yield from ((reader, *rest) for rest in _chains(reader, varying))


def _adds_to_another(reader: Node, carried: Node, varying: set[Node]) -> bool:
    """One row for several tokens of the stream is no such addition."""
    others = [operand for operand in reader.all_input_nodes if operand is not carried]
    adds = operation_of(reader) == "add" and not reader.kwargs and shape_of(reader) == shape_of(carried)
    return adds and any(operand in varying for operand in others)


def _operands(reader: Node) -> list[object]:
    """Its arguments, those of a list one by one."""
    return [each for arg in reader.args for each in (arg if isinstance(arg, list | tuple) else [arg])]


def _moves(reader: Node, carried: Node) -> bool:
    kind = operation_of(reader)
    return kind == "cat" or (kind in MOVES | _CASTS and reader.args[0] is carried)


def _scales_or_shifts(reader: Node, carried: Node, varying: set[Node]) -> bool:
    """Whether it is a normalisation, or arithmetic with what may be independent of the carried value or measured of it:
    what is subtracted is stored or a number for several of its elements.
    """
    kind, first = operation_of(reader), reader.args[0] is carried
    if kind in _NORMS:
        return first and _is_settled_norm(reader)
    if kind not in _SCALES | _SHIFTS or reader.kwargs or shape_of(reader) != shape_of(carried):
        return False
    others = [operand for operand in reader.all_input_nodes if operand is not carried and operand in varying]
    settled = all(_repeats(operand, carried) for operand in others)
    return (first or kind in _EITHER_WAY) and (kind in _SCALES or settled)


def _repeats(operand: Node, carried: Node) -> bool:
    """Whether each of its elements is for several of the carried value."""
    while operation_of(operand) in {"expand", "expand_as"}:
        operand = operand.args[0]  # type: ignore[assignment]
    return shape_of(operand) != shape_of(carried)


def _measured(carried: list[Node], way: list[Node]) -> set[Node] | None:
    """The statistics of the carried values that are read on their way alone, as a token's mean and length; None where
    anything else reads them: a gate that follows them is no scale, even to first order.
    """
    found: set[Node] = set()
    pending = [*carried]
    while pending:
        readers = [user for user in pending.pop().users if operation_of(user) != "sym_size"]
        new = [user for user in readers if user not in found and user not in way]
        if any(operation_of(user) not in _STATISTICS | MOVES | _CASTS or user > way[-1] for user in new):
            return None
        found.update(new)
        pending += new
    return found


def _is_settled_norm(node: Node) -> bool:
    """Whether a normalisation's scales are stored, or are of each token [..., C] by itself."""
    if operation_of(node) in _OF_TOKENS:
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    return operation_of(node) == "batch_norm" and not node.args[5]


def map_axis(node: Node) -> int | None:
    """The axis that a linear map of tokens [..., C], or pixels [B, C, H, W], works on; None where `node` is neither."""
    kind = operation_of(node)
    if kind == "linear":
        return -1
    return 1 if kind == "conv2d" and _of_one_pixel(node) else None


def _of_one_pixel(convolution: Node) -> bool:
    """Whether it is a linear map of each pixel by itself."""
    options = dict(zip(("stride", "padding", "dilation", "groups"), convolution.args[3:], strict=False))
    whole = options.get("padding", [0]) in ([0], [0, 0]) and options.get("stride", [1]) in ([1], [1, 1])
    kernel = shape_of(convolution.args[1])[2:]  # type: ignore[arg-type]
    return kernel == ("1", "1") and whole and options.get("groups", 1) in (1,)


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
