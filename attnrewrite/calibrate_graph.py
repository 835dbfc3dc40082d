"""A graph run piece by piece over many batches.

Fits go through a network in order, and each changes what the later ones see. Running from the start for each would cost
the square of the depth; here each piece runs from where the last one stopped, and what is still needed between pieces
lies on disk, so that memory holds one batch.
"""

import operator
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from attnrewrite.passes.rewritten import RewrittenSite
from attnrewrite.variants.base import Heads

Batches = Callable[[], Iterator[tuple[Tensor, ...]]]  # each call streams the same batches of the model's inputs again
Values = dict[Node, Any]


class Segments:
    """`module` over `batches`, up to some node: `run` looks ahead from there, `advance` moves on."""

    def __init__(self, module: GraphModule, batches: Batches) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.position = 0
        order = {node: index for index, node in enumerate(self.nodes)}
        self._last_use = {node: max((order[user] for user in node.users), default=-1) for node in self.nodes}
        self._folder = tempfile.TemporaryDirectory(prefix="attnrewrite-")
        self._sizes: list[Values] = []
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        for index, batch in enumerate(batches()):
            self._sizes.append({})
            self._store(index, dict(zip(inputs, batch, strict=True)))

    def __len__(self) -> int:
        return len(self._sizes)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def run(self, until: Node) -> Iterator[Values]:
        """For each batch, the values of the nodes from here up to and including `until`. Nothing is kept."""
        for index in range(len(self)):
            yield self._execute(index, until)

    def advance(self, until: Node) -> None:
        """Compute up to and including `until`, and start from there from now on."""
        position = max(self.position, self.nodes.index(until) + 1)
        for index in range(len(self)):
            values = self._execute(index, until)
            self._store(index, {node: value for node, value in values.items() if self._last_use[node] >= position})
        self.position = position

    def close(self) -> None:
        self._folder.cleanup()

    @torch.no_grad()
    def _execute(self, index: int, until: Node) -> Values:
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        interpreter.env = self._load(index)
        for node in self.nodes[self.position : self.nodes.index(until) + 1]:
            if node not in interpreter.env:
                interpreter.env[node] = interpreter.run_node(node)
        return interpreter.env

    def _store(self, index: int, values: Values) -> None:
        """Tensors go to disk, sizes stay; parameters are neither: they may change, and are read anew."""
        kept = {node: value for node, value in values.items() if node.op != "get_attr"}
        tensors = {node.name: value.detach().contiguous() for node, value in kept.items() if isinstance(value, Tensor)}
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, self._file(index))
        self._sizes[index] = {node: value for node, value in kept.items() if not isinstance(value, Tensor)}

    def _load(self, index: int) -> Values:
        device = next((str(tensor.device) for tensor in self.module.parameters()), "cpu")
        tensors = load_file(self._file(index), device=device)
        values = {node: tensors[node.name] for node in self.nodes if node.name in tensors}
        parameters = {n: operator.attrgetter(str(n.target))(self.module) for n in self.nodes if n.op == "get_attr"}
        return {**parameters, **values, **self._sizes[index]}

    def _file(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.safetensors"


def rewritten_site(module: GraphModule, node: Node) -> RewrittenSite | None:
    """The rewritten site that `node` calls, or None."""
    found = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, RewrittenSite) else None


def site_heads(site: RewrittenSite, node: Node, values: Values) -> Heads:
    """What the form of the site that `node` calls reads."""
    return Heads(*site.attend_inputs(*(values[argument] for argument in node.args)))  # type: ignore[index]
