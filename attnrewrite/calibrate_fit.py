"""The closed-form stage: forms, output projections and MLPs fitted to the teacher in network order, no gradients."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from attnrewrite.calibrate_stage import Calibration
from attnrewrite.calibrate_branches import Branch, branches
from attnrewrite.calibrate_graph import Segments, rewritten_site, site_heads
from attnrewrite.errors import CheckFailedError
from attnrewrite.variants.base import Heads
from attnrewrite.variants.least_squares import LeastSquares

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Fit:
    """Site by site in network order: (a) the form refines its own constants, and its local branch, on the teacher's
    activations; (b) the output projection, and (c) where `mlp` every later linear map that ends a residual branch, is
    fitted by ridge regression to the residual target, teacher's stream minus student's.

    The ridge is relative to each column's energy (`ridge`, where there are too few batches to choose); with five
    batches or more, every fifth chooses it, or no change at all. Statistics are float64; memory is one batch and them.
    """

    mlp: bool = True
    ridge: float = 1e-2
    name: str = "fit"

    def run(self, calibration: Calibration) -> tuple[str, ...]:
        student = calibration.student
        ends = {branch.node: branch for branch in branches(student)}
        nodes = [node for node in student.graph.nodes if node in ends or rewritten_site(student, node) is not None]
        if not self.mlp:
            nodes = [node for node in nodes if rewritten_site(student, node) is not None]
        both = Segments(calibration.teacher, calibration.images), Segments(student, calibration.images)
        try:
            for done, node in enumerate(nodes):
                calibration.report("fit", done, len(nodes))
                self._fit_node(node, ends.get(node), *both)
            calibration.report("fit", len(nodes), len(nodes))
        finally:
            for segments in both:
                segments.close()
        return ()

    def _fit_node(self, node: Node, branch: Branch | None, teacher: Segments, student: Segments) -> None:
        site = rewritten_site(student.module, node)
        if site is not None:
            site.form.refine(lambda: _teacher_heads(teacher, node.name))
            for name, tensor in site.form.named_parameters():
                if not bool(torch.isfinite(tensor).all()):
                    raise CheckFailedError(f"fit: {site.site_id}: {name} is not finite; leave that site as it is")
        if branch is not None:
            branch.change(self._residual_fit(branch, teacher, student))
        stream = branch.stream if branch is not None else node
        teacher.advance(teacher.node(stream.name))
        student.advance(stream)

    def _residual_fit(self, branch: Branch, teacher: Segments, student: Segments) -> torch.Tensor:
        """The change of the branch's map, [columns, outputs]."""
        parts = LeastSquares(), LeastSquares()
        stream = teacher.node(branch.stream.name)
        pairs = zip(teacher.run(stream), student.run(branch.stream), strict=True)
        for index, (wanted, values) in enumerate(pairs):
            residual = wanted[stream] - values[branch.stream]
            parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].add(*branch.samples(residual, values))
        fit, held_out = parts
        if held_out.gram is None or held_out.moment is None:
            return fit.solve(self.ridge)
        changes = {ridge: fit.solve(ridge) for ridge in RIDGES}
        best = min(RIDGES, key=lambda ridge: held_out.error(changes[ridge]))
        if held_out.error(changes[best]) >= held_out.energy:
            return torch.zeros_like(held_out.moment)
        fit.add_statistics(held_out.gram, held_out.moment)
        return fit.solve(best)


def _teacher_heads(teacher: Segments, name: str) -> Iterator[Heads]:
    """What softmax reads at the site called `name`, batch by batch."""
    node = teacher.node(name)
    site = rewritten_site(teacher.module, node)
    assert site is not None, f"the teacher has no rewritten site {name}"
    for values in teacher.run(node):
        yield site_heads(site, node, values)
