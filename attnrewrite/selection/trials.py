"""What each candidate takes from the model's output, standing alone at its site after a closed-form fit.

The network is gone through once: at each site every candidate is fitted there, and in the linear map that ends the
block's next branch, from what lies in front of the site; then the rest of the network shows what became of the output.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnrewrite.calibration.fit import Fit, check_finite, teacher_heads
from attnrewrite.calibration.importance import FINE_DRAWS, Importance
from attnrewrite.calibration.points import Point, fit_points
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import StageInput
from attnrewrite.calibration.workplace import Demand, Workplace
from attnrewrite.errors import CheckFailedError
from attnrewrite.selection.loss_bound import distance
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Variant, refusal_of

FITTED = 2  # the site, and what follows it before the next
KEPT = 2 + FITTED  # of the teacher: where it stands, what the site reads, and the streams that are fitted to


@dataclass(frozen=True)
class Trial:
    """A candidate alone at a site: the model's output [images, ...] on the held-out images, or why there is none."""

    site: str
    candidate: int
    output: Tensor | None
    reason: str | None


def trials(given: StageInput, sites: Sequence[AttentionSite], candidates: Sequence[Variant]) -> Iterator[Trial]:
    """Every candidate at every site, in network order. Teacher and student are the same graph, with softmax at the
    rewritten sites; the student is changed meanwhile, and as it was in the end. Where there are too few images for the
    fit of the linear maps to see whether it helps, it counts if the held-out images say so.
    """
    by_id = {site.id: site for site in sites}
    points = fit_points(given.student)
    work = Workplace.of("selection", given, points, Demand(streams=2 + KEPT, draws=FINE_DRAWS))
    with ExitStack() as stack:
        teacher, student, weights = stack.enter_context(work.opened())
        # Every process needs the whole output, so that each runs all held-out images.
        alone = Processes(device=given.processes.device)
        held_out = replace(given.held_out, batch_size=work.images.batch_size)
        ahead = stack.enter_context(Segments(given.student, held_out, alone, work.store()))
        network = _Network(given, teacher, student, ahead, weights)
        done, total = 0, len(by_id) * len(candidates)
        for index, point in enumerate(points):
            if point.site is None or point.name not in by_id:
                continue
            near, following = _near(points, index)
            network.advance(near, following)
            for number, variant in enumerate(candidates):
                yield network.trial(by_id[point.name], number, variant, near)
                done += 1
                given.report("candidates", done, total)


def _near(points: Sequence[Point], index: int) -> tuple[list[Point], Point | None]:
    """What is fitted for the site of a point, and the point after that."""
    stop = next((at for at in range(index + 1, len(points)) if points[at].site is not None), len(points))
    stop = min(stop, index + FITTED)
    return list(points[index:stop]), points[stop] if stop < len(points) else None


@dataclass(frozen=True)
class _Network:
    """Teacher and student over the images to fit, and the student over the held-out ones (`ahead`), all standing at the
    same site; the teacher also has what lies ahead of it and the candidates there are fitted to.
    """

    given: StageInput
    teacher: Segments
    student: Segments
    ahead: Segments
    weights: Importance

    def advance(self, near: Sequence[Point], following: Point | None) -> None:
        """Go on to the site of the first point of `near`, which `following` comes after."""
        for segments in (self.teacher, self.student, self.ahead):
            segments.advance(segments.position + 1, segments.order[segments.node(near[0].node.name)])
        order, node = self.teacher.order, self.teacher.node
        streams = [node(point.stream.name) for point in near]
        cut = 1 + max(order[stream] for stream in streams)
        cut = cut if following is None else min(cut, order[node(following.node.name)])
        self.teacher.advance(self.teacher.position + 1, cut, {*streams, *node(near[0].node.name).all_input_nodes})

    def trial(self, site: AttentionSite, number: int, variant: Variant, near: Sequence[Point]) -> Trial:
        """Candidate `number` at `site`, the first point of `near`; all points are as they were in the end."""
        if refusal := refusal_of(variant, site):
            return Trial(site.id, number, None, refusal.sentence)
        undo = [point.undo() for point in near]
        try:
            chooses = bool(self.teacher.images.parts)  # enough images for the fit to see by itself whether it helps
            found = [self._outputs() for done in self._fitting(site, variant, near) if done or not chooses]
            wanted = self.given.answers.together
            return Trial(site.id, number, min(found, key=lambda each: distance(wanted, each)), None)
        except (CheckFailedError, torch.linalg.LinAlgError) as error:
            return Trial(site.id, number, None, str(error))
        finally:
            for restore in undo:
                restore()

    def _fitting(self, site: AttentionSite, variant: Variant, near: Sequence[Point]) -> Iterator[bool]:
        """Put `variant` at the first point of `near` and refine it; then fit the linear maps of all points to the
        teacher. It stops after each of the two, and says whether that was all.
        """
        fit = Fit(name="selection")
        first = near[0]
        assert first.site is not None
        first.site.form = variant.build(site).to(self.given.processes.device)
        first.site.form.refine(lambda: teacher_heads(self.teacher, first.node.name))
        yield False
        for point in near:
            if point.branch is not None:
                point.branch.change(fit.residual_fit(point.branch, self.teacher, self.student, self.weights))
            check_finite(fit.name, point)
        yield True

    def _outputs(self) -> Tensor:
        """The network's answer to each held-out image, float64 [images, ...]."""
        end = self.ahead.nodes[-1]
        ran = self.ahead.run(len(self.ahead.nodes), {end})
        return self.ahead.images.joined(self.given.answer.of(values[end]) for _, values in ran)
