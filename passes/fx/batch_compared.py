"""Which constants of a graph are its batch, told from a second graph of the same model with another batch."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.errors import Refusal
from attnrewrite.passes.fx.batch_symbols import described


class _NotABatchError(Exception):
    """Two constants differ, and not as the batches do."""


def compare(module: GraphModule, wider: GraphModule, size: Node) -> Refusal | None:
    """Write `size`, a node of `module` that makes its batch, wherever a constant differs from `wider`'s as the batches
    do. `module` is changed in place.
    """
    pairs = list(zip(_operations(module), _operations(wider), strict=False))
    if len(_operations(module)) != len(_operations(wider)):
        return Refusal("other-operations", "runs other operations with another batch: a branch or loop follows it")
    small, large = (_batch(each) for each in (module, wider))
    twins = dict(pairs)
    for mine, theirs in pairs:
        if (mine.op, mine.op != "get_attr" and mine.target) != (theirs.op, theirs.op != "get_attr" and theirs.target):
            return Refusal("other-operations", f"runs another operation with another batch at {described(mine)}")
        if mine.op == "get_attr" and not _same_tensor(module, mine, wider, theirs):
            return Refusal("batch-in-constant", f"holds a tensor that was made for its batch at {described(mine)}")
        if mine.op != "call_function":
            continue
        reader = _Reader(module, mine, size, small, large, twins)
        try:
            mine.args, mine.kwargs = reader.merged(mine.args, theirs.args), reader.merged(mine.kwargs, theirs.kwargs)
        except _NotABatchError as difference:
            return Refusal("other-constants", f"computes with its batch at {described(mine)}: {difference}")
    return None


def _operations(module: GraphModule) -> list[Node]:
    """The nodes that tell one graph from another: a weight that is read once may be read twice."""
    added = {"sym_size.int"}
    return [node for node in module.graph.nodes if str(node.target).removeprefix("aten.") not in added]


def _batch(module: GraphModule) -> int:
    first = next(node for node in module.graph.nodes if node.op == "placeholder")
    return int(first.meta["val"].shape[0])


def _same_tensor(module: GraphModule, mine: Node, wider: GraphModule, theirs: Node) -> bool:
    one = operator.attrgetter(str(mine.target))(module)
    other = operator.attrgetter(str(theirs.target))(wider)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one is other or (one.shape == other.shape and bool(torch.equal(one, other)))


class _Reader:
    """The arguments of one node beside its twin's."""

    def __init__(
        self, module: GraphModule, node: Node, size: Node, small: int, large: int, twins: dict[Node, Node]
    ) -> None:
        self.module, self.node, self.size = module, node, size
        self.small, self.large, self.twins = small, large, twins

    def merged(self, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, Node):
            if self.twins.get(mine) is not theirs:
                raise _NotABatchError(f"it reads {mine.name} with one batch and {theirs} with another")
            return mine
        if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
            return type(mine)(self.merged(one, other) for one, other in zip(mine, theirs, strict=True))
        if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
            return {key: self.merged(mine[key], theirs[key]) for key in mine}
        if mine == theirs and type(mine) is type(theirs):
            return mine
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (mine, theirs))
        if whole and mine % self.small == 0 and mine // self.small * self.large == theirs:
            return self._multiple(mine // self.small)
        raise _NotABatchError(f"{mine} for {self.small} images is {theirs} for {self.large}")

    def _multiple(self, times: int) -> Node:
        if times == 1:
            return self.size
        with self.module.graph.inserting_before(self.node):
            return self.module.graph.call_function(operator.mul, (self.size, times))
