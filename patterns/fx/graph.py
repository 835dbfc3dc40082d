"""Torch FX graphs (as torch.export gives them, unlifted) behind the GraphView protocol."""

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError
from attnrewrite.patterns.answers import are_logits
from attnrewrite.patterns.fx.normalise import normalise
from attnrewrite.patterns.fx.operators import FACTORIES, draws_numbers, is_open, module_path, operator_name
from attnrewrite.patterns.graph import Operation
from attnrewrite.patterns.softmaxes import softmax_by_hand


class FxGraph:
    """A GraphModule of aten operations, with the example's sizes in place of symbolic ones."""

    frontend: Literal["fx"] = "fx"

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._operations: dict[str, Operation] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._is_constant: dict[str, bool] = {}
        self._written = _written_buffers(module)
        for node in module.graph.nodes:
            if node.op != "output":
                self._is_constant[node.name] = self._node_is_constant(node)

    @cached_property
    def values(self) -> tuple[str, ...]:
        return tuple(name for name, node in self._nodes.items() if isinstance(node.meta.get("val"), Tensor))

    @cached_property
    def answers(self) -> tuple[str, ...]:
        """The tensors that the graph gives, in order; one that it gives twice, twice."""
        (output,) = (node for node in self._nodes.values() if node.op == "output")
        given = [leaf for leaf in tree_leaves(output.args) if isinstance(leaf, Node)]
        return tuple(node.name for node in given if isinstance(node.meta.get("val"), Tensor))

    @property
    def answer(self) -> str:
        """The first of them: the logits, of a classifier."""
        return self.answers[0]

    @property
    def image_axes(self) -> tuple[int | None, ...]:
        """Along which axis each of the answers has the images of an open batch, one after the other; None where there
        is no such axis. Inputs that do not meet (the picture and the text of two encoders) have a symbol each.
        """
        inputs = [name for name in self.values if self._nodes[name].op == "placeholder" and self.batch_axes(name)]
        images = {self._size(name, min(self.batch_axes(name))) for name in inputs}
        return tuple(
            min((axis for axis in self.batch_axes(answer) if self._size(answer, axis) in images), default=None)
            for answer in self.answers
        )

    def _size(self, value: str, axis: int) -> object:
        return self._nodes[value].meta["val"].shape[axis].node.expr

    @cached_property
    def gives_logits(self) -> bool:
        """Whether `answer` is of classes, and no features."""
        return are_logits(self, self.answer)

    def node(self, value: str) -> Node:
        return self._nodes[value]

    def operation(self, value: str) -> Operation:
        if value not in self._operations:
            self._operations[value] = normalise(self, value)  # as it is, for its readers, which are asked next
            self._operations[value] = softmax_by_hand(self, self._operations[value])
        return self._operations[value]

    def shape(self, value: str) -> tuple[int, ...]:
        if value not in self._shapes:  # a symbol is asked for its number slowly, a scan asks for it a thousand times
            self._shapes[value] = tuple(_hint(size) for size in self._nodes[value].meta["val"].shape)
        return self._shapes[value]

    def batch_axes(self, value: str) -> frozenset[int]:
        sizes = self._nodes[value].meta["val"].shape
        return frozenset(axis for axis, size in enumerate(sizes) if is_open(size))

    def users(self, value: str) -> tuple[str, ...]:
        """Tensor users; a multi-output node is passed through to the elements taken from it."""
        found: list[str] = []
        for user in self._nodes[value].users:
            if operator_name(user) in FACTORIES:  # asks for a shape alone
                continue
            if user.op == "output" or isinstance(user.meta.get("val"), Tensor):
                found.append(user.name)
            elif isinstance(user.meta.get("val"), list | tuple):
                found += [element.name for element in user.users]
        return tuple(dict.fromkeys(found))

    def is_boolean(self, value: str) -> bool:
        return bool(self._nodes[value].meta["val"].dtype == torch.bool)

    def is_constant(self, value: str) -> bool:
        return self._is_constant[value]

    def scope(self, value: str) -> str:
        return module_path(self._nodes[value])

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
            operand: torch.from_numpy(array if array.flags.writeable else array.copy())
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
        if operator_name(node) in ("pad", "constant_pad_nd"):
            return torch.nn.functional.pad(self._plain(args[0], feed), self._plain(args[1], feed))
        if operator_name(node) == "im2col":  # torch has it for floating point alone, which holds these numbers exactly
            return torch.ops.aten.im2col.default(self._plain(args[0], feed).double(), *args[1:], **kwargs).long()
        kwargs.pop("memory_format", None)
        if operator_name(node) in ("view", "_unsafe_view"):
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
        if (node.op == "get_attr" and node.target in self._written) or draws_numbers(node):
            return False
        if (
            node.op == "get_attr"
            or operator_name(node) in FACTORIES
            or not isinstance(node.meta.get("val"), Tensor | list | tuple)
        ):
            return True
        return all(self._is_constant[source.name] for source in node.all_input_nodes)


def _written_buffers(module: GraphModule) -> frozenset[object]:
    """The buffers that running the graph changes: what they hold now is not what the next call reads."""
    found = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = zip(node.target._schema.arguments, node.args, strict=False)
        changed = [given for known, given in arguments if known.alias_info is not None and known.alias_info.is_write]
        found |= {given.target for given in changed if isinstance(given, Node) and given.op == "get_attr"}
    return frozenset(found)


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
