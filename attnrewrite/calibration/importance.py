"""How much a model's answer depends on each token: what the closed-form fits weigh their samples with.

A classifier reads one token, or what a few tokens say of one part of the picture; a fit that weighs all tokens alike
spends itself on the others. Nor are the outputs of a map alike: a layer scale behind it hides some. Where the output
moves by J r for a change r of a value, E |u J|^2 over random directions u of the output is the diagonal of J^T J
(Hutchinson 1990): the first-order cost of an error there, by its energy.

The network is gone through piece by piece (Chen et al. 2016, Training deep nets with sublinear memory cost): forwards
for what stands between the pieces, backwards with one piece's activations at a time, which are computed again for it.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from attnrewrite.calibration.answers import Answer
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.cuts import Cuts
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.store import InMemory, Store
from attnrewrite.images.pool import Pool

DRAWS = 1  # of directions for each image: for a closed form a weight need not be exact, as there are many images
FINE_DRAWS = 2  # where blocks are trained a few images at a time, or forms compared by small differences
EVEN = 0.1  # added to weights of mean one: the fit stays sane where the answer is not read, and sees more samples

Values = dict[Node, Any]
Gradients = dict[str, Tensor]  # a node's name -> d answer / d its value, for one direction


@dataclass(frozen=True)
class Importance:
    """How much the model's answer depends on what a branch's map makes, by the energy (sum of squares) of the answer's
    gradient there: on each row, for each batch of this process; the mean over all rows of a branch; and on each of its
    outputs [outputs], one on average.
    """

    energy: Store
    mean: Mapping[str, float]
    outputs: Mapping[str, Tensor]
    device: str = "cpu"

    def of(self, branch: str, batch: int) -> Tensor:
        """The weight of each row [rows]: its energy over the mean, and EVEN."""
        rows = self.energy.get(batch, self.device)[branch]
        return rows / max(self.mean[branch], torch.finfo(rows.dtype).tiny) + EVEN


def importance(
    teacher: GraphModule,
    images: Pool,
    answer: Answer,
    processes: Processes,
    store: Store | None = None,
    draws: int = DRAWS,
    pieces: int | None = None,
) -> Importance:
    """The weights of the rows and outputs of every branch of `teacher`, whatever the batches and the `pieces` are.

    One backward pass through the teacher for each of `draws` directions; nothing is trained. Memory: one piece's
    activations for a batch, what stands between the pieces, and a number for each token, which `store` keeps.
    """
    found = {branch.node.name: branch for branch in branches(teacher)}
    blocks = Blocks(teacher, found, answer, draws, pieces)
    energy = InMemory() if store is None else store
    sums = {
        name: torch.zeros(len(branch.weight), dtype=torch.float64, device=processes.device)
        for name, branch in found.items()
    }
    counts = dict.fromkeys(found, 0)
    for index in range(processes.rank, len(images), processes.size):
        rows: dict[str, Tensor] = {}
        batch = [tensor.to(processes.device) for tensor in images.batch(index)]
        for gradients in blocks.gradients(batch, images.bounds[index][0]):
            for name, branch in found.items():
                squares = branch.outputs(gradients[name]).square().flatten(0, -2)
                rows[name] = rows.get(name, 0) + squares.sum(1)
                sums[name] += squares.sum(0)
        energy.put(index, rows)
        counts = {name: counts[name] + len(each) for name, each in rows.items()}
    return Importance(energy, _means(sums, counts, processes), _of_outputs(sums), processes.device)


def _means(sums: Mapping[str, Tensor], counts: Mapping[str, int], processes: Processes) -> dict[str, float]:
    """The mean of each branch's rows over all processes, from their counts and the sums of their outputs, which become
    those of all processes.
    """
    rows = torch.tensor([*counts.values()], dtype=torch.float64, device=processes.device)
    processes.add_up(rows, *sums.values())
    return {name: float(sums[name].sum()) / max(float(count), 1) for name, count in zip(sums, rows, strict=True)}


def _of_outputs(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs' sums over their mean; ones where nothing counts."""
    return {name: each / each.mean() if bool(each.any()) else torch.ones_like(each) for name, each in sums.items()}


