"""The stage that trains the whole model towards the teacher's logits."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.calibration.points import fit_points
from attnrewrite.calibration.stage import Distance, StageInput, StageResult, distance
from attnrewrite.calibration.train import Schedule, train


@dataclass(frozen=True)
class Distillation:
    """The whole student towards the teacher: squared error of the logits, each image's less their mean, or of any other
    output as it is, and squared error of the residual stream after every fitted point.

    The student that was best on the held-out images is kept, the one it started from included; it looks every `every`
    steps, and to the end: while the rate is high the student may well be worse than it was.
    """

    steps: int
    rate: float = 3e-4
    features: float = 1.0
    every: int = 20
    name: str = "distillation"

    def run(self, given: StageInput, before: Distance | None = None) -> StageResult:
        student = given.student
        streams = {point.stream.name: point.name for point in fit_points(student)}
        teacher, own = with_values(given.teacher, streams), with_values(student, streams)
        output_loss = logit_loss if given.answer.logits else partial(relative_loss, energy=given.answers.variance)

        def losses(images: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                wanted, states = teacher(images)
            found, reached = own(images)
            near = [relative_squared_error(a, b) for a, b in zip(reached, states, strict=True)]
            shares = {
                name: loss * (self.features / len(streams)) for name, loss in zip(streams.values(), near, strict=True)
            }
            return {**shares, "the output": output_loss(given.answer.of(found), given.answer.of(wanted))}

        best = train(self.name, given, losses, Schedule(self.steps, self.rate), self.every)
        student.load_state_dict(best.tensors)
        return StageResult(distance(given), (f"best after {best.step} of {self.steps} steps",))


def with_values(module: GraphModule, names: Collection[str]) -> GraphModule:
    """`module` with the values called `names`, in that order, beside its output: (output, values). Parameters are
    shared.
    """
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copies)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output((output, [by_name[name] for name in names]))
    graph.set_codegen(torch.fx.graph.CodeGen())
    return GraphModule(module, graph)


def relative_squared_error(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted|^2 / |wanted|^2 of each image's values, their mean over the images (the first axis)."""
    found, wanted = found.flatten(1), wanted.flatten(1)
    energy = wanted.square().sum(1).clamp(min=torch.finfo(wanted.dtype).tiny)
    return ((found - wanted).square().sum(1) / energy).mean()


def logit_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Half the mean squared difference of logits [images, classes], each image's less their mean: what T^2 KL(wanted ||
    found) comes to as the temperature T grows (Hinton et al. 2015, section 2.1; Kim et al. 2021). At T = 1 images that
    both are sure of, as of those that the teacher was trained on, would hardly count.
    """
    error = found - wanted
    return (error - error.mean(1, keepdim=True)).square().mean() / 2


def relative_loss(found: Tensor, wanted: Tensor, energy: float) -> Tensor:
    """The mean squared difference of any other output over the `energy` of its values."""
    return (found - wanted).square().mean() / energy
