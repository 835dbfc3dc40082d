"""The closed-form stage: forms, output projections and MLPs fitted to the teacher in network order.

The network is not differentiated but for what tokens count; a site's own weights, which have no closed form, are
searched for at each site by itself (`descent.py`).
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.fx import Node

from attnrewrite.calibration import descent
from attnrewrite.calibration.branches import Branch
from attnrewrite.calibration.importance import Importance
from attnrewrite.calibration.points import Point, Undo, fit_points
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.projections import Searched, TracedWrite, with_projections
from attnrewrite.calibration.segments import Segments, Values, rewritten_site, site_heads
from attnrewrite.calibration.stage import Distance, StageInput, StageResult, distance
from attnrewrite.calibration.workplace import Demand, Workplace, most_tokens
from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.site_module import SiteModule, Write, read
from attnrewrite.resources import give_back
from attnrewrite.variants.base import Heads
from attnrewrite.variants.parts.ridge import LeastSquares

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
REFINED_TOKENS = 32_768  # of a site, that its form's own constants are refined with
ENOUGH_TOKENS = 327_680  # of a site: pictures that have fewer in all come several times, changed,
MOST_TIMES = 5  # but no more often, and once where a picture has more than
SMALL_TOKENS = 128  # of them, as every further time costs what fitting to all pictures does


@dataclass(frozen=True)
class Fit:
    """Site by site in network order: (a) where `forms`, the form refines its own constants, and its local branch, on
    the teacher's activations, and its weights and those of its projections are searched towards the residual target of
    (b) (not with too few tokens to check a search); (b) the output projection, and (c) every later linear map that ends
    a residual branch, is fitted by ridge regression to the residual target, teacher's stream minus student's, where
    each token, and each output of the map, counts as much as the teacher's answer depends on it.

    The ridge is relative to each column's energy (`ridge`, where there are too few images to choose); else one image in
    five chooses it, or no change at all. Statistics are float64; memory is one batch and them, and the result
    the same, to rounding, whatever the batches are.
    Where small pictures have few tokens in all, each comes as often as ENOUGH_TOKENS and `times` allow: as it is,
    then moved and with a part of another pasted over it.
    Where all points together end worse on the held-out images than nothing would have, the last ones are taken back
    until they do not.
    """

    forms: bool = True
    ridge: float = 1e-2
    times: int = MOST_TIMES
    name: str = "fit"

    def run(self, given: StageInput, before: Distance | None = None) -> StageResult:
        student = given.student
        before = before or distance(given)
        points = fit_points(student)
        undo: list[Undo] = []
        unsearched: dict[str, list[str]] = {}
        work = Workplace.of(self.name, given, points, Demand(times=self._times(given, points), once=True))
        passed = 0  # the position behind the last point's stream
        with work.opened() as (teacher, own, weights):
            for done, (point, following) in enumerate(zip_longest(points, points[1:])):
                given.report(self.name, done, len(points))
                last = own.order[point.begins]  # what a search changes is not held
                for segments in (teacher, own):
                    segments.advance(passed, last)
                passed = own.order[point.stream] + 1
                undo.append(point.undo())
                if why := self.fit_point(point, following, teacher, own, weights):
                    unsearched.setdefault(why, []).append(point.name)
        given.report(self.name, len(points), len(points))
        kept, after = _back_off(given, points, undo, before)
        notes = (*_left_out(points), *(f"{why}: {', '.join(names)}" for why, names in unsearched.items()))
        if kept == len(points):
            return StageResult(after, notes)
        taken_back = ", ".join(point.name for point in points[kept:])
        return StageResult(after, (*notes, f"taken back, as the fit there made the output worse: {taken_back}"))

    def _times(self, given: StageInput, points: Sequence[Point]) -> int:
        """How often each image is fitted to."""
        images, tokens = len(given.images.images), most_tokens(given.student, points)
        if not 0 < tokens <= SMALL_TOKENS or not given.images.pictures:
            return 1
        return min(max(1, ENOUGH_TOKENS // (images * tokens)), self.times)

    def fit_point(
        self, point: Point, following: Point | None, teacher: Segments, student: Segments, weights: Importance
    ) -> str | None:
        """Fit one point, which both stand before and which `following` comes after; why a search left the site's
        weights as they were, if it did.
        """
        name, why = point.node.name, None
        try:
            if self.forms and point.site is not None:
                point.site.form.refine(lambda: teacher_heads(teacher, name))
            cut = student.order[point.stream] + 1
            cut = cut if following is None else min(cut, student.order[following.node])
            reached = point.branch or point.reached
            if reached is None or not reached.normalised:  # which asks for more than the stream
                teacher.advance(teacher.position + 1, cut, keep=(teacher.node(point.stream.name),))
            give_back()
            if self.forms and point.site is not None:
                samples = _samples(point, teacher, student, weights)
                copies = student.images.copies
                site = _searched_site(point, student).site
                why = descent.search(site, samples, len(student.images.images) - copies, copies)
            if point.branch is not None:
                point.branch.change(self.residual_fit(point.branch, teacher, student, weights))
        except torch.linalg.LinAlgError as error:
            told = f"{self.name}: {point.name} has no solution ({error}); {_way_out(point)}"
            raise CheckFailedError(told, site=point.site_id) from error
        check_finite(self.name, point)
        return why

    def residual_fit(self, branch: Branch, teacher: Segments, student: Segments, weights: Importance) -> Tensor:
        """The change of the branch's map, [columns, outputs]."""
        parts = LeastSquares(), LeastSquares()
        stop = student.order[branch.stream] + 1
        pairs = zip(_originals(teacher, branch.original), student.run(stop, branch.reads), strict=True)
        for original, (index, values) in pairs:
            student.hold(index, {branch.input: values[branch.input]})  # the map alone changes now
            counts = weights.of(branch.node.name, index)
            choosing = student.images.bounds[index][0] >= min(student.images.parts, default=math.inf)
            parts[choosing].add(*branch.samples(values, original, counts))
        fit, chosen = (_everyones(part, student.processes, branch) for part in parts)
        if chosen.gram is None or chosen.moment is None or chosen.energy is None:
            return fit.solve(self.ridge)
        outputs = weights.outputs[branch.node.name]
        errors = {ridge: float(chosen.errors(fit.solve(ridge)) @ outputs) for ridge in RIDGES}
        best = min(RIDGES, key=errors.__getitem__)
        if errors[best] >= float(chosen.energy @ outputs):
            return torch.zeros_like(chosen.moment)
        fit.add_statistics(chosen.gram, chosen.moment)
        return fit.solve(best)


