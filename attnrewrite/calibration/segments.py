"""A graph run piece by piece over many batches.

Fits go through a network in order, and each changes what the later ones see. Running from the start for each would cost
the square of the depth; here each piece runs from where the last one stopped. What is needed between pieces, the
residual stream of every image, waits in a store; the rest is one batch.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnrewrite.calibration.cuts import Cuts
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.store import InMemory, Store
from attnrewrite.images.pool import Pool
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.variants.base import Heads


@dataclass(frozen=True)
class Attended:
    """The outputs of the heads of the rewritten site that `node` calls, which its output projection reads: a value
    that the graph does not name.
    """

    node: Node


Values = dict[Node | Attended, Any]


class Segments:
    """`module` over the batches of `images`, from `position` in its graph on: `run` looks ahead from there, `advance`
    moves on.

    Where several processes work together, each runs the batches of its own turn. A context manager: what lies in the
    store goes when it is left. `holds`: there is memory for what `hold` is to keep.
    """

    def __init__(
        self, module: GraphModule, images: Pool, processes: Processes, store: Store | None = None, holds: bool = False
    ) -> None:
        self.module = module
        self.images = images
        self.processes = processes
        self.cuts = Cuts(module)
        self.nodes, self.order = self.cuts.nodes, self.cuts.order
        self.position = 0
        self._store = InMemory() if store is None else store
        self._rest: dict[int, dict[Node, Any]] = {}
        self._holds, self._held = holds, dict[int, Values]()
        self._places = [node for node in self.nodes if node.op == "placeholder"]
        self._interpreter = Interpreter(module, garbage_collect_values=False)

    def __enter__(self) -> "Segments":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()
        self._store.close()

    @property
    def count(self) -> int:
        """How many batches there are, of all processes."""
        return len(self.images)

    @property
    def mine(self) -> range:
        """The numbers of this process' batches."""
        return range(self.processes.rank, self.count, self.processes.size)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def weight(self, node: Node) -> Any:
        """What a get_attr node reads."""
        return operator.attrgetter(str(node.target))(self.module)

    def run(self, stop: int, needs: Collection[Node | Attended]) -> Iterator[tuple[int, Values]]:
        """For each batch of this process, its number and the values of `needs`, having run the nodes from here up to
        `stop`. Nothing is stored.
        """
        for index in self.mine:
            with torch.no_grad():
                values = self.at(index, stop, frozenset(needs))
            yield index, values

    def hold(self, index: int, values: Values) -> None:
        """Keep `values` of a batch, where there is memory for them, until the position moves on: they are not computed
        again. Nothing that they are made of may change meanwhile.
        """
        if self._holds:
            self._held[index] = values

    @torch.no_grad()
    def advance(self, first: int, last: int, keep: Collection[Node] = ()) -> None:
        """Start from now on where least is live from `first` to `last`: here, where that lies between and nowhere later
        is as little, or where `first` lies behind `last`. `keep` are values that are asked for yet.
        """
        stop = self.cuts.least(max(self.position, first) - 1, last)
        if self.position < stop <= last:
            for index in self.mine:
                values = self.at(index, stop, frozenset(keep))
                standing = {node: value for node, value in values.items() if isinstance(node, Node)}
                self._keep(index, {n: v for n, v in standing.items() if self.cuts.last_use[n] >= stop or n in keep})
                self._held.pop(index, None)
            self.position = stop
        self._held.clear()

    def at(self, index: int, stop: int, needs: frozenset[Node | Attended]) -> Values:
        """The values of `needs` and what is live at `stop` for one batch, from here on; they have gradients by the
        module's parameters where those are on. Nothing is stored.
        """
        held = self._held.get(index, {})
        values = self._weights(stop, needs) | self._kept(index) | held
        self._interpreter.env = values  # type: ignore[assignment]  # it looks up nodes alone
        asked = self._asked(stop, needs, held)
        for at in range(self.position, stop):
            node = self.nodes[at]
            if node in asked and (Attended(node) in needs or Attended(node) in held):
                values |= self._attended(node, values)
            elif node in asked and node not in values:
                values[node] = self._interpreter.run_node(node)
            for operand in (node, *node.all_input_nodes):
                if self.cuts.last_use[operand] <= at and operand not in needs:
                    values.pop(operand, None)
        self._interpreter.env = {}  # which would hold the values of the last batch
        return values

    def _asked(self, stop: int, needs: frozenset[Node | Attended], held: Collection[Node | Attended]) -> set[Node]:
        """The nodes from here to `stop` that `needs` and what is live there are made of, as far as it is not `held`."""
        piece = self.nodes[self.position : stop]
        if not held:
            return set(piece)
        pending = [n for n in piece if self.cuts.last_use[n] >= stop or n in needs or Attended(n) in needs]
        asked: set[Node] = set()
        while pending:
            node = pending.pop()
            if node not in asked and self.order[node] >= self.position:
                asked.add(node)
                pending += [] if node in held or Attended(node) in held else node.all_input_nodes
        return asked

    def _attended(self, node: Node, values: Values) -> Values:
        """What the rewritten site that `node` calls gives, and its heads before the output projection."""
        site = rewritten_site(self.module, node)
        assert site is not None, f"{node.name} calls no rewritten site"
        heads = values.get(Attended(node))
        if heads is None:
            heads = site.attend(*(values[argument] for argument in node.args))  # type: ignore[index]
        return {Attended(node): heads, node: site.output(heads)}

    def _keep(self, index: int, values: dict[Node, Any]) -> None:
        """Tensors go to the store, sizes stay; parameters are neither: they may change, and are read anew."""
        tensors: dict[str, Tensor] = {}
        rest: dict[Node, Any] = {}
        for node, value in values.items():
            if node.op == "get_attr":
                continue
            leaves, spec = tree_flatten(value)
            tensors |= {f"{node.name}/{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            rest[node] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        self._store.put(index, tensors)
        self._rest[index] = rest

    def _weights(self, stop: int, needs: frozenset[Node | Attended]) -> Values:
        """What get_attr nodes before the position read, of which the nodes from here to `stop` are made, or `needs`."""
        read = {operand for node in self.nodes[self.position : stop] for operand in node.all_input_nodes} | needs
        weights = [node for node in read if isinstance(node, Node) and node.op == "get_attr"]
        return {node: self.weight(node) for node in weights if self.order[node] < self.position}

    def _kept(self, index: int) -> Values:
        if index not in self._rest:  # before the first piece: the pictures are read, not stored
            given = (tensor.to(self.processes.device) for tensor in self.images.batch(index))
            return dict(zip(self._places, given, strict=True))
        values: Values = {}
        tensors = self._store.get(index, self.processes.device)
        for node, (leaves, spec) in self._rest[index].items():
            whole = [tensors.get(f"{node.name}/{i}", leaf) for i, leaf in enumerate(leaves)]
            values[node] = tree_unflatten(whole, spec)
        return values


def rewritten_site(module: GraphModule, node: Node) -> SiteModule | None:
    """The rewritten site that `node` calls, or None."""
    found = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, SiteModule) else None


@torch.no_grad()
def site_heads(site: SiteModule, node: Node, values: Values) -> Heads:
    """What the form of the site that `node` calls reads."""
    return Heads(*site.attend_inputs(*(values[argument] for argument in node.args)))  # type: ignore[index]
