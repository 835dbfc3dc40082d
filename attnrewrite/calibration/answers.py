"""What of a model's output calibration counts, and what the original gives of it for the held-out images.

A classifier's answer is its logits, whatever else it gives. Any other model's is all that follows the images: maps of
features, or queries' classes and their boxes. Each of several counts alike, by how much it differs between images.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.calibration.room import room
from attnrewrite.calibration.store import InMemory, OnDisk, Store, require_disk
from attnrewrite.errors import InputError
from attnrewrite.images.pool import Pool
from attnrewrite.passes.spread import Spread
from attnrewrite.passes.verify import tensors
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.request import Execution

IN_MEMORY = 8  # answers that take at most this part of the room there is wait in memory


@dataclass(frozen=True)
class Answer:
    """Which tensors of a model's output, which has so many `outputs`, count: their places, and what each is scaled by;
    `axes` are those along which they have the images. `logits`: it is one tensor, [images, classes].
    """

    logits: bool
    scales: Mapping[int, float]
    axes: Mapping[int, int]
    outputs: int = 1

    def of(self, output: object) -> Tensor:
        """[images, ...] as it is, where one tensor counts; else all their elements, [images, elements]."""
        return self.among(dict(enumerate(tensors(output))))

    def among(self, given: Mapping[int, Tensor]) -> Tensor:
        """The same of the output's tensors by their places."""
        counted = [given[place].movedim(self.axes[place], 0) for place in self.scales]
        if len(counted) == 1:
            return counted[0] if counted[0].is_floating_point() else counted[0].double()
        return torch.cat(
            [tensor.flatten(1) * scale for tensor, scale in zip(counted, self.scales.values(), strict=True)], 1
        )

    @property
    def note(self) -> str | None:
        """What counts of several outputs, as a sentence; None where there is one."""
        if self.outputs == 1:
            return None
        if self.logits:
            return f"the model is held to its logits, the first of {self.outputs} outputs"
        held = len(self.scales)
        if held == self.outputs:
            return f"the model is held to all of its {held} outputs alike"
        why = "the others do not follow the images, or are not finite"
        return f"the model is held to {held} of its {self.outputs} outputs: {why}"


LOGITS = Answer(True, {0: 1.0}, {0: 0})  # of a classifier that gives nothing else


@dataclass(frozen=True)
class Answers:
    """The original's `answer` to each image of `pool`; an image's has the `shape`, all of them so many `elements`.
    `energy`: the sum of the squared distances from their mean over the images.
    """

    answer: Answer
    pool: Pool
    shape: tuple[int, ...]
    elements: int
    energy: float
    _device: str
    _store: Store

    @classmethod
    def of(
        cls, original: GraphModule, pool: Pool, execution: Execution, device: str, classes: int | None = None
    ) -> "Answers":
        """Run the original over a pool in batches that there is room for. `classes`: how many the labels have.

        Raises:
            InputError: there is one number for all images; or the answers have to wait in temporary files, and the disk
                has no room for them.
        """
        graph = FxGraph(original)
        logits = _are_logits(graph, classes)
        axes = {0: 0} if logits else _axes(graph, pool) or {0: 0}
        if not graph.shape(graph.answers[min(axes)]):
            raise InputError(
                "the model gives one number for all images, and calibration compares what it gives for each: give a "
                "model that answers every image by itself"
            )
        spreads = {place: Spread() for place in axes}
        store: Store | None = None
        for index in range(len(pool)):
            outputs = _outputs(original, pool.batch(index), device)
            held = {place: pool.own(index, outputs[place]) for place in axes}
            needed = sum(tensor.nbytes for tensor in held.values()) * len(pool)
            store = store or _store(needed, execution, device)
            store.put(index, {str(place): tensor for place, tensor in held.items()})
            for place, tensor in held.items():
                spreads[place].add(tensor.movedim(axes[place], 0))
        assert store is not None, "there are images"
        counted = {place: spread for place, spread in spreads.items() if not spread.constant}
        if len(counted) > 1:
            scales = {place: spread.energy**-0.5 for place, spread in counted.items()}
            answer = Answer(False, scales, {place: axes[place] for place in scales}, len(outputs))
            energy = float(len(counted))
        else:
            place = next(iter(counted or axes))
            answer, energy = Answer(logits, {place: 1.0}, {place: axes[place]}, len(outputs)), spreads[place].energy
        elements = sum(spreads[place].elements for place in answer.scales)
        found = cls(answer, pool, tuple(answer.of(outputs).shape[1:]), elements, energy, device, store)
        weakref.finalize(found, store.close)
        return found

    def beside(self, model: GraphModule) -> Iterator[tuple[Tensor, Tensor]]:
        """The original's answers and those of `model`, batch by batch."""
        for index in range(len(self.pool)):
            outputs = _outputs(model, self.pool.batch(index), self._device)
            yield self._kept(index), self.pool.own(index, self.answer.of(outputs))

    @property
    def together(self) -> Tensor:
        """All of them, float64 [images, ...]: for logits, which are small."""
        return torch.cat([self._kept(index) for index in range(len(self.pool))]).double()

    @property
    def variance(self) -> float:
        """The mean square of an element's distance from its mean; never zero."""
        return max(self.energy / self.elements, torch.finfo(torch.float32).tiny)

    def _kept(self, index: int) -> Tensor:
        kept = self._store.get(index, self._device)
        return self.answer.among({int(place): tensor for place, tensor in kept.items()})


@torch.no_grad()
def _outputs(model: GraphModule, inputs: Sequence[Tensor], device: str) -> tuple[Tensor, ...]:
    return tuple(tensors(model(*(each.to(device) for each in inputs))))


def _axes(graph: FxGraph, pool: Pool) -> dict[int, int]:
    """The places of the numbers that follow the images, and the axis of each along which they do."""
    axes = graph.image_axes
    if pool.filled:
        axes = tuple(0 if graph.shape(answer)[:1] == (pool.batch_size,) else None for answer in graph.answers)
    return {
        place: axis
        for place, (axis, answer) in enumerate(zip(axes, graph.answers, strict=True))
        if axis is not None and graph.node(answer).meta["val"].is_floating_point()
    }


def _are_logits(graph: FxGraph, classes: int | None) -> bool:
    """Whether the first output is logits [images, classes]: by the graph, or as the labels are of as many classes."""
    shape = graph.shape(graph.answer)
    if len(shape) != 2 or shape[1] < 2:
        return False
    return shape[1] == classes or graph.gives_logits


def _store(needed: int, execution: Execution, device: str) -> Store:
    """Where so many bytes wait: in temporary files, where they would take much of the memory there is."""
    if needed <= room(execution, device) // IN_MEMORY:
        return InMemory()
    require_disk("measuring the model", needed)
    return OnDisk()