def _originals(teacher: Segments, nodes: Collection[Node]) -> Iterator[Values]:
    """The teacher's values of the student's `nodes`, batch by batch of this process."""
    own = {node: teacher.node(node.name) for node in nodes}
    stop = 1 + max(map(teacher.order.__getitem__, own.values()))
    for _, values in teacher.run(stop, set(own.values())):
        yield {node: values[there] for node, there in own.items()}


def _left_out(points: list[Point]) -> Iterator[str]:
    """What could not be fitted, or not as it should, as sentences."""
    sites = [(index, point) for index, point in enumerate(points) if point.site is not None]
    loose = [point.name for _, point in sites if point.branch is None and point.reached is None]
    alone = [point.name for _, point in sites if point.branch is not None and point.alone]
    bare = [point.name for index, point in sites if all(after.alone for after in points[index + 1 : index + 2])]
    if loose:
        yield f"only the form is fitted, as the output projection is not traced: {', '.join(loose)}"
    if alone:
        yield f"fitted to the teacher's own output, as no residual connection follows: {', '.join(alone)}"
    if bare:
        yield f"no linear map that ends a residual branch follows, so that none is fitted: {', '.join(bare)}"


def teacher_heads(teacher: Segments, name: str) -> Iterator[Heads]:
    """What softmax reads at the site called `name` for the first REFINED_TOKENS queries, batch by batch, whichever
    process computes it.
    """
    node, site = teacher.node(name), _teacher_site(teacher, name)
    mine = teacher.run(teacher.order[node], node.all_input_nodes)
    rows = 0
    for index in range(teacher.count):
        owner = index % teacher.processes.size
        own = site_heads(site, node, next(mine)[1]) if owner == teacher.processes.rank else None
        heads: Heads = teacher.processes.from_owner(own, owner).to(teacher.processes.device)
        most = max(1, REFINED_TOKENS // heads.query.shape[2])
        yield heads.rows(most - rows)
        rows += len(heads.query)
        if rows >= most:
            return


def _samples(point: Point, teacher: Segments, student: Segments, weights: Importance) -> Iterator[descent.Sample]:
    """What the student's site at `point` reads and should give, batch by batch, whichever process computes it."""
    mine = _own_samples(point, teacher, student, weights)
    for index in range(student.count):
        owner = index % student.processes.size
        sample = next(mine) if owner == student.processes.rank else None
        yield student.processes.from_owner(sample, owner).to(student.processes.device)


def _searched_site(point: Point, student: Segments) -> Searched:
    """The site at `point` with what the graph does for it; as it stands where `student` is behind the beginning of
    that.
    """
    assert point.site is not None
    if student.order[point.begins] < student.position:
        return Searched(point.site, tuple(point.node.args), point.node)  # type: ignore[arg-type]
    return with_projections(student.module, point.node, point.reached)


def _own_samples(point: Point, teacher: Segments, student: Segments, weights: Importance) -> Iterator[descent.Sample]:
    searched = _searched_site(point, student)
    branch = point.reached if isinstance(searched.site.output, TracedWrite) else point.branch
    needs = {*searched.reads, *(() if branch is None else branch.wants)}
    stop = 1 + max(map(student.order.__getitem__, needs))
    behind = point.stream if branch is None else branch.stream
    past = _originals(teacher, {behind} if branch is None else branch.original)
    for original, (index, values) in zip(past, student.run(stop, needs), strict=True):
        images = student.images.size_of(index)
        if branch is None:
            outputs = None
            target, counts = _heads_wanted(searched.site, original[behind])
        else:
            outputs = weights.outputs[branch.node.name].float()
            rows = weights.of(branch.node.name, index)
            target, counts = _wanted(branch, values, original, rows, images)
        read_ones = [values[node] for node in searched.reads]
        yield descent.sampled(searched.site, read_ones, target, counts, images, outputs)


def _heads_wanted(site: SiteModule, heads: Tensor) -> tuple[Tensor, Tensor]:
    """What a site should give whose output projection is not traced: the teacher's heads, where all tokens count
    alike.
    """
    assert isinstance(site.output, Write)
    wanted = read(heads, site.output.layout).transpose(1, 2).flatten(2)
    return wanted, wanted.new_ones(wanted.shape[:2])


@torch.no_grad()
def _wanted(branch: Branch, values: Values, original: Values, rows: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """What the map of `branch` should give beside the student's `values`, where the teacher's are `original` and its
    `rows` count so much, and what the tokens of so many `images` count in a search.
    """
    rows = branch.by_token(rows)
    target, reaches = branch.wanted(rows, values, original)
    return target.flatten(1, -2), descent.flattened(rows.flatten(1), images) * reaches.flatten(1)


def _teacher_site(teacher: Segments, name: str) -> SiteModule:
    site = rewritten_site(teacher.module, teacher.node(name))
    assert site is not None, f"the teacher has no rewritten site {name}"
    return site


def _everyones(part: LeastSquares, processes: Processes, branch: Branch) -> LeastSquares:
    """The statistics of all processes together. One that saw no batch adds zeros; none at all stays empty."""
    if processes.size == 1:
        return part
    outputs, inputs = branch.weight.shape
    columns = inputs + (branch.bias is not None)
    zeros = branch.weight.new_zeros(columns, columns, dtype=torch.float64)
    gram = zeros if part.gram is None else part.gram.clone()
    moment = zeros[:, :1].expand(-1, outputs).clone() if part.moment is None else part.moment.clone()
    energy = torch.zeros_like(moment[0]) if part.energy is None else part.energy.clone()
    processes.add_up(gram, moment, energy)
    together = LeastSquares()
    if bool(gram.any()):
        together.add_statistics(gram, moment, energy)
    return together


def _back_off(
    given: StageInput, points: Sequence[Point], undo: Sequence[Undo], before: Distance
) -> tuple[int, Distance]:
    """Take fits back, from the last on, until the held-out loss is no more than `before`; how many are left, and how
    far the student is then.

    Ever more at a time, then by halves between: a few looks at the held-out images, however many points there are.
    """
    after = distance(given)
    if after.loss <= before.loss or not math.isfinite(before.loss):
        return len(undo), after
    redo = [point.undo() for point in points]

    def left(count: int) -> Distance:
        """Leave so many fits, and say how far that is."""
        for number, (back, forth) in enumerate(zip(undo, redo, strict=True)):
            (forth if number < count else back)()
        return distance(given) if count else before

    too_many, step = len(undo), 1
    while not left(kept := max(too_many - step, 0)).loss <= before.loss:  # a loss that is no number is no less
        too_many, step = kept, 2 * step
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        kept, too_many = (middle, too_many) if left(middle).loss <= before.loss else (kept, middle)
    return kept, left(kept)


def check_finite(stage: str, point: Point) -> None:
    tensors: list[Tensor] = [] if point.site is None else list(point.site.form.parameters())
    tensors += [] if point.branch is None else [point.branch.weight]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        told = f"{stage}: {point.name} came out as NaN or infinity; {_way_out(point)}"
        raise CheckFailedError(told, site=point.site_id)


def _way_out(point: Point) -> str:
    return f"keep it with --keep {point.name}" if point.site is not None else "calibrate with other images"
