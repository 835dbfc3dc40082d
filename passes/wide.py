"""A graph run in float64, whatever it computes in: what differs there is meaning, not rounding."""

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map

NARROW = (torch.float16, torch.bfloat16, torch.float32)


def widened(value: Any) -> Any:
    """Floating-point tensors in float64, and float64 for the name of a floating-point type; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.dtype in NARROW else value
    return torch.float64 if value in NARROW else value


class Wide(Interpreter):
    """Runs `module` in float64 without a wide copy of it: each weight is widened as it is read.

    The values of the nodes called `names` are in `kept` after a run.
    """

    def __init__(self, module: GraphModule, names: Collection[str] = ()) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.names = frozenset(names)
        self.kept: dict[str, Any] = {}

    @torch.no_grad()
    def run(self, *inputs: Any, **how: Any) -> Any:
        self.kept = {}
        return super().run(*(widened(value) for value in inputs), **how)

    def run_node(self, n: Node) -> Any:
        result = tree_map(widened, super().run_node(n))
        if n.name in self.names:
            self.kept[n.name] = result
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, *tree_map(widened, (args, kwargs)))

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wide_copy(self.fetch_attr(target))(*args, **kwargs)


class WideSideBySide(Wide):
    """As `Wide`, on several inputs node by node, so that each weight is read and widened once for all of them.

    What `run` gives, and each value in `kept`, is a list with one entry for each of the inputs.
    """

    def run(self, *inputs: Any, **how: Any) -> Any:
        """`inputs` are the tuples of arguments, one tuple for each time that the module is to run."""
        self.count = len(inputs)
        arguments = (_Lanes(map(widened, each)) for each in zip(*inputs, strict=True))
        return super().run(*arguments, enable_io_processing=False, **how)

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if any(isinstance(leaf, _Lanes) for leaf in tree_leaves((args, kwargs))):
            call = getattr(self, n.op)
            lanes = (tree_map(partial(_lane, index), (args, kwargs)) for index in range(self.count))
            result = _Lanes(tree_map(widened, call(n.target, *each)) for each in lanes)
        else:
            result = super().run_node(n)  # an input, or what follows none
        if n.name in self.names:
            self.kept[n.name] = result if isinstance(result, _Lanes) else [result] * self.count
        return result


class _Lanes(list[Any]):
    """A value for each of the inputs; torch's trees take it for a leaf."""


def _lane(index: int, leaf: Any) -> Any:
    return leaf[index] if isinstance(leaf, _Lanes) else leaf


def wide_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()
