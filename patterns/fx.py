"""Torch FX graphs (as torch.export gives them, unlifted) behind the GraphView protocol."""

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.errors import InputError
from attnrewrite.patterns.fx_operators import FACTORIES, FUSED_ATTENTION, IDENTITIES, INDEXED, KINDS, WHOLE_ATTENTION
from attnrewrite.patterns.graph import Operation


class FxGraph:
    """A GraphModule of aten operations, with the example's sizes in place of symbolic ones."""

    frontend: Literal["fx"] = "fx"

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._operations: dict[str, Operation] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._is_constant: dict[str, bool] = {}
        for node in module.graph.nodes:
            if node.op != "output":
                self._is_constant[node.name] = self._node_is_constant(node)

    @cached_property
    def values(self) -> tuple[str, ...]:
        return tuple(name for name, node in self._nodes.items() if isinstance(node.meta.get("val"), Tensor))

    def node(self, value: str) -> Node:
        return self._nodes[value]

    def operation(self, value: str) -> Operation:
        if value not in self._operations:
            self._operations[value] = self._normalise(self._nodes[value])
        return self._operations[value]

    def shape(self, value: str) -> tuple[int, ...]:
        return tuple(_hint(size) for size in self._nodes[value].meta["val"].shape)

    def batch_axes(self, value: str) -> frozenset[int]:
        sizes = self._nodes[value].meta["val"].shape
        return frozenset(
            axis for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt) and not size.node.expr.is_number
        )

    def users(self, value: str) -> tuple[str, ...]:
        """Tensor users; a multi-output node is passed through to the elements taken from it."""
        found: list[str] = []
        for user in self._nodes[value].users:
            if _name(user) in FACTORIES:  # asks for a shape alone
                continue
            if user.op == "output" or isinstance(user.meta.get("val"), Tensor):
                found.append(user.name)
            elif isinstance(user.meta.get("val"), list | tuple):
                found += [element.name for element in user.users]
        return tuple(dict.fromkeys(found))

    def is_output(self, value: str) -> bool:
        return self._nodes[value].op == "output"

    def is_constant(self, value: str) -> bool:
        return self._is_constant[value]

    def scope(self, value: str) -> str:
        stack = self._nodes[value].meta.get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values()]
        return next((path for path in reversed(paths) if "_empty_nn_module_stack" not in path), "")

    def title(self, value: str) -> str:
        node = self._nodes[value]
        return str(node.meta.get("parameter", node.target)) if node.op == "get_attr" else value

    def constant(self, value: str) -> np.ndarray:
        if value not in self._constants:
            tensor = self._evaluate(self._nodes[value], {})
            if tensor.dtype in (torch.bfloat16, torch.float16):
                tensor = tensor.float()
            self._constants[value] = tensor.detach().cpu().numpy()
        return self._constants[value]

    def move(self, value: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        node = self._nodes[value]
        feed = {
            operand: torch.from_numpy(np.ascontiguousarray(array))
            for operand, array in zip(self.operation(value).inputs, arrays, strict=True)
        }
        return self._replay(node, feed).numpy()

    def _replay(self, node: Node, feed: dict[str, Tensor]) -> Any:
        """Run one operation on index tensors; sizes become numbers, padding becomes 0."""
        if node.target is operator.getitem:
            producer, place = node.args
            assert isinstance(producer, Node)
            return self._replay(producer, feed)[place]
        target, args, kwargs = node.target, list(node.args), dict(node.kwargs)
        if _name(node) in ("pad", "constant_pad_nd"):
            return torch.nn.functional.pad(self._plain(args[0], feed), self._plain(args[1], feed))
        kwargs.pop("memory_format", None)
        if _name(node) in ("view", "_unsafe_view"):
            target = torch.ops.aten.reshape.default
        assert callable(target)
        return target(*(self._plain(a, feed) for a in args), **{k: self._plain(v, feed) for k, v in kwargs.items()})

    def _plain(self, argument: Any, feed: dict[str, Tensor]) -> Any:
        if isinstance(argument, Node):
            if argument.name in feed:
                return feed[argument.name]
            value = argument.meta.get("val")
            if isinstance(value, Tensor) and not self.is_constant(argument.name):
                return torch.zeros(self.shape(argument.name), dtype=value.dtype)  # positions only the data knows
            if isinstance(value, Tensor):
                return torch.from_numpy(np.ascontiguousarray(self.constant(argument.name)))
            return _hint(value)
        if isinstance(argument, list | tuple):
            return type(argument)(self._plain(a, feed) for a in argument)
        return argument

    def _evaluate(self, node: Node, memory: dict[Node, Any]) -> Any:
        """The tensor of a constant node, its sizes those of the example."""
        if node in memory:
            return memory[node]
        if node.op == "get_attr":
            result: Any = operator.attrgetter(str(node.target))(self.module)
        elif not isinstance(node.meta.get("val"), Tensor | list | tuple):
            result = _hint(node.meta.get("val"))
        elif not self._is_constant[node.name]:  # a factory asks only for its shape and type
            result = torch.empty(self.shape(node.name), dtype=node.meta["val"].dtype)
        else:
            args = [self._evaluate_argument(a, memory) for a in node.args]
            kwargs = {k: self._evaluate_argument(v, memory) for k, v in node.kwargs.items()}
            with torch.no_grad():
                result = node.target(*args, **kwargs)  # type: ignore[operator]
        memory[node] = result
        return result

    def _evaluate_argument(self, argument: Any, memory: dict[Node, Any]) -> Any:
        if isinstance(argument, Node):
            return self._evaluate(argument, memory)
        if isinstance(argument, list | tuple):
            return type(argument)(self._evaluate_argument(a, memory) for a in argument)
        return argument

    def _node_is_constant(self, node: Node) -> bool:
        if node.op == "placeholder":
            return not isinstance(node.meta.get("val"), Tensor)
        if (
            node.op == "get_attr"
            or _name(node) in FACTORIES
            or not isinstance(node.meta.get("val"), Tensor | list | tuple)
        ):
            return True
        return all(self._is_constant[source.name] for source in node.all_input_nodes)

    def _normalise(self, node: Node) -> Operation:
        if node.op == "placeholder":
            return Operation(node.name, "input", "input", ())
        if node.op in ("get_attr", "output"):
            return Operation(node.name, "constant" if node.op == "get_attr" else "other", node.op, ())
        producer = node
        while producer.target is operator.getitem and isinstance(producer.args[0], Node):
            producer = producer.args[0]
        name = _name(producer)
        inputs = tuple(n.name for n in _tensor_arguments(producer))
        if name in IDENTITIES:
            return Operation(node.name, "map", "identity", inputs[:1])
        if name in INDEXED:
            return self._indexed_operation(node, producer, inputs)
        if name == "copy":  # what is written over a whole tensor
            return Operation(node.name, "map", "identity", inputs[1:2])
        if name == "pad":
            mode = producer.args[2] if len(producer.args) > 2 else producer.kwargs.get("mode", "constant")
            return Operation(node.name, "move" if mode == "constant" else "other", name, inputs)
        if name in _SPECIAL:
            return _SPECIAL[name](self, node, producer, inputs)
        kind = KINDS.get(name, "other")
        if kind == "map":
            return Operation(node.name, kind, name, inputs, _scalar_attributes(producer))
        if kind == "norm":
            style = "batch" if "batch_norm" in name and "no_stats" not in str(producer.target) else name
            epsilon = next((a for a in reversed(producer.args) if isinstance(a, float)), 1e-5)
            return Operation(node.name, kind, name, inputs, {"style": style, "epsilon": epsilon})
        if kind == "reduce":
            rank = len(self.shape(inputs[0])) if inputs else 0
            return Operation(node.name, kind, name, inputs[:1], {"axes": _reduced_axes(name, producer, rank)})
        return Operation(node.name, kind, name, inputs)

    def _indexed_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        """Reading at positions: movement of the first operand alone, which the data may direct."""
        free = [operand for operand in inputs[1:] if not self.is_constant(operand)]
        return Operation(node.name, "move", _name(producer), inputs[:1], {"directed_by": tuple(free)} if free else {})

    def _linear_operation(self, node: Node, _: Node, inputs: tuple[str, ...]) -> Operation:
        return Operation(node.name, "linear", "linear", inputs, {"transposed": False})

    def _addmm_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        bias, left, right = inputs
        plain = not producer.kwargs and len(producer.args) == 3
        if plain and self._is_weight(right, left):
            return Operation(node.name, "linear", "addmm", (left, right, bias), {"transposed": True})
        return Operation(node.name, "other", "addmm", inputs)

    def _matmul_operation(self, node: Node, _: Node, inputs: tuple[str, ...]) -> Operation:
        left, right = inputs
        weight = self._one_matrix(right) if self._is_weight(right, left) else None
        if weight is not None:
            return Operation(node.name, "linear", "matmul", (left, weight), {"transposed": True})
        return Operation(node.name, "matmul", "matmul", inputs)

    def _is_weight(self, value: str, beside: str) -> bool:
        """Whether a constant operand is what the other is projected with; both are constant for learned queries."""
        node = self._nodes[value]
        while node.op != "get_attr" and KINDS.get(_name(node)) == "move" and isinstance(node.args[0], Node):
            node = node.args[0]
        return self.is_constant(value) and (node.op == "get_attr" or not self.is_constant(beside))

    def _one_matrix(self, value: str) -> str | None:
        """The matrix that a constant operand of a batched product repeats for each entry of the batch."""
        matrix = value
        while len(self.shape(matrix)) > 2:
            operation = self.operation(matrix)
            if len(operation.inputs) != 1 or operation.name not in (
                "expand",
                "view",
                "reshape",
                "identity",
                "unsqueeze",
            ):
                return None
            matrix = operation.inputs[0]
        repeated = (
            self.shape(matrix) == self.shape(value)[-2:] and (self.constant(value) == self.constant(matrix)).all()
        )
        return matrix if repeated else None

    def _opaque_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        return Operation(node.name, "sdpa", _name(producer), inputs, {"opaque": True, "anchor": "attention-op"})

    def _convolution_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        value = self._nodes[inputs[0]].meta["val"]
        weight = self._nodes[inputs[1]].meta["val"]
        kernel = tuple(int(size) for size in weight.shape[2:])
        pointwise = all(size == 1 for size in kernel) and tuple(node.meta["val"].shape[2:]) == tuple(value.shape[2:])
        ungrouped = weight.shape[1] == value.shape[1]
        depthwise = weight.shape[1] == 1 and weight.shape[0] == value.shape[1]
        attributes = {"pointwise": pointwise and ungrouped, "depthwise": depthwise}
        return Operation(node.name, "conv", _name(producer), inputs, attributes)

    def _softmax_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        axis: Any = producer.args[1] if len(producer.args) > 1 else producer.kwargs["dim"]
        return Operation(node.name, "softmax", "softmax", inputs, {"axis": int(axis) % len(self.shape(node.name))})

    def _sdpa_operation(self, node: Node, producer: Node, inputs: tuple[str, ...]) -> Operation:
        if node.target is operator.getitem and node.args[1] != 0:  # what a backward pass would need
            return Operation(node.name, "other", _name(producer), inputs)
        arguments = producer.target._schema.arguments  # type: ignore[union-attr]
        named = {known.name: given for known, given in zip(arguments, producer.args, strict=False)}
        named.update(producer.kwargs)
        mask = named.get("attn_mask", named.get("attn_bias"))
        scale = named.get("scale")
        head_dim = self.shape(inputs[0])[-1]
        attributes = {
            "mask": mask.name if isinstance(mask, Node) else None,
            "causal": bool(named.get("is_causal", False)),
            "scale": float(scale) if scale is not None else head_dim**-0.5,  # type: ignore[arg-type]
        }
        return Operation(node.name, "sdpa", "sdpa", inputs[:3], attributes)


_SPECIAL: dict[str, Callable[[FxGraph, Node, Node, tuple[str, ...]], Operation]] = {
    "linear": FxGraph._linear_operation,
    "addmm": FxGraph._addmm_operation,
    **dict.fromkeys(("matmul", "mm", "bmm"), FxGraph._matmul_operation),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), FxGraph._convolution_operation),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax"), FxGraph._softmax_operation),
    **dict.fromkeys(FUSED_ATTENTION, FxGraph._sdpa_operation),
    **dict.fromkeys(WHOLE_ATTENTION, FxGraph._opaque_operation),
}


