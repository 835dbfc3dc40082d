"""A graph that was captured for one batch size, made one for any: constants that are the batch become its size.

Two captures of a model with different batches tell which constants these are (`batch_compared`); where there is one
capture only, because the model's code holds the batch as a number or a file was exported with it, the images are
followed from the inputs through every operation (`batch_followed`). Where they cannot be, a graph of one image is
mapped over images (`batch_mapped`). Every way, the result is run beside the original.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.errors import InputError, Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.draws import drawn
from attnrewrite.passes.fx.batch_compared import compare
from attnrewrite.passes.fx.batch_followed import Guesses, follow
from attnrewrite.passes.fx.batch_mapped import map_images
from attnrewrite.passes.fx.batch_symbols import symbolic, with_sizes
from attnrewrite.passes.in_batches import Known, answers_otherwise, images_mixed, with_images
from attnrewrite.patterns.fx.operators import is_open

MOST_TRIES = 32  # ways to read the sizes of a graph for one image
PRIMES = (31, 37)  # a batch that no other length is taken for
READ_WITH = 2  # the batch that an open graph is read with, as torch.export reads it


@dataclass(frozen=True)
class OpenBatch(Pass[GraphModule]):
    """The graph for any batch size. `example` is what it was captured on, of the one batch that it takes; `wider` is
    the same model captured with another batch, where it can be.

    Each image's answer is that of the graph given, whatever stands beside it, which is checked. `found` is the result,
    or why there is none, where that was looked for before.
    """

    example: tuple[Tensor, ...]
    wider: GraphModule | None = None
    found: PassResult[GraphModule] | Refusal | None = None

    def requires(self, graph: GraphModule) -> Refusal | None:
        """That the batch can be told from other sizes, and the images from each other."""
        found = self.looked(graph)
        return found if isinstance(found, Refusal) else None

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        found = self.looked(graph)
        assert not isinstance(found, Refusal), "the pass was refused"
        return found

    def ensures(self, before: GraphModule, result: PassResult[GraphModule]) -> Refusal | None:
        """The same inputs, the first of them open along its first axis."""
        places, own = _placeholders(result.graph), _placeholders(before)
        if [node.name for node in places] != [node.name for node in own]:
            return Refusal("other-inputs", "takes other inputs")
        return None if is_open(places[0].meta["val"].shape[0]) else Refusal("still-fixed", "has a fixed batch")

    def apply(self, graph: GraphModule) -> PassResult[GraphModule]:
        """As every pass, the graph looked at once. Raises as `Pass.apply` does."""
        if self.found is None:
            return replace(self, found=self.looked(graph)).apply(graph)
        return super().apply(graph)

    def looked(self, graph: GraphModule) -> PassResult[GraphModule] | Refusal:
        """The opened graph and its edits, or why there is none."""
        if self.found is not None:
            return self.found
        places = _placeholders(graph)
        if not places or any("val" not in node.meta for node in places):
            return Refusal("not-exported", "does not tell the shapes of its inputs: make it with torch.export")
        sizes = [list(node.meta["val"].shape) if isinstance(node.meta["val"], Tensor) else [] for node in places]
        if not sizes[0] or is_open(sizes[0][0]):
            return Refusal("no-fixed-batch", "has no fixed batch: its first input is open, or has no axes")
        try:
            draws = drawn(graph, self.example)
        except InputError as error:
            return Refusal("other-example", f"does not take its example: {error}")
        batch = int(sizes[0][0])
        open_inputs = [place for place, size in enumerate(sizes) if len(size) and int(size[0]) == batch]
        known, wider = Known(graph, draws[:2]), self._known_wider()
        why: Refusal | None = None  # the first way's: it reads the graph as it most likely is meant
        for each in self._opened(graph, batch, open_inputs):
            refusal = each if isinstance(each, Refusal) else None
            if isinstance(each, GraphModule):
                refusal = with_sizes(each, symbolic(self.example, open_inputs, READ_WITH))
                refusal = refusal or images_mixed(known, each)
                refusal = refusal or (None if wider is None else answers_otherwise(wider, each))
                if refusal is None:
                    return PassResult(each, tuple(_edits(graph, each)))
            why = why or refusal
        assert why is not None
        return why

    def _known_wider(self) -> Known | None:
        """What the capture with another batch answers."""
        if self.wider is None:
            return None
        count = int(_placeholders(self.wider)[0].meta["val"].shape[0])
        return Known(self.wider, drawn(self.wider, with_images(self.example, count))[1:2])

    def _opened(self, graph: GraphModule, batch: int, open_inputs: list[int]) -> Iterator[GraphModule | Refusal]:
        """The ways to open the graph, not yet checked, or why one failed."""
        if self.wider is not None:
            module = _copied(graph)
            size = _size_of(module)
            yield compare(module, self.wider, size) or _cleaned(module, size)
        yield from self._followed(graph, batch, open_inputs)
        if batch == 1:
            yield self._mapped(graph, open_inputs)

    def _mapped(self, graph: GraphModule, open_inputs: list[int]) -> GraphModule | Refusal:
        """The graph of one image mapped over two and over three, which tell what the batch is as two captures do."""
        module, wider = _copied(graph), _copied(graph)
        for each, count in ((module, READ_WITH), (wider, READ_WITH + 1)):
            refusal = map_images(each, with_images(self.example, count), open_inputs)
            if refusal is not None:
                return refusal
        size = _size_of(module)
        return compare(module, wider, size) or _cleaned(module, size)

    def _followed(self, graph: GraphModule, batch: int, open_inputs: list[int]) -> Iterator[GraphModule | Refusal]:
        """The ways to open it by following its images."""
        images = next(prime for prime in PRIMES if prime != batch)
        chosen: dict[Any, int] = {}
        for _ in range(MOST_TRIES):
            module = _copied(graph)
            size = _size_of(module)
            inputs = symbolic(self.example, open_inputs, images)  # anew: a wrong way may settle the batch
            guesses = Guesses(chosen)
            yield follow(module, inputs, batch, size, guesses) or _cleaned(module, size)
            following = _next_way(guesses)
            if following is None:
                return
            chosen = following


def _next_way(tried: Guesses) -> dict[Any, int] | None:
    """The way that differs from one that failed in its last choice that has another; None where none has."""
    met = list(tried.met.items())
    while met:
        last, count = met.pop()
        if tried.chosen.get(last, 0) + 1 < count:
            return {**{key: tried.chosen.get(key, 0) for key, _ in met}, last: tried.chosen.get(last, 0) + 1}
    return None


def _placeholders(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _copied(graph: GraphModule) -> GraphModule:
    """A copy that shares the weights."""
    with quiet_copying():
        result = GraphModule(graph, copy.deepcopy(graph.graph))
    result.meta.update(graph.meta)
    return result


def _size_of(module: GraphModule) -> Node:
    """A new node of `module` that makes its batch."""
    places = _placeholders(module)
    with module.graph.inserting_after(places[-1]):
        return module.graph.call_function(torch.ops.aten.sym_size.int, (places[0], 0))


def _cleaned(module: GraphModule, size: Node) -> GraphModule:
    if not size.users:
        module.graph.erase_node(size)
    module.graph.lint()
    module.recompile()
    return module


def _edits(before: GraphModule, after: GraphModule) -> Iterator[Edit]:
    """The nodes whose arguments are others now, and those that others stand for."""
    own, known = (
        {node.name: (str(node.args), str(node.kwargs)) for node in each.graph.nodes} for each in (before, after)
    )
    for name, arguments in own.items():
        if known.get(name) != arguments:
            yield Edit(name, name if name in known else None)
