"""Where a fit is at work: images in batches that memory has room for, and where their activations wait."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from attnrewrite.calibration import descent
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.cuts import Cuts
from attnrewrite.calibration.importance import DRAWS, Blocks, Importance, importance
from attnrewrite.calibration.points import Point
from attnrewrite.calibration.processes import fast_products
from attnrewrite.calibration.room import has_room_for, power_of_two, room, sized
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import StageInput
from attnrewrite.calibration.store import InMemory, OnDisk, Store, require_disk
from attnrewrite.images.augment import repeated
from attnrewrite.images.pool import Pool
from attnrewrite.resources import give_back

CHOOSING_SHARE = 5  # one image in five chooses among ridges, and is fitted to with the one that it chose,
LEAST_CHOOSING = 16  # where there are so many
FEW_PIECES = (1, 2, 4)  # to differentiate in, where there is room: all but the last go forwards twice,
ENOUGH = 8  # for so many images at once: fewer take longer
STREAM_AT_ONCE = 2**23  # bytes of a batch's stream on a processor: where an MLP's, four times as many, are more than
# 32 MiB, they come from the system, page by page, at every operation


@dataclass(frozen=True)
class Demand:
    """What is asked of a workplace: so many `streams` of every image's activations, the network differentiated in
    `draws` directions for each image; each image comes so many `times`, those that choose so many `choosing_times`,
    changed but for the first.

    `ends` are the names of the nodes between which the network is trained. None: what each token counts is all that it
    is differentiated for, at once or in a few pieces where there is room for that.
    `once`: every place is fitted once, and then left behind, so that what is read there may be held until then.
    """

    streams: int = 2
    draws: int = DRAWS
    times: int = 1
    choosing_times: int = 1
    ends: Collection[str] | None = None
    once: bool = False


@dataclass(frozen=True)
class Workplace:
    """The images of a fit in batches that memory has room for, and where their activations wait: in memory where they
    take at most half of it, else in temporary files. `holds`: beside them there is room for what a map reads of all
    images, so that it need not be computed once more when the map is fitted.
    """

    given: StageInput
    images: Pool
    on_disk: bool
    draws: int = DRAWS
    pieces: int | None = None
    holds: bool = False

    @classmethod
    def of(cls, what: str, given: StageInput, points: Sequence[Point], asked: Demand = Demand()) -> "Workplace":
        """For `what` fits `points` and asks for so much.

        Raises:
            InputError: memory has no room for one image, or the disk none for all of them.
        """
        pool, device = _divided(given.images, asked.times, asked.choosing_times), given.processes.device
        widest = _widest(given.student, points)
        if device == "cpu" and not pool.filled:
            pool = replace(pool, batch_size=min(pool.batch_size, power_of_two(STREAM_AT_ONCE // max(1, widest))))
        stream = len(pool.images) * widest
        mine = asked.streams * stream // given.processes.size
        on_disk = mine > room(given.execution, device) // 2
        if on_disk:
            require_disk(what, asked.streams * stream)
        read = mine // asked.streams * _widening(points)
        holds = device == "cpu" and asked.once and mine + read <= room(given.execution, device) // 2
        waiting = (0 if on_disk else mine) + (read if holds else 0)
        beside = given.execution, device, _held_bytes(points, stream, len(pool.images)) + waiting
        names = asked.ends or [branch.node.name for branch in branches(given.teacher)]

        def backwards(pieces: int | None) -> Callable[..., object]:
            blocks = Blocks(given.teacher, names, given.answer, asked.draws, pieces)
            return lambda *inputs: blocks.gradients(inputs, 0)

        pieces = None
        if asked.ends is None and given.importance is None and not pool.filled:
            pieces = next((few for few in FEW_PIECES if has_room_for(ENOUGH, pool, backwards(few), *beside)), None)
        images = sized(pool, what, backwards(pieces), *beside)
        size = given.processes.from_owner(images.batch_size, 0)  # all processes have the same batches
        return cls(given, replace(images, batch_size=size), on_disk, asked.draws, pieces, holds)

    def store(self) -> Store:
        return OnDisk() if self.on_disk else InMemory()

    @contextmanager
    def opened(self) -> Iterator[tuple[Segments, Segments, Importance]]:
        """Teacher and student at their beginnings, and what each token counts; products are fast meanwhile."""
        given, processes = self.given, self.given.processes
        with (
            fast_products(),
            closing(self.store()) as energy,
            Segments(given.teacher, self.images, processes, self.store()) as teacher,
            Segments(given.student, self.images, processes, self.store(), self.holds) as student,
        ):
            if given.importance is not None:
                weights = given.importance(self.images)
            else:
                weights = importance(
                    given.teacher, self.images, given.answer, processes, energy, self.draws, self.pieces
                )
            give_back()
            yield teacher, student, weights


def _divided(images: Pool, times: int, choosing_times: int) -> Pool:
    """The images that are fitted to, then those that choose among ridges: each so many times."""
    fitted = count = len(images.images)
    if count // CHOOSING_SHARE >= LEAST_CHOOSING:
        fitted -= count // CHOOSING_SHARE
        if images.filled:  # whole batches: what fills one up would be fitted to and chosen by
            fitted -= fitted % images.batch_size
    parts = [(fitted, times), (count - fitted, choosing_times)] if fitted else [(count, times)]
    together = images.images if times == choosing_times == 1 else repeated(images.images, parts)
    edges = (fitted * times,) if 0 < fitted < count else ()
    return replace(images, images=together, parts=edges, copies=len(together) - count)


def _widest(student: GraphModule, points: Sequence[Point]) -> int:
    """The most bytes of an image's activations that wait before a point."""
    cuts = Cuts(student)
    return max((cuts.live_bytes(at) for at in cuts.between(point.node for point in points)), default=0)


def _widening(points: Sequence[Point]) -> int:
    """How many times the stream's bytes the inputs of a map that is fitted take at most."""
    shapes = [point.branch.weight.shape[:2] for point in points if point.branch is not None]
    return max((-(-max(shape) // min(shape)) for shape in shapes), default=1)


def most_tokens(student: GraphModule, points: Sequence[Point]) -> int:
    """The most tokens of an image that a site among the points has; 0, where there is none."""
    cuts = Cuts(student)
    return max((cuts.elements(point.node) // point.outputs for point in points if point.site is not None), default=0)


def _held_bytes(points: Sequence[Point], stream: int, images: int) -> int:
    """What puts points back, and the most that solving for a map holds, or a search at a site; all activations are
    `stream` bytes.
    """
    solving = [point.branch.solver_bytes for point in points if point.branch is not None]
    searching = [_searching_bytes(point, stream, images) for point in points if point.channels]
    return sum(point.saved_bytes for point in points) + max(*solving, *searching, 0, 0)


def _searching_bytes(point: Point, stream: int, images: int) -> int:
    """What a search at a site holds, which may read all that the map reads that it has reached."""
    width = point.channels if point.reached is None else point.reached.weight.shape[1]
    return descent.held_bytes(width, stream // (4 * point.channels), images)