def _name(node: Node) -> str:
    """The operator's name without namespace and overload."""
    if node.op != "call_function":
        return node.op
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def _tensor_arguments(node: Node) -> list[Node]:
    """The tensor operands in order, repeated where they repeat; shape arithmetic is no operand."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [n for n in found if isinstance(n.meta.get("val"), Tensor | list | tuple)]


def _reduced_axes(name: str, node: Node, rank: int) -> tuple[int, ...]:
    """The axes that a plain reduction removes; none where its arguments say more than axes."""
    if name not in ("sum", "mean", "amax", "amin", "max", "min"):
        return ()
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = [given] if isinstance(given, int) else given if isinstance(given, list | tuple) else range(rank)
    return tuple(axis % rank for axis in listed if isinstance(axis, int)) if rank else ()


def _scalar_attributes(node: Node) -> dict[str, object]:
    """The Python number of a binary map, and whether it stands on the left (0) or the right (1)."""
    for position, argument in enumerate(node.args[:2]):
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            return {"scalar": argument, "position": position}
    return {}


def _hint(size: Any) -> Any:
    """A symbolic number as the example's number.

    Raises:
        InputError: the size depends on the data, and no example says what it is.
    """
    if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        if size.node.hint is None:
            raise InputError(f"the size {size} depends on the data: export the model with a fixed size there")
        return size.node.hint
    return size
