"""The stages with gradients: each site towards the teacher's, then the whole model towards the teacher's logits."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.calibration.fit import Fit, fit_points
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.calibration.train import Best, Schedule, snapshot, train
from attnrewrite.images.pool import first_tensor
from attnrewrite.passes.verify import recorded, rewritten_sites


@dataclass(frozen=True)
class SiteDistillation:
    """Each site by itself, all at once: its output for the teacher's inputs towards the teacher's output. Then the maps
    that end the residual branches are fitted again, for what the sites became.

    Where that ends worse on the held-out images than it began, nothing is changed.
    """

    steps: int = 60
    rate: float = 2e-3
    name: str = "site distillation"

    def run(self, given: StageInput) -> tuple[str, ...]:
        student = given.student
        before, tensors = distance(given).loss, snapshot(student)
        sites = rewritten_sites(student)

        def losses(images: Tensor) -> dict[str, Tensor]:
            with torch.no_grad(), recorded(given.teacher) as calls:
                given.teacher(images)
            return {name: relative_squared_error(site(*calls[name][0]), calls[name][1]) for name, site in sites.items()}

        train(self.name, given, losses, Schedule(self.steps, self.rate))
        notes = Fit(forms=False, name=f"{self.name}: fit").run(given)
        if distance(given).loss <= before:
            return notes
        student.load_state_dict(tensors)
        return ("taken back: the held-out images came out no better",)


@dataclass(frozen=True)
class Distillation:
    """The whole student towards the teacher: Kullback-Leibler divergence of the logits (squared error, where the output
    is no logits), and squared error of the residual stream after every fitted point.

    The student that was best on the held-out images is kept, the one it started from included; without a better one
    in a share `patience` of the steps, looked for every `every` steps, it stops early.
    """

    steps: int
    rate: float = 3e-4
    features: float = 1.0
    every: int = 20
    patience: float = 0.5
    name: str = "distillation"

    def run(self, given: StageInput) -> tuple[str, ...]:
        student = given.student
        streams = {point.stream.name: point.name for point in fit_points(student)}
        teacher, own = with_values(given.teacher, streams), with_values(student, streams)

        def losses(images: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                wanted, states = teacher(images)
            found, reached = own(images)
            near = [relative_squared_error(a, b) for a, b in zip(reached, states, strict=True)]
            shares = {
                name: loss * (self.features / len(streams)) for name, loss in zip(streams.values(), near, strict=True)
            }
            return {**shares, "the output": output_loss(first_tensor(found), first_tensor(wanted))}

        best = Best(given, self.every, math.ceil(self.patience * self.steps / self.every))
        train(self.name, given, losses, Schedule(self.steps, self.rate), best)
        student.load_state_dict(best.tensors)
        return (f"best after {best.step} of {self.steps} steps",)


def with_values(module: GraphModule, names: Collection[str]) -> GraphModule:
    """`module` with the values called `names` beside its output: (output, values). Parameters are shared."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output((output, [copy for node, copy in copies.items() if node.name in names]))
    graph.set_codegen(torch.fx.graph.CodeGen())
    return GraphModule(module, graph)


def relative_squared_error(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted|^2 / |wanted - mean(wanted)|^2."""
    energy = (wanted - wanted.mean()).square().mean().clamp(min=torch.finfo(wanted.dtype).tiny)
    return (found - wanted).square().mean() / energy


def output_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || found) of logits [images, classes] in nats an image (Hinton et al. 2015, at temperature 1); the
    relative squared error of any other output.
    """
    if wanted.dim() != 2 or wanted.shape[1] < 2:
        return relative_squared_error(found, wanted)
    return F.kl_div(found.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)
