"""How much a model's answer depends on each token: what the closed-form fits weigh their samples with.

A classifier reads one token, or what a few tokens say of one part of the picture; a fit that weighs all tokens alike
spends itself on the others. Where the output moves by J r for a change r of a value, E |u J|^2 over random directions u
of the output is the diagonal of J^T J (Hutchinson 1990): the first-order cost of an error there, by its energy.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.processes import Processes
from attnrewrite.images.pool import Pool, first_tensor

DRAWS = 2  # directions for each image: a weight need not be exact, and there are many images
EVEN = 0.1  # added to weights of mean one: the fit stays sane where the answer is not read, and sees more samples

Importance = Mapping[str, Mapping[int, Tensor]]  # branch's node -> batch -> [rows], one number a token


def importance(teacher: GraphModule, images: Pool, processes: Processes) -> Importance:
    """For each branch of `teacher` and each batch of this process, the weight of each row of the branch's map: the
    energy of the gradient over its mean in the batch, and EVEN.

    One backward pass through the teacher for each direction; nothing is trained. Memory: one batch, and a number for
    each token.
    """
    found = {branch.node.name: branch for branch in branches(teacher)}
    weights: dict[str, dict[int, Tensor]] = {name: {} for name in found}
    spoken = probed(teacher, found)
    for index in range(processes.rank, len(images), processes.size):
        for gradients in _gradients(spoken, images, index, processes):
            for (name, branch), gradient in zip(found.items(), gradients, strict=True):
                rows = branch.rows(gradient)
                weights[name][index] = weights[name].get(index, 0) + rows
        for rows in (each[index] for each in weights.values()):
            rows.div_(rows.mean().clamp(min=torch.finfo(rows.dtype).tiny)).add_(EVEN)
    return weights


def _gradients(spoken: GraphModule, images: Pool, index: int, processes: Processes) -> Iterator[tuple[Tensor, ...]]:
    """The answer's gradients at the probes, for each of DRAWS directions; ones, where it has none (class indices)."""
    generator = torch.Generator().manual_seed(index)
    with torch.enable_grad():
        output, probes = spoken(images.batch(index).to(processes.device))
        answer = first_tensor(output)
        for _ in range(DRAWS):
            if not answer.requires_grad:
                yield tuple(torch.ones_like(probe) for probe in probes)
                continue
            found = torch.autograd.grad(
                answer, probes, _direction(answer, generator), retain_graph=True, materialize_grads=True
            )
            yield tuple(gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in found)  # a norm of zero has none


def _direction(answer: Tensor, generator: torch.Generator) -> Tensor:
    """A random change of the answer; of logits [images, classes], one that softmax sees."""
    drawn = torch.randn(answer.shape, generator=generator).to(answer)
    return drawn - drawn.mean(1, keepdim=True) if answer.dim() == 2 and answer.shape[1] > 1 else drawn


def probed(module: GraphModule, names: Collection[str]) -> GraphModule:
    """`module` with zeros added to the values called `names`: (output, those zeros), to be differentiated by."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    probes: list[Node] = []
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
