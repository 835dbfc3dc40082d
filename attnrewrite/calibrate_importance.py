"""How much a model's answer depends on each token: what the closed-form fits weigh their samples with.

A classifier reads one token, or what a few tokens say of one part of the picture; a fit that weighs all tokens alike
spends itself on the others. Where the output moves by J r for a change r of a row, E |u J|^2 over random directions u of
the output is the trace of J J^T: the first-order cost of an error at that row, per unit of its energy.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from attnrewrite.calibrate_branches import Branch, branches
from attnrewrite.calibrate_images import Pool, first_tensor
from attnrewrite.calibrate_world import World

DRAWS = 2  # directions for each image: a weight need not be exact, and there are many images

Importance = Mapping[str, Mapping[int, Tensor]]  # branch's node -> batch -> [rows], one number a token


def importance(teacher: GraphModule, images: Pool, world: World) -> Importance:
    """For each branch of `teacher` and each batch of this process, the weight of each row of the branch's map.

    One backward pass through the teacher for each direction; nothing is trained. Memory: one batch, and a number for
    each token.
    """
    found = list(branches(teacher))
    weights: dict[str, dict[int, Tensor]] = {branch.node.name: {} for branch in found}
    spoken = probed(teacher, weights)
    for index in range(world.rank, len(images), world.size):
        generator = torch.Generator().manual_seed(index)
        rows = _rows(spoken, found, images.batch(index).to(world.device), generator)
        for branch, row in zip(found, rows, strict=True):
            weights[branch.node.name][index] = row
    return weights


def _rows(spoken: GraphModule, found: Sequence[Branch], batch: Tensor, generator: torch.Generator) -> list[Tensor]:
    with torch.enable_grad():
        output, probes = spoken(batch)
        answer = first_tensor(output)
        total = [torch.zeros_like(branch.rows(probe)) for branch, probe in zip(found, probes, strict=True)]
        if not answer.requires_grad:
            return [torch.ones_like(row) for row in total]  # class indices, say: all tokens alike
        for _ in range(DRAWS):
            direction = _direction(answer, generator)
            gradients = torch.autograd.grad(answer, probes, direction, retain_graph=True, materialize_grads=True)
            for sums, branch, gradient in zip(total, found, gradients, strict=True):
                sums += branch.rows(gradient)
    return [(row / DRAWS).nan_to_num(0.0, 0.0, 0.0) for row in total]  # a norm of zero has no gradient


def probed(module: GraphModule, names: Collection[str]) -> GraphModule:
    """`module` with zeros added to the values called `names`: (output, those zeros), to be differentiated by."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    probes = []
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output((torch.fx.map_arg(node.args[0], copies.__getitem__), probes))
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.name in names:
            probes.append(graph.call_function(_zeros, (copies[node],)))
            copies[node] = graph.call_function(torch.add, (copies[node], probes[-1]))
    graph.set_codegen(torch.fx.graph.CodeGen())
    return GraphModule(module, graph)


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value, requires_grad=True)


def _direction(answer: Tensor, generator: torch.Generator) -> Tensor:
    """A random change of the answer; of logits [images, classes], one that softmax sees."""
    drawn = torch.randn(answer.shape, generator=generator).to(answer)
    return drawn - drawn.mean(1, keepdim=True) if answer.dim() == 2 and answer.shape[1] > 1 else drawn
