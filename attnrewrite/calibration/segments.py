"""A graph run piece by piece over many batches.

Fits go through a network in order, and each changes what the later ones see. Running from the start for each would cost
the square of the depth; here each piece runs from where the last one stopped, and what is still needed between pieces
lies on disk, so that memory holds one batch.
"""

import operator
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnrewrite.calibration.processes import Processes
from attnrewrite.images.pool import Pool
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.variants.base import Heads

Values = dict[Node, Any]


class Segments:
    """`module` over the batches of `images`, from `position` in its graph on: `run` looks ahead from there, `advance`
    moves on.

    Where several processes work together, each runs the batches of its own turn. A context manager: what lies on disk
    goes when it is left.
    """

    def __init__(self, module: GraphModule, images: Pool, processes: Processes) -> None:
        self.module = module
        self.processes = processes
        self.count = len(images)
        self.nodes = list(module.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.position = 0
        self._last_use = {
            node: max((self.order[user] for user in node.users), default=index) for node, index in self.order.items()
        }
        self._folder = tempfile.TemporaryDirectory(prefix="attnrewrite-")
        self._rest: dict[int, Values] = {}
        (image,) = (node for node in self.nodes if node.op == "placeholder")
        for index in range(processes.rank, self.count, processes.size):
            self._store(index, {image: images.batch(index).to(processes.device)})

    def __enter__(self) -> "Segments":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def run(self, stop: int, needs: Collection[Node]) -> Iterator[tuple[int, Values]]:
        """For each batch of this process, its number and the values of `needs`, having run the nodes from here up to
        `stop`. Nothing is stored.
        """
        for index in self._rest:
            yield index, self._execute(index, stop, frozenset(needs))

    def advance(self, stop: int, keep: Collection[Node] = ()) -> None:
        """Run the nodes up to `stop` and start from there from now on; `keep` are values that are asked for yet."""
        if stop <= self.position:
            return
        for index in self._rest:
            values = self._execute(index, stop, frozenset(keep))
            self._store(index, {n: value for n, value in values.items() if self._last_use[n] >= stop or n in keep})
        self.position = stop

    @torch.no_grad()
    def _execute(self, index: int, stop: int, needs: frozenset[Node]) -> Values:
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        interpreter.env = values = self._load(index)
        for at in range(self.position, stop):
            node = self.nodes[at]
            if node not in values:
                values[node] = interpreter.run_node(node)
            for operand in (node, *node.all_input_nodes):
                if self._last_use[operand] <= at and operand not in needs:
                    values.pop(operand, None)
        return values

    def _store(self, index: int, values: Values) -> None:
        """Tensors go to disk, sizes stay; parameters are neither: they may change, and are read anew."""
        tensors: dict[str, Tensor] = {}
        rest: Values = {}
        for node, value in values.items():
            if node.op == "get_attr":
                continue
            leaves, spec = tree_flatten(value)
            tensors |= {f"{node.name}/{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            rest[node] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, self._file(index))
        self._rest[index] = rest

    def _load(self, index: int) -> Values:
        tensors = load_file(self._file(index), device=self.processes.device)
        values: Values = {n: operator.attrgetter(str(n.target))(self.module) for n in self.nodes if n.op == "get_attr"}
        for node, (leaves, spec) in self._rest[index].items():
            whole = [tensors.get(f"{node.name}/{i}", leaf) for i, leaf in enumerate(leaves)]
            values[node] = tree_unflatten(whole, spec)
        return values

    def _file(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.safetensors"


def rewritten_site(module: GraphModule, node: Node) -> SiteModule | None:
    """The rewritten site that `node` calls, or None."""
    found = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, SiteModule) else None


@torch.no_grad()
def site_heads(site: SiteModule, node: Node, values: Values) -> Heads:
    """What the form of the site that `node` calls reads."""
    return Heads(*site.attend_inputs(*(values[argument] for argument in node.args)))  # type: ignore[index]
