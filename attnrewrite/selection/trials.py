"""What each candidate takes from the model's output, standing alone at its site after a closed-form fit.

The network is gone through once: at each site every candidate is fitted there, and in the linear map that ends the
block's next branch, from what lies in front of the site; then the rest of the network shows what became of the output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.calibration.fit import Fit, Point, check_finite, fit_points, teacher_heads
from attnrewrite.calibration.importance import Importance, importance
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import divergence
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.pool import Pool, first_tensor
from attnrewrite.progress import Progress
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Variant, refusal_of

FITTED = 2  # the site, and what follows it


@dataclass(frozen=True)
class Trial:
    """A candidate alone at a site: the model's output [images, ...] on the held-out images, or why there is none."""

    site: str
    candidate: int
    output: Tensor | None
    reason: str | None


def trials(
    teacher: GraphModule,
    student: GraphModule,
    sites: Sequence[AttentionSite],
    candidates: Sequence[Variant],
    fitted: Pool,
    held_out: Pool,
    wanted: Tensor,
    processes: Processes,
    progress: Progress | None = None,
) -> Iterator[Trial]:
    """Every candidate at every site, in network order. Teacher and student are the same graph, with softmax at the
    rewritten sites; the student is changed meanwhile, and as it was in the end. The fit of the linear maps counts where
    it brings the output on the held-out images closer to `wanted`, the original's.
    """
    by_id = {site.id: site for site in sites}
    points = fit_points(student)
    weights = importance(teacher, fitted, processes)
    with ExitStack() as stack:
        runs = [stack.enter_context(Segments(m, fitted, processes)) for m in (teacher, student)]
        # Every process needs the whole output, so that each runs all held-out images.
        ahead = stack.enter_context(Segments(student, held_out, Processes(device=processes.device)))
        outputs = partial(_outputs, ahead, held_out)
        done, total = 0, len(by_id) * len(candidates)
        for index, point in enumerate(points):
            if point.site is None or point.name not in by_id:
                continue
            for segments in (*runs, ahead):
                segments.advance(segments.order[segments.node(point.node.name)])
            near = points[index : index + FITTED]
            for number, variant in enumerate(candidates):
                yield _trial(by_id[point.name], number, variant, near, runs[0], runs[1], weights, outputs, wanted)
                done += 1
                if progress is not None and processes.rank == 0:
                    progress("candidates", done, total)


def _trial(
    site: AttentionSite,
    number: int,
    variant: Variant,
    near: Sequence[Point],
    teacher: Segments,
    student: Segments,
    weights: Importance,
    outputs: Callable[[], Tensor],
    wanted: Tensor,
) -> Trial:
    if reason := refusal_of(variant, site):
        return Trial(site.id, number, None, reason.sentence)
    undo = [point.undo() for point in near]
    try:
        given = [outputs() for _ in _fitting(site, variant, near, teacher, student, weights)]
        return Trial(site.id, number, min(given, key=lambda each: divergence(wanted, each)), None)
    except (CheckFailedError, torch.linalg.LinAlgError) as error:
        return Trial(site.id, number, None, str(error))
    finally:
        for restore in undo:
            restore()


def _fitting(
    site: AttentionSite,
    variant: Variant,
    near: Sequence[Point],
    teacher: Segments,
    student: Segments,
    weights: Importance,
) -> Iterator[None]:
    """Put `variant` at the first point of `near` and refine it; then fit the linear maps of all points to the teacher.
    It stops after each of the two.
    """
    fit = Fit(name="selection")
    first = near[0]
    assert first.site is not None
    first.site.form = variant.build(site).to(student.processes.device)
    first.site.form.refine(lambda: teacher_heads(teacher, first.node.name))
    yield
    for point in near:
        if point is not first and point.site is not None:
            break  # another site before any linear map: it is fitted when its own turn comes
        if point.branch is not None:
            point.branch.change(fit.residual_fit(point.branch, teacher, student, weights))
        check_finite(fit.name, point)
    yield


def _outputs(ahead: Segments, pool: Pool) -> Tensor:
    """The first output of the network for each image, in float64."""
    end, found = ahead.nodes[-1], []
    for index, values in ahead.run(len(ahead.nodes), {end}):
        output = first_tensor(values[end])
        left = len(pool.images) - index * pool.batch_size
        found.append(output[:left] if output.shape[:1] == (pool.batch_size,) else output)
    return torch.cat(found).double()
