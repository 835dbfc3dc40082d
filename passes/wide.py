"""A graph run node by node, as it is or in float64, where what differs is meaning and not rounding."""

import copy
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from attnrewrite.patterns.fx.operators import operator_name

M = TypeVar("M", bound=nn.Module)
NARROW = (torch.float16, torch.bfloat16, torch.float32)


def widened(value: Any) -> Any:
    """Floating-point tensors in float64, and float64 for the name of a floating-point type; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.dtype in NARROW else value
    return torch.float64 if value in NARROW else value


class Recording(Interpreter):
    """Runs `module` as it is; the values of the nodes called `names` are in `kept` after a run."""

    def __init__(self, module: GraphModule, names: Collection[str] = ()) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.names = frozenset(names)
        self.kept: dict[str, Any] = {}

    @torch.no_grad()
    def run(self, *inputs: Any, **how: Any) -> Any:
        self.kept = {}
        return super().run(*inputs, **how)

    def run_node(self, n: Node) -> Any:
        result = self.value(n)
        if n.name in self.names:
            self.kept[n.name] = result
        return result

    def value(self, n: Node) -> Any:
        return super().run_node(n)


class Wide(Recording):
    """Runs `module` in float64 without a wide copy of it: each weight is widened as it is read.

    What is made of weights alone, as by a cast that autocast left, is made as the model makes it: extraction reads
    it so. Learned queries, once projected, are tokens like any.
    """

    def __init__(self, module: GraphModule, names: Collection[str] = ()) -> None:
        super().__init__(module, names)
        self.weights: set[Node] = set()
        for node in module.graph.nodes:
            computed = node.op == "call_function" and self.weights.issuperset(node.all_input_nodes)
            if node.op == "get_attr" or (computed and not _projects(node)):
                self.weights.add(node)

    def run(self, *inputs: Any, **how: Any) -> Any:
        answer = super().run(*(widened(value) for value in inputs), **how)
        self.kept = tree_map(widened, self.kept)
        return answer

    def value(self, n: Node) -> Any:
        if n in self.weights:
            return super().value(n)
        given = tree_map(widened, self.fetch_args_kwargs_from_env(n))
        return tree_map(widened, getattr(self, n.op)(n.target, *given))

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wide_copy(self.fetch_attr(target))(*args, **kwargs)


def _projects(node: Node) -> bool:
    """Whether a node maps tokens linearly: of matrices, a product may be a weight that is stored as its factors."""
    name, value = operator_name(node), node.meta.get("val")
    return name == "linear" or (name in ("matmul", "bmm") and isinstance(value, Tensor) and value.dim() > 2)


def wide_copy(module: M) -> M:
    return copy.deepcopy(module).double()
