"""The stage that trains a few blocks at a time, each towards the teacher's own, from the first to the last."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.fx import Node

from attnrewrite.calibration.branches import Branch, branches
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.importance import FINE_DRAWS, Importance
from attnrewrite.calibration.points import Point, fit_points
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import Distance, StageInput, StageResult, distance
from attnrewrite.calibration.train import Schedule, check_losses, checkpoint, descend, snapshot, training_key
from attnrewrite.calibration.workplace import Demand, Workplace
from attnrewrite.passes.verify import rewritten_sites

SEEN = 5  # times that blocks see an image: where there are too few, each comes moved as well, or they learn it by heart


@dataclass(frozen=True)
class Window:
    """Consecutive points of the student that are trained together; the teacher's branches that end among them, by the
    points' names; and the position in both graphs behind the streams that they end in.
    """

    points: tuple[Point, ...]
    ends: Mapping[str, Branch]
    stop: int


@dataclass(frozen=True)
class Reconstruction:
    """Trains so many `blocks` at a time, in network order: from the student's own stream in front of them they learn to
    give the teacher's streams behind each, where each token counts as much as the teacher's answer depends on it. Then
    the maps that end their branches are fitted again in closed form. (Li et al. 2021, BRECQ, reconstruct the blocks of
    quantised networks so.)

    Interrupted, it goes on from the last blocks that were whole. Where it ends worse on the held-out images than it
    began, nothing is changed.
    """

    steps: int
    rate: float = 3e-3
    blocks: int = 2  # one alone sees less of what follows; all together is distillation
    name: str = "reconstruction"

    def run(self, given: StageInput, before: Distance | None = None) -> StageResult:
        student = given.student
        before, tensors = before or distance(given), snapshot(student)
        points = fit_points(student)
        windows = _windows(given, points, self.blocks)
        ends = [branch.node.name for window in windows for branch in list(window.ends.values())[-1:]]
        seen = self.steps * given.images.batch_size / len(given.images.images)
        times = max(1, round(seen / SEEN))
        asked = Demand(draws=FINE_DRAWS, times=times, choosing_times=times, ends=ends)
        work = Workplace.of(self.name, given, points, asked)
        key = training_key(given, self)
        found = checkpoint(given, self.name, key) or {"windows": 0, "student": tensors}
        student.load_state_dict(found["student"])
        fit, notes = Fit(forms=False, name=self.name), list(found.get("notes", ()))
        passed = 0  # the position behind the last point's stream
        followed = dict(zip((point.name for point in points), points[1:], strict=False))
        with work.opened() as (teacher, own, weights):
            for number, window in list(enumerate(windows))[found["windows"] :]:
                for segments in (teacher, own):
                    segments.advance(passed, own.order[window.points[0].node])
                progress = number * self.steps, len(windows) * self.steps
                if not self._train(given, own, _Target(window, teacher, weights), *progress):
                    notes.append(
                        f"not trained, as that made it worse: {', '.join(point.name for point in window.points)}"
                    )
                for point in window.points:
                    for segments in (teacher, own):
                        segments.advance(passed, own.order[point.node])
                    passed = own.order[point.stream] + 1
                    fit.fit_point(point, followed.get(point.name), teacher, own, weights)
                if given.processes.rank == 0:
                    reached = {"windows": number + 1, "student": student.state_dict(), "notes": notes}
                    given.state.save(self.name, key, reached)
        after = distance(given)
        if after.loss <= before.loss:
            return StageResult(after, tuple(notes))
        student.load_state_dict(tensors)
        return StageResult(before, ("taken back: the held-out images came out no better",))

    def _train(self, given: StageInput, own: Segments, target: "_Target", done: int, total: int) -> bool:
        """Train the window of `target`, which the student stands before, after `done` of `total` steps; whether that
        brought it closer. Where it did not, it is left as it was.
        """
        parameters = _held_alone(own, target.window.stop)
        if not parameters or not target.window.ends:
            return True
        energies = target.energies(given)
        before = self._gap(given, own, target, energies)
        check_losses(self.name, before, rewritten_sites(given.student))
        untrained = [parameter.detach().clone() for parameter in parameters]
        optimizer, schedule = torch.optim.Adam(parameters, lr=self.rate), Schedule(self.steps, self.rate)
        for step, chunk in enumerate(_drawn(own, given, self.steps, done)):
            optimizer.zero_grad()
            for batch in chunk:
                with given.processes.autocast():
                    losses = target.losses(own, batch, energies)
                torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            descend(optimizer, schedule.rate_at(step), given.processes)
            given.report(self.name, done + step + 1, total)
        given.student.zero_grad()
        closer = bool(sum(self._gap(given, own, target, energies).values()) < sum(before.values()))
        if not closer:
            with torch.no_grad():
                for parameter, value in zip(parameters, untrained, strict=True):
                    parameter.copy_(value)
        return closer

    @staticmethod
    @torch.no_grad()
    def _gap(given: StageInput, own: Segments, target: "_Target", energies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The losses of all images together."""
        sums = torch.zeros(len(energies), device=given.processes.device)
        for batch in own.mine:
            sums += torch.stack(list(target.losses(own, batch, energies).values()))
        given.processes.add_up(sums)
        return dict(zip(energies, sums, strict=True))


