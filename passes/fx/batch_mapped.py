"""A graph of one image made one of any number of them by torch.vmap, whatever it does with the images' axis.

Where code takes that axis away, counts on its length or goes through it in a loop, there is none to follow the images
along (`batch_followed`). Here every value that an image makes gets an axis of images in front of its own.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnrewrite.errors import Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.fx.batch_symbols import described
from attnrewrite.passes.fx.pieces import put
from attnrewrite.patterns.fx.operators import operator_name

aten = torch.ops.aten

# What computes over the last axes, whatever stands in front of them, as what computes each element by itself does: how
# many of its operands are data, not weights.
_OVER_LAST = {"linear": 1, "layer_norm": 1, "rms_norm": 1, "matmul": 2, "scaled_dot_product_attention": 3}


def map_images(module: GraphModule, inputs: Sequence[Tensor], batched: Collection[int]) -> Refusal | None:
    """Let `module`, the graph of one image, compute what it does for each image of `inputs`, in place, and of as many
    only. `batched` are the places of the inputs that hold images.
    """
    run = _Mapped(module, inputs)
    run.take_inputs(batched)
    for node in list(module.graph.nodes):
        try:
            with without_torch_logs():
                run.take(node)
        except Exception as error:  # operators raise many kinds
            return Refusal("batch-refused", f"cannot be mapped over images at {described(node)}: {first_line(error)}")
    for node in run.parts:
        module.graph.erase_node(node)
    return None


class _Mapped(Interpreter):
    """`of_images` are the nodes whose first axis is the images', `parts` what an operation of several results made."""

    def __init__(self, module: GraphModule, inputs: Sequence[Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.nodes, self.mode = module.graph, FakeTensorMode()
        self.args_iter = iter([self.mode.from_tensor(tensor) for tensor in inputs])
        self.of_images: set[Node] = set()
        self.parts: dict[Node, Sequence[Node]] = {}

    def take_inputs(self, batched: Collection[int]) -> None:
        """Read the inputs; each image of them keeps the axis of one that the graph counts on."""
        places = list(self.nodes.find_nodes(op="placeholder"))
        for place in places:
            self._hold(place)
        with self.nodes.inserting_after(places[-1]):
            for place in [places[index] for index in batched]:
                alone = self.nodes.call_function(aten.unsqueeze.default, (place, 1))
                place.replace_all_uses_with(alone, lambda user, alone=alone: user is not alone)  # type: ignore[misc]
                self._hold(alone)
                self.of_images.add(alone)

    def take(self, node: Node) -> None:
        """Let `node` compute for all images, if it reads any, and find its value."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node in self.env:
            return
        if node.op == "output":
            node.args = map_arg(node.args, self._answer)
        elif source in self.parts:  # as operator.getitem alone reads several results
            node.replace_all_uses_with(self.parts[source][node.args[1]])  # type: ignore[index]
            self.nodes.erase_node(node)
        elif self.of_images.isdisjoint(node.all_input_nodes):
            self._hold(node)
        elif self._takes_more_axes(node):
            self._hold(node)
            self.of_images.add(node)
        else:
            self._map(node)

    @torch.no_grad()
    def _hold(self, node: Node) -> None:
        """Find the value of `node`, without its numbers."""
        with self.mode:
            found = self.run_node(node)
            if isinstance(found, Tensor) and node.op == "get_attr":
                found = self.mode.from_tensor(found)
        self.env[node] = node.meta["val"] = found

    def _takes_more_axes(self, node: Node) -> bool:
        """Whether an operation on images means the same with one more axis in front."""
        pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        count = _OVER_LAST.get(operator_name(node), 0)
        read = node.all_input_nodes
        data = [each for each in read if each in (self.of_images if pointwise else node.args[:count])]
        others = [each for each in read if each not in data]
        if not data or not self.of_images.issuperset(data) or not self.of_images.isdisjoint(others):
            return False
        rank, *ranks = (self.env[each].dim() for each in data)
        aligned = all(each == rank for each in ranks) and all(self.env[each].dim() < rank for each in others)
        return count == 1 or (aligned and (pointwise or rank > 2))  # a product of vectors is one of matrices otherwise

    def _map(self, node: Node) -> None:
        """Put what torch.vmap makes of `node` in its place; attention, which it would run image by image, is written
        out.
        """
        operands = node.all_input_nodes

        def alone(*given: Tensor) -> Any:
            known = dict(zip(operands, given, strict=True))
            return node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))  # type: ignore[operator]

        axes = tuple(0 if operand in self.of_images else None for operand in operands)
        of_all = torch.func.functionalize(torch.vmap(alone, axes), remove="mutations")
        with self.mode, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            piece = make_fx(of_all)(*[self.env[operand] for operand in operands]).graph
        piece.eliminate_dead_code()
        standing = put(piece, operands, node, node.meta)
        for each in standing.values():
            if each not in self.env:
                self._hold(each)
        results: Any = map_arg(piece.output_node().args[0], standing.__getitem__)
        if isinstance(results, Node):
            node.replace_all_uses_with(results)
            self.nodes.erase_node(node)
            self.of_images.add(results)
        else:
            self.parts[node] = results
            self.of_images.update(results)

    def _answer(self, node: Node) -> Node:
        """The images' answers one behind the other, as each is a batch of one."""
        if node not in self.of_images or self.env[node].dim() < 2:
            return node
        with self.nodes.inserting_before(self.nodes.output_node()):
            return self.nodes.call_function(aten.flatten.using_ints, (node, 0, 1))