class Blocks:
    """`module` in pieces, differentiated one after the other from the last on: memory holds what is live between pieces
    and the activations of one. A piece ends before each of the values called `names`, where least is live; there are
    fewer, of about as many such values each, where a number of `pieces` is given.
    """

    def __init__(
        self,
        module: GraphModule,
        names: Collection[str],
        answer: Answer,
        draws: int = DRAWS,
        pieces: int | None = None,
    ) -> None:
        self.module, self.names, self.answer, self.draws = module, frozenset(names), answer, draws
        self.cuts = Cuts(module)
        self.nodes = self.cuts.nodes[:-1]  # without the output
        inside = self.cuts.between(node for node in self.nodes if node.name in self.names)
        if pieces is not None:
            inside = sorted({inside[len(inside) * number // pieces] for number in range(1, pieces) if inside})
        self.pieces = tuple(zip((0, *inside), (*inside, len(self.nodes)), strict=True))

    def gradients(self, batch: Sequence[Tensor], first: int) -> list[Gradients]:
        """The answer's gradients at the values called `names`, for each of `draws` directions; ones, where the answer
        has none (class indices). `first` is the number of the batch's first image: each has directions of its own.
        """
        found: list[Gradients] = [{} for _ in range(self.draws)]
        behind: list[list[Tensor]] = []  # for each direction, the gradients at `heads`
        heads: list[Node] = []
        for (start, stop), held in zip(reversed(self.pieces), reversed(self._forward(batch)), strict=True):
            sources = {node: _leaf(value) for node, value in held.items() if start and _is_float(value)}
            with torch.enable_grad():
                values, named = self._run(start, stop, held | sources)
            ends = [values[node] for node in heads]
            if stop == len(self.nodes):
                ends = [self._answer(values)]
                if not ends[0].requires_grad:
                    return [self._ones(batch) for _ in range(self.draws)]
                seeds = range(first * self.draws, (first + len(ends[0])) * self.draws)
                behind = [[self._direction(ends[0], seeds[number :: self.draws])] for number in range(self.draws)]
            by = [*sources.values(), *named.values()]
            for number, given in enumerate(behind):
                grads = _gradients(ends, by, given, again=number + 1 < self.draws)
                behind[number] = grads[: len(sources)]
                found[number] |= zip(named, (_finite(each) for each in grads[len(sources) :]), strict=True)
            heads = list(sources)
        return found

    @torch.no_grad()
    def _forward(self, batch: Sequence[Tensor]) -> list[Values]:
        """What stands before each piece."""
        places = [node for node in self.nodes if node.op == "placeholder"]
        standing: list[Values] = [dict(zip(places, batch, strict=True))]
        for start, stop in self.pieces[:-1]:
            values, _ = self._run(start, stop, standing[-1])
            standing.append({node: values[node] for node in self.cuts.live(stop)})
        return standing

    def _run(self, start: int, stop: int, held: Values) -> tuple[Values, Gradients]:
        """The values after the nodes from `start` to `stop`, and those among them that are called `names`: each can be
        differentiated by, where gradients are on.
        """
        interpreter = Interpreter(self.module, garbage_collect_values=False)
        interpreter.env = values = {n: _weight(self.module, n) for n in self.nodes if n.op == "get_attr"} | held
        named: Gradients = {}
        for node in self.nodes[start:stop]:
            if node not in values:
                values[node] = interpreter.run_node(node)
            if node.name in self.names:
                if torch.is_grad_enabled() and not values[node].requires_grad:
                    values[node] = _leaf(values[node])
                named[node.name] = values[node]
            for operand in node.all_input_nodes:
                if self.cuts.last_use[operand] <= self.cuts.order[node]:
                    values.pop(operand, None)
        return values, named

    def _answer(self, values: Values) -> Tensor:
        return self.answer.of(map_arg(self.cuts.nodes[-1].args[0], values.__getitem__))

    def _direction(self, answer: Tensor, seeds: range) -> Tensor:
        """A random change of the answer [images, ...], drawn for each image from its own seed; of logits, one that
        softmax sees.
        """
        drawn = torch.stack([_drawn(answer.shape[1:], seed) for seed in seeds]).to(answer)
        return drawn - drawn.mean(1, keepdim=True) if self.answer.logits else drawn

    @torch.no_grad()
    def _ones(self, batch: Sequence[Tensor]) -> Gradients:
        values = self._forward(batch)
        return {
            name: torch.ones_like(value)
            for (start, stop), held in zip(self.pieces, values, strict=True)
            for name, value in self._run(start, stop, held)[1].items()
        }


def _weight(module: GraphModule, node: Node) -> Any:
    """What a get_attr node reads, which is not trained: no activation is kept for its gradient."""
    weight = operator.attrgetter(str(node.target))(module)
    return weight.detach() if isinstance(weight, Tensor) else weight


def _gradients(ends: Sequence[Tensor], by: Sequence[Tensor], given: Sequence[Tensor], again: bool) -> list[Tensor]:
    """Zeros where nothing of `ends` follows; `again`: they are asked for once more."""
    pairs = [(end, gradient) for end, gradient in zip(ends, given, strict=True) if end.requires_grad]
    if not pairs or not by:
        return [torch.zeros_like(each) for each in by]
    tensors, gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(tensors, by, gradients, retain_graph=again, materialize_grads=True))


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def _finite(gradient: Tensor) -> Tensor:
    """A norm of zero has no gradient."""
    return gradient.nan_to_num(0.0, 0.0, 0.0)


def _drawn(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
