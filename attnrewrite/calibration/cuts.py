"""Where a graph can be cut: what is live between two of its operations, and how many bytes that is for an image."""

from collections.abc import Iterable
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves


class Cuts:
    """The positions between the nodes of a graph: position p lies before the p-th. Weights are never live, as they are
    read anew.
    """

    def __init__(self, module: GraphModule) -> None:
        self.nodes = list(module.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.last_use = {
            node: max((self.order[user] for user in node.users), default=index) for node, index in self.order.items()
        }

    def live(self, position: int) -> list[Node]:
        """What the nodes from `position` on read of those before."""
        return [node for node in self.nodes[:position] if self.last_use[node] >= position and node.op != "get_attr"]

    def live_bytes(self, position: int) -> int:
        """The bytes of what is live, for one image."""
        return self._live_bytes[position]

    def elements(self, node: Node) -> int:
        """The numbers of a node's value, for one image."""
        return prod(map(_length, node.meta["val"].shape)) // self._images  # type: ignore[no-any-return]

    @cached_property
    def _live_bytes(self) -> list[int]:
        """For every position, from the sizes that the graph's values have."""
        images = self._images
        change = [0] * (len(self.nodes) + 2)
        for node, index in self.order.items():
            if node.op != "get_attr":
                size = _bytes(node) // images
                change[index + 1] += size
                change[max(self.last_use[node], index) + 1] -= size
        total, sums = 0, []
        for step in change:
            total += step
            sums.append(total)
        return sums

    @cached_property
    def _images(self) -> int:
        """The batch that the graph's sizes are read with."""
        value = next((node.meta.get("val") for node in self.nodes if node.op == "placeholder"), None)
        return max(1, _length(value.shape[0])) if isinstance(value, Tensor) and value.dim() else 1

    def least(self, after: int, upto: int) -> int:
        """The position after `after` and all inputs, `upto` at the latest, where least is live: the last of several;
        `after` where there is none.
        """
        given = max((index for node, index in self.order.items() if node.op == "placeholder"), default=-1)
        return min(range(upto, max(after, given), -1), key=self.live_bytes, default=after)

    def between(self, nodes: Iterable[Node]) -> list[int]:
        """A position before each of `nodes` where least is live, in order and each once."""
        found = [0]
        for node in sorted(nodes, key=self.order.__getitem__):
            position = self.least(found[-1], self.order[node])
            if position > found[-1]:
                found.append(position)
        return found[1:]


def _bytes(node: Node) -> int:
    leaves = tree_leaves(node.meta.get("val"))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(prod(map(_length, leaf.shape)) * leaf.element_size() for leaf in tensors)


def _length(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 1)
