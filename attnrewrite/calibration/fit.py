"""The closed-form stage: forms, output projections and MLPs fitted to the teacher in network order.

The network is not differentiated but for what tokens count; maps inside a form, which have no closed form, are
searched for each by itself (`maps.py`).
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.calibration import maps
from attnrewrite.calibration.branches import Branch, branches
from attnrewrite.calibration.cuts import Cuts
from attnrewrite.calibration.importance import DRAWS, Blocks, Importance, importance
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.room import room, sized
from attnrewrite.calibration.segments import Segments, rewritten_site, site_heads
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.calibration.store import InMemory, OnDisk, Store, require_disk
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.augment import repeated
from attnrewrite.images.pool import Pool
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.variants.base import Heads
from attnrewrite.variants.parts.ridge import LeastSquares

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
CHOOSING_SHARE = 5  # one image in five chooses among ridges, and is fitted to with the one that it chose,
LEAST_CHOOSING = 16  # where there are so many

Undo = Callable[[], None]


@dataclass(frozen=True)
class Point:
    """A node of the student that is fitted: a site's form, the map that ends a residual branch, or both at once."""

    node: Node
    site: SiteModule | None
    branch: Branch | None

    @property
    def site_id(self) -> str | None:
        return None if self.site is None else self.site.site_id

    @property
    def name(self) -> str:
        return self.site_id or self.node.name

    @property
    def stream(self) -> Node:
        return self.branch.stream if self.branch is not None else self.node

    @property
    def alone(self) -> bool:
        """Whether no addition takes what is fitted here into a stream."""
        return self.stream is self.node

    @property
    def searches(self) -> bool:
        """Whether the form here has maps to be searched."""
        return self.site is not None and bool(self.site.form.searched())

    def undo(self) -> Undo:
        """What puts the point back to where it stands now."""
        form = None if self.site is None else copy.deepcopy(self.site.form)
        change = None if self.branch is None else self.branch.saved()

        def restore() -> None:
            if self.site is not None and form is not None:
                self.site.form = form
            if change is not None:
                change()

        return restore


@dataclass(frozen=True)
class Fit:
    """Site by site in network order: (a) where `forms`, the form refines its own constants, and its local branch, on
    the teacher's activations, and its maps are searched (not with too few tokens to check a search); (b) the output
    projection, and (c) every later linear map that ends a residual branch, is fitted by ridge regression to the
    residual target, teacher's stream minus student's, where each token counts as much as the teacher's answer depends
    on it.

    The ridge is relative to each column's energy (`ridge`, where there are too few images to choose); else one image in
    CHOOSING_SHARE chooses it, or no change at all. Statistics are float64; memory is one batch and them, and the result
    the same, to rounding, whatever the batches are.
    Where all points together end worse on the held-out images than nothing would have, the last ones are taken back
    until they do not.
    """

    forms: bool = True
    ridge: float = 1e-2
    name: str = "fit"

    def run(self, given: StageInput) -> tuple[str, ...]:
        student = given.student
        before = distance(given).loss
        points = fit_points(student)
        undo: list[Undo] = []
        unsearched: list[str] = []
        work = Workplace.of(self.name, given, points)
        with work.opened() as (teacher, own, weights):
            for done, (point, following) in enumerate(zip_longest(points, points[1:])):
                given.report(self.name, done, len(points))
                for segments in (teacher, own):
                    segments.advance(own.order[point.node])
                undo.append(point.undo())
                if not self.fit_point(point, following, teacher, own, weights):
                    unsearched.append(point.name)
        given.report(self.name, len(points), len(points))
        kept = _back_off(given, points, undo, before)
        notes = tuple(_left_out(points))
        if unsearched:
            notes += (f"maps are not searched, as that takes more images: {', '.join(unsearched)}",)
        if kept == len(points):
            return notes
        taken_back = ", ".join(point.name for point in points[kept:])
        return (*notes, f"taken back, as the fit there made the output worse: {taken_back}")

    def fit_point(
        self, point: Point, following: Point | None, teacher: Segments, student: Segments, weights: Importance
    ) -> bool:
        """Fit one point, which both stand before and which `following` comes after. False: its form has maps to be
        searched, and there are too few tokens for that.
        """
        name, searched = point.node.name, True
        try:
            if self.forms and point.site is not None:
                point.site.form.refine(lambda: teacher_heads(teacher, name))
                softmax = _teacher_site(teacher, name).form
                searched = maps.search(point.site.form, softmax, _some_heads(teacher, name))
            cut = student.order[point.stream] + 1
            cut = cut if following is None else min(cut, student.order[following.node])
            teacher.advance(cut, keep=(teacher.node(point.stream.name),))
            if point.branch is not None:
                point.branch.change(self.residual_fit(point.branch, teacher, student, weights))
        except torch.linalg.LinAlgError as error:
            told = f"{self.name}: {point.name} has no solution ({error}); {_way_out(point)}"
            raise CheckFailedError(told, site=point.site_id) from error
        check_finite(self.name, point)
        return searched

    def residual_fit(self, branch: Branch, teacher: Segments, student: Segments, weights: Importance) -> Tensor:
        """The change of the branch's map, [columns, outputs]."""
        parts = LeastSquares(), LeastSquares()
        stream = teacher.node(branch.stream.name)
        stop = student.order[branch.stream] + 1
        pairs = zip(teacher.run(stop, {stream}), student.run(stop, {branch.stream, *branch.reads}), strict=True)
        for (index, wanted), (_, values) in pairs:
            residual = wanted[stream] - values[branch.stream]
            counts = weights.of(branch.node.name, index)
            choosing = student.images.bounds[index][0] >= min(student.images.parts, default=math.inf)
            parts[choosing].add(*branch.samples(residual, values, counts))
        fit, chosen = (_everyones(part, student.processes, branch) for part in parts)
        if chosen.gram is None or chosen.moment is None:
            return fit.solve(self.ridge)
        errors = {ridge: chosen.error(fit.solve(ridge)) for ridge in RIDGES}
        best = min(RIDGES, key=errors.__getitem__)
        if errors[best] >= chosen.energy:
            return torch.zeros_like(chosen.moment)
        fit.add_statistics(chosen.gram, chosen.moment)
        return fit.solve(best)