@dataclass(frozen=True)
class _Target:
    """What the teacher, which stands before the window, has at the ends of the window's branches."""

    window: Window
    teacher: Segments
    weights: Importance

    @torch.no_grad()
    def of(self, batch: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For each branch the stream behind it, and what each element of that counts."""
        ends = self.window.ends
        needs = {node for branch in ends.values() for node in (branch.node, branch.stream, *branch.operands)}
        values = self.teacher.at(batch, self.window.stop, frozenset(needs))
        return {
            name: (values[branch.stream], branch.spread(self.weights.of(branch.node.name, batch), values))
            for name, branch in ends.items()
        }

    def losses(self, student: Segments, batch: int, energies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each branch the weighed squared error of the stream that `student` has there, of the energy."""
        wanted = self.of(batch)
        nodes = {name: student.node(branch.stream.name) for name, branch in self.window.ends.items()}
        values = student.at(batch, self.window.stop, frozenset(nodes.values()))
        return {
            name: ((values[nodes[name]] - stream).square() * weight).sum() / energies[name]
            for name, (stream, weight) in wanted.items()
        }

    def energies(self, given: StageInput) -> dict[str, Tensor]:
        """For each branch the weighed energy of its stream, of a batch and of as many branches as there are."""
        sums = torch.zeros(len(self.window.ends), device=given.processes.device)
        for batch in self.teacher.mine:
            streams = self.of(batch).values()
            sums += torch.stack([(stream.square() * weight).sum().float() for stream, weight in streams])
        given.processes.add_up(sums)
        batches = math.ceil(len(self.teacher.images.images) / given.images.batch_size)
        sums = (sums * (len(sums) / batches)).clamp(min=torch.finfo(sums.dtype).tiny)
        return dict(zip(self.window.ends, sums, strict=True))


def _windows(given: StageInput, points: Sequence[Point], blocks: int) -> list[Window]:
    """The points in windows of so many `blocks`: a site each, with what follows each of them up to the next."""
    order = {node: at for at, node in enumerate(given.student.graph.nodes)}
    ends = {branch.node.name: branch for branch in branches(given.teacher)}
    sites = [number for number, point in enumerate(points) if point.site is not None]
    bounds = [0, *sites[blocks::blocks], len(points)]
    found = []
    for first, last in pairwise(bounds):
        window = tuple(points[first:last])
        stop = max(order[point.stream] for point in window) + 1
        inside = {point.name: ends[point.node.name] for point in window if point.branch is not None}
        found.append(Window(window, inside, stop))
    return found


def _drawn(own: Segments, given: StageInput, steps: int, done: int) -> Iterator[list[int]]:
    """For each step this process' batches: as many images as `given` has in one, whatever memory had room for at once;
    all of them in turns, in an order drawn anew each time.
    """
    chunks: dict[tuple[int, int], list[int]] = {}
    edges = (0, *own.images.parts)
    for batch in own.mine:
        start = own.images.bounds[batch][0]
        edge = max(each for each in edges if each <= start)
        chunks.setdefault((edge, (start - edge) // given.images.batch_size), []).append(batch)
    generator = torch.Generator().manual_seed(given.execution.seed * 1_000_003 + done)
    order: list[list[int]] = []
    for _ in range(steps):
        if not order:
            numbers = torch.randperm(len(chunks), generator=generator).tolist()
            order = [list(chunks.values())[number] for number in numbers] or [[]]
        yield order.pop()


def _held_alone(own: Segments, stop: int) -> list[nn.Parameter]:
    """The parameters that the nodes from here up to `stop` read and no others do."""
    readers: dict[nn.Parameter, list[int]] = {}
    for at, node in enumerate(own.nodes):
        for parameter in _read(own, node):
            readers.setdefault(parameter, []).append(at)
    return [
        parameter
        for parameter, places in readers.items()
        if parameter.requires_grad and all(own.position <= at < stop for at in places)
    ]


def _read(own: Segments, node: Node) -> list[nn.Parameter]:
    """The parameters that one operation reads."""
    if node.op == "call_module":
        return list(own.module.get_submodule(str(node.target)).parameters())
    tensors = [own.weight(operand) for operand in node.all_input_nodes if operand.op == "get_attr"]
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