@dataclass(frozen=True)
class Workplace:
    """The images of a fit in batches that memory has room for, and where their activations wait: in memory where they
    take at most half of it, else in temporary files.
    """

    given: StageInput
    images: Pool
    on_disk: bool
    draws: int = DRAWS

    @classmethod
    def of(
        cls,
        what: str,
        given: StageInput,
        points: Sequence["Point"],
        streams: int = 2,
        pieces: Collection[str] | None = None,
        draws: int = DRAWS,
        times: int = 1,
    ) -> "Workplace":
        """For `what` fits `points` with so many `streams` of every image's activations, and differentiates the network
        in `pieces` that end at the nodes of these names (at every branch's), in `draws` directions for each image.
        Each image comes so many `times`, moved but for the first.

        Raises:
            InputError: memory has no room for one image, or the disk none for all of them.
        """
        count = len(given.images.images)
        chosen = count // CHOOSING_SHARE
        fitted = count - chosen
        if given.images.filled:  # whole batches: what fills one up would be fitted to and chosen by
            fitted -= fitted % given.images.batch_size
        pool = replace(given.images, parts=(fitted,) if chosen >= LEAST_CHOOSING and fitted else ())
        if times > 1:
            order = np.concatenate([np.tile(part, times) for part in np.split(np.arange(count), pool.parts)])
            parts = tuple(part * times for part in pool.parts)
            pool, count = replace(pool, images=repeated(pool.images, order), parts=parts), len(order)
        ends = [point.branch for point in points if point.branch is not None]
        blocks = Blocks(given.teacher, pieces or [branch.node.name for branch in branches(given.teacher)], draws)
        cuts = Cuts(given.student)
        widest = max((cuts.live_bytes(at) for at in cuts.between(point.node for point in points)), default=0)
        waiting = streams * count * widest // given.processes.size
        device = given.processes.device
        on_disk = waiting > room(given.execution, device) // 2
        if on_disk:
            require_disk(what, streams * count * widest)
        solving = max((branch.solver_bytes for branch in ends), default=0)
        widths = [point.branch.weight.shape[1] for point in points if point.branch is not None and point.searches]
        searching = [maps.held_bytes(width, count * widest // (4 * width * maps.IMAGES)) for width in widths]
        held = max(solving, *searching, 0) + (0 if on_disk else waiting)
        images = sized(pool, what, lambda *inputs: blocks.gradients(inputs, 0), given.execution, device, held)
        size = given.processes.from_owner(images.batch_size, 0)  # all processes have the same batches
        return cls(given, replace(images, batch_size=size), on_disk, draws)

    def store(self) -> Store:
        return OnDisk() if self.on_disk else InMemory()

    @contextmanager
    def opened(self) -> Iterator[tuple[Segments, Segments, Importance]]:
        """Teacher and student at their beginnings, and what each token counts."""
        given, processes = self.given, self.given.processes
        with (
            closing(self.store()) as energy,
            Segments(given.teacher, self.images, processes, self.store()) as teacher,
            Segments(given.student, self.images, processes, self.store()) as student,
        ):
            known = given.weights
            if known is None:
                yield teacher, student, importance(given.teacher, self.images, processes, energy, self.draws)
            else:
                yield teacher, student, known(self.images)


def fit_points(student: GraphModule) -> list[Point]:
    """Every point to fit, in the order of the graph."""
    ends = {branch.node: branch for branch in branches(student)}
    sites = {node: rewritten_site(student, node) for node in student.graph.nodes}
    return [Point(node, site, ends.get(node)) for node, site in sites.items() if site is not None or node in ends]


def _left_out(points: list[Point]) -> Iterator[str]:
    """What could not be fitted, or not as it should, as sentences."""
    sites = [(index, point) for index, point in enumerate(points) if point.site is not None]
    loose = [point.name for _, point in sites if point.branch is None]
    alone = [point.name for _, point in sites if point.branch is not None and point.alone]
    bare = [point.name for index, point in sites if all(after.alone for after in points[index + 1 : index + 2])]
    if loose:
        yield f"only the form is fitted, as the output projection is not traced: {', '.join(loose)}"
    if alone:
        yield f"fitted to the teacher's own output, as no residual connection follows: {', '.join(alone)}"
    if bare:
        yield f"no linear map that ends a residual branch follows, so that none is fitted: {', '.join(bare)}"


def teacher_heads(teacher: Segments, name: str) -> Iterator[Heads]:
    """What softmax reads at the site called `name`, batch by batch, whichever process computes it."""
    node, site = teacher.node(name), _teacher_site(teacher, name)
    mine = teacher.run(teacher.order[node], node.all_input_nodes)
    for index in range(teacher.count):
        owner = index % teacher.processes.size
        heads = site_heads(site, node, next(mine)[1]) if owner == teacher.processes.rank else None
        yield teacher.processes.from_owner(heads, owner)


def _some_heads(teacher: Segments, name: str) -> Iterator[Heads]:
    """The same of the first of the images, one in maps.IMAGES."""
    images = teacher.images
    limit = len(images.images) // maps.IMAGES
    for (start, stop), heads in zip(images.bounds, teacher_heads(teacher, name), strict=False):
        if start >= limit:
            return
        rows = len(heads.query) // (stop - start) * (min(stop, limit) - start)
        yield maps.first_rows(heads, rows)


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
    energy = torch.tensor([part.energy], dtype=torch.float64, device=gram.device)
    processes.add_up(gram, moment, energy)
    together = LeastSquares()
    if bool(gram.any()):
        together.add_statistics(gram, moment, float(energy))
    return together


def _back_off(given: StageInput, points: Sequence[Point], undo: Sequence[Undo], before: float) -> int:
    """Take fits back, from the last on, until the held-out loss is no more than `before`; how many are left.

    Ever more at a time, then by halves between: a few looks at the held-out images, however many points there are.
    """
    if distance(given).loss <= before:
        return len(undo)
    redo = [point.undo() for point in points]

    def stands(count: int) -> bool:
        """Leave so many fits, and say whether that is no worse than none."""
        for number, (back, forth) in enumerate(zip(undo, redo, strict=True)):
            (forth if number < count else back)()
        return not count or distance(given).loss <= before

    too_many, step = len(undo), 1
    while not stands(kept := max(too_many - step, 0)):
        too_many, step = kept, 2 * step
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        kept, too_many = (middle, too_many) if stands(middle) else (kept, middle)
    stands(kept)
    return kept


def check_finite(stage: str, point: Point) -> None:
    tensors: list[Tensor] = [] if point.site is None else list(point.site.form.parameters())
    tensors += [] if point.branch is None else [point.branch.weight]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        told = f"{stage}: {point.name} came out as NaN or infinity; {_way_out(point)}"
        raise CheckFailedError(told, site=point.site_id)


def _way_out(point: Point) -> str:
    return f"keep it with --keep {point.name}" if point.site is not None else "calibrate with other images"
