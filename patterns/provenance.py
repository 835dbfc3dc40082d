"""Where each element of a tensor comes from: index tensors pushed through data movement.

No permutation is matched literally. The elements of a source are numbered, and the numbers go through the same
reshapes, transposes and slices as the data: the result says which element of the source each element of a tensor is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.resources import require_memory
from attnrewrite.site import Layout

FILL = -1  # an element that no source provides (padding)
_COPIES = 4  # of a value's numbers that are held at a time, as they are moved and compared

Crossing = Callable[[Operation], "Crossed | None"]


@dataclass(frozen=True)
class Crossed:
    """Going back through an operation: the operand that carries the elements, the factor it is multiplied with."""

    operand: str
    factor: float = 1.0


@dataclass(frozen=True)
class Provenance:
    """The elements of a tensor as elements of its sources.

    `numbers` has the tensor's shape; element i of source s is number `offsets[s] + i + 1`, and 0 is padding. `factor`
    is what the elements were multiplied with on the way. `crossed` are the operations that were neither movement nor
    constant factors.
    """

    sources: tuple[str, ...]
    offsets: tuple[int, ...]
    numbers: np.ndarray
    factor: float
    crossed: tuple[str, ...]

    @cached_property
    def index(self) -> np.ndarray:
        """The numbers from 0 on, and FILL for padding."""
        return self.numbers - 1

    @cached_property
    def source(self) -> str | None:
        """The only source, or None when there are several, or padding."""
        return self.sources[0] if len(self.sources) == 1 and self.numbers.all() else None


def numbered(shape: tuple[int, ...], first: int = 0) -> np.ndarray:
    """The elements of a tensor numbered row-major, from `first` on."""
    stop = first + int(np.prod(shape, dtype=int))
    return np.arange(first, stop, dtype=_integer(stop)).reshape(shape)


def numbered_value(graph: GraphView, value: str, first: int = 0) -> np.ndarray:
    """The elements of a value numbered, as `numbered` does. Raises InputError where memory has no room for them."""
    shape = graph.shape(value)
    count = math.prod(shape)
    needed = _COPIES * count * np.dtype(_integer(first + count)).itemsize
    way_out = "give a smaller --input-size, or export the model for a smaller one"
    require_memory(needed, f"{value} has {count:,} elements: following them", way_out)
    return numbered(shape, first)


def _integer(most: int) -> type[np.signedinteger]:
    """The type of numbers up to `most`: scores are many, and half the bytes take half the time."""
    return np.int32 if most < np.iinfo(np.int32).max else np.int64


def digits(numbers: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Row-major numbers as their places along axes of `sizes`, and along one before them; slowest first."""
    found: list[np.ndarray] = []
    for size in reversed(sizes):
        rest = numbers // size  # numpy divides by one number far faster than it takes remainders
        found.insert(0, numbers - rest * size)
        numbers = rest
    return [numbers, *found]


def scalar_operand(graph: GraphView, operation: Operation) -> float | None:
    """The number that stands beside the tensor operand of a binary map, also when it is a one-element constant."""
    if "scalar" in operation.attributes:
        return float(operation.attributes["scalar"])  # type: ignore[arg-type]
    for operand in operation.inputs[1:]:
        if graph.is_constant(operand) and np.prod(graph.shape(operand), dtype=int) == 1:
            return float(graph.constant(operand).reshape(()))
    return None


def constant_factor(graph: GraphView, operation: Operation) -> Crossed | None:
    """The crossing that pure data movement allows: multiplication with a number, change of type, identity."""
    if operation.kind != "map":
        return None
    if operation.name == "identity":
        return Crossed(operation.inputs[0])
    if operation.name == "neg":
        return Crossed(operation.inputs[0], -1.0)
    if operation.name not in ("mul", "div"):
        return None
    number = scalar_operand(graph, operation)
    if number is not None and operation.attributes.get("position", 1) == 1:
        return Crossed(operation.inputs[0], number if operation.name == "mul" else 1.0 / number)
    if operation.name == "mul":
        if number is not None:
            return Crossed(operation.inputs[0], number)
        first = operation.inputs[0]
        if len(operation.inputs) == 2 and graph.is_constant(first) and np.prod(graph.shape(first), dtype=int) == 1:
            return Crossed(operation.inputs[1], float(graph.constant(first).reshape(())))
    return None


class Tracer:
    """Traces values of one graph back to where `crossing` stops. Results are remembered by value, until `forget`.

    `beneath` traces through less: where this one goes no further, its results are taken.
    """

    def __init__(self, graph: GraphView, crossing: Crossing | None = None, beneath: "Tracer | None" = None) -> None:
        self._graph = graph
        self._crossing = crossing
        self._beneath = beneath
        self._memory: dict[str, Provenance] = {}
        self._coordinates: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def forget(self) -> None:
        """Give back the memory of all results."""
        self._memory.clear()
        self._coordinates.clear()

    def trace(self, value: str) -> Provenance:
        if value not in self._memory:
            found = None if self._beneath is None else self._beneath.trace(value)
            if found is None or any(map(self._goes_on, found.sources)):
                found = self._trace(value)
            self._memory[value] = found
        return self._memory[value]

    def coordinates(self, value: str) -> tuple[np.ndarray, np.ndarray]:
        """The `coordinates` of what a value is traced to, remembered with it."""
        found = self.trace(value)
        if self._beneath is not None and self._beneath.trace(value) is found:
            return self._beneath.coordinates(value)
        if value not in self._coordinates:
            self._coordinates[value] = coordinates(self._graph, found)
        return self._coordinates[value]

    def _goes_on(self, source: str) -> bool:
        """Whether a trace that ended at `source` might end elsewhere here, as where parts were scaled unlike."""
        operation = self._graph.operation(source)
        return operation.kind == "move" or self._crossing is None or self._crossing(operation) is not None

    def _trace(self, value: str) -> Provenance:
        operation = self._graph.operation(value)
        if operation.kind == "move" and operation.inputs and not operation.attributes.get("directed_by"):
            return self._through_movement(operation)
        crossed = constant_factor(self._graph, operation)
        if crossed is not None:
            inner = self.trace(crossed.operand)
            numbers = self._broadcast(inner.numbers, value)
            return Provenance(inner.sources, inner.offsets, numbers, inner.factor * crossed.factor, inner.crossed)
        crossed = self._crossing(operation) if self._crossing else None
        if crossed is not None:
            inner = self.trace(crossed.operand)
            return Provenance(
                inner.sources,
                inner.offsets,
                self._broadcast(inner.numbers, value),
                inner.factor * crossed.factor,
                (*inner.crossed, value),
            )
        return self._itself(value)

    def _itself(self, value: str) -> Provenance:
        return Provenance((value,), (0,), numbered_value(self._graph, value, first=1), 1.0, ())

    def _broadcast(self, numbers: np.ndarray, value: str) -> np.ndarray:
        """Numbers of an operand as those of the result: broadcast, or nearest where positions were pooled."""
        shape = self._graph.shape(value)
        operation = self._graph.operation(value)
        if operation.kind == "reduce":
            for axis in operation.attributes["axes"]:  # type: ignore[attr-defined]
                numbers = np.take(numbers, [0], axis=axis)
            return numbers.reshape(shape)
        if numbers.shape == shape:
            return numbers
        if numbers.ndim == len(shape) and operation.kind != "map":
            for axis in range(len(shape)):  # files that were optimised resize pictures that lie channels last, too
                steps = np.arange(shape[axis]) * numbers.shape[axis] // max(shape[axis], 1)
                numbers = np.take(numbers, steps, axis=axis)
            return numbers
        return np.broadcast_to(numbers, shape)

    def _through_movement(self, operation: Operation) -> Provenance:
        inner = [self.trace(operand) for operand in operation.inputs]
        carriers = [p for o, p in zip(operation.inputs, inner, strict=True) if not self._graph.is_constant(o)]
        if len({p.factor for p in carriers}) != 1:  # none, or parts scaled unlike: the trace ends here
            return self._itself(operation.value)
        offsets: dict[str, int] = {}
        total = 0
        for provenance in inner:
            for source in provenance.sources:
                if source not in offsets:
                    offsets[source] = total
                    total += int(np.prod(self._graph.shape(source), dtype=int))
        arrays = [self._renumber(p, offsets, _integer(total)) for p in inner]
        numbers = self._graph.move(operation.value, arrays)
        crossed = tuple(dict.fromkeys(value for p in inner for value in p.crossed))
        return Provenance(tuple(offsets), tuple(offsets.values()), numbers, carriers[0].factor, crossed)

    @staticmethod
    def _renumber(provenance: Provenance, offsets: dict[str, int], kind: type[np.signedinteger]) -> np.ndarray:
        numbers = provenance.numbers.astype(kind, copy=False)
        if len(provenance.sources) == 1:
            shift = offsets[provenance.sources[0]] - provenance.offsets[0]
            return np.where(numbers == 0, 0, numbers + shift) if shift else numbers
        result = numbers.copy()
        bounds = [*provenance.offsets[1:], np.iinfo(kind).max]
        for source, low, high in zip(provenance.sources, provenance.offsets, bounds, strict=True):
            result[(numbers > low) & (numbers <= high)] += offsets[source] - low
        return result


def coordinates(graph: GraphView, provenance: Provenance) -> tuple[np.ndarray, np.ndarray]:
    """(channel, token) numbers of each element: its place along the source's channel axis, and along all others."""
    if provenance.source is not None:
        return _places(graph, provenance.source, provenance.index)
    channel = np.full(provenance.index.shape, FILL, np.int64)
    token = np.full(provenance.index.shape, FILL, np.int64)
    ends = [*provenance.offsets[1:], np.iinfo(np.int64).max]
    tokens_before = 0
    for source, low, high in zip(provenance.sources, provenance.offsets, ends, strict=True):
        part = (provenance.index >= low) & (provenance.index < high)
        channel[part], local_token = _places(graph, source, provenance.index[part] - low)
        token[part] = tokens_before + local_token
        tokens_before += int(np.prod(graph.shape(source), dtype=int))
    return channel, token


def _places(graph: GraphView, source: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(channel, token) of elements of one source, by their row-major numbers."""
    shape = graph.shape(source)
    axis = channel_axis(graph.operation(source), len(shape))
    inner = int(np.prod(shape[axis + 1 :], dtype=int))
    if inner == 1:
        token, channel = digits(numbers, shape[axis])
        return channel, token
    outer, channel, within = digits(numbers, shape[axis], inner)
    return channel, outer * inner + within


def channel_axis(operation: Operation, rank: int) -> int:
    """The axis that holds the features an operation has just made."""
    of_images = operation.kind in ("conv", "pool") or operation.attributes.get("style") in _OVER_IMAGES
    return min(1, rank - 1) if of_images else rank - 1


_OVER_IMAGES = frozenset({"batch", "batch_statistics", "group_norm", "native_group_norm"})


def push(graph: GraphView, source: str, path: tuple[str, ...]) -> np.ndarray:
    """The numbered elements of `source` after the movements, casts and position-keeping maps of `path`, in order."""
    index = numbered_value(graph, source, first=1)  # on the way, as movement fills up with zeros
    known = {source: index}
    for value in path:
        operation = graph.operation(value)
        if operation.kind == "move":
            index = graph.move(value, [_carried(graph, known, operand) for operand in operation.inputs])
        elif index.shape != graph.shape(value):
            index = np.broadcast_to(index, graph.shape(value))
        known[value] = index
    return index - 1


def _carried(graph: GraphView, known: dict[str, np.ndarray], value: str) -> np.ndarray:
    """The numbers that a value carries, directly or through data movement of what is known; 0 where it has none."""
    if value in known:
        return known[value]
    operation = graph.operation(value)
    if operation.kind == "move" and not graph.is_constant(value):
        return graph.move(value, [_carried(graph, known, operand) for operand in operation.inputs])
    return np.zeros(graph.shape(value), np.int32)


def layout_of(
    position: np.ndarray, shape: tuple[int, ...], batch_axes: frozenset[int], channels: np.ndarray | None = None
) -> Layout | Refusal:
    """The layout under which a tensor of `shape` reads as `position`; a refusal where no reshape and permutation do.

    `position` [batch, heads, tokens, channels] holds, for every element, its row-major number in the tensor. Where
    `channels` says how far each channel lies from the first, it is that of the first alone: [batch, heads, tokens, 1].
    """
    factors: list[tuple[int, int, int]] = []  # (stride, size, group), one per split axis
    groups: list[list[tuple[int, int]]] = []
    origin = position[(0,) * position.ndim]
    lines = [
        position[tuple(slice(None) if axis == group else 0 for axis in range(position.ndim))] - origin
        for group in range(position.ndim)
    ]
    for group, line in enumerate(lines if channels is None else [*lines[:-1], channels]):
        radix = mixed_radix(line)
        if radix is None:
            return Refusal("not-strided", "its elements do not lie at regular distances")
        groups.append(radix)
        factors += [(stride, size, group) for size, stride in radix]
    factors.sort(reverse=True)
    split = tuple(size for _, size, _ in factors)
    strides = [int(np.prod(split[i + 1 :], dtype=int)) for i in range(len(split))]
    if [stride for stride, _, _ in factors] != strides or np.prod(split, dtype=int) != np.prod(shape, dtype=int):
        return Refusal("not-whole", "its elements are not all those of the tensor, each once")
    axes = {(stride, group): axis for axis, (stride, _, group) in enumerate(factors)}
    order = [tuple(axes[stride, group] for _, stride in radix) for group, radix in enumerate(groups)]
    if not _is_sum(position, lines):
        return Refusal("not-a-view", "no reshape and permutation arrange its elements so")
    marked = _mark_batch(split, shape, batch_axes, order[0])
    if marked is None:
        return Refusal("batch-inside", "the axis that follows the batch is no batch axis of the attention")
    return Layout(*marked, *order)


def _is_sum(position: np.ndarray, lines: list[np.ndarray]) -> bool:
    """Whether each element is the sum of a number for its place on each axis; compared plane by plane, as there may be
    as many as scores.
    """
    plane = np.add.outer(*lines[-2:])
    begins = reduce(np.add.outer, lines[:-2])
    return all(np.array_equal(position[place], plane + begins[place]) for place in np.ndindex(begins.shape))


def mixed_radix(line: np.ndarray) -> list[tuple[int, int]] | None:
    """(size, stride) of the digits, slowest first, with line[i] = sum of digit(i) * stride; None if there are none."""
    digits: list[tuple[int, int]] = []
    while len(line) > 1:
        stride = int(line[1])
        if stride <= 0:
            return None
        steps = line == np.arange(len(line)) * stride
        size = len(line) if steps.all() else int(np.argmin(steps))
        if len(line) % size:
            return None
        digits.insert(0, (size, stride))
        line = line[::size]
    return digits


def _mark_batch(
    split: tuple[int, ...], shape: tuple[int, ...], batch_axes: frozenset[int], batch: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape, split) with -1 where the batch size goes: the slowest batch digit of the axis that follows the batch."""
    if not batch_axes:
        return shape, split
    if len(batch_axes) > 1:
        return None
    (axis,) = batch_axes
    low = int(np.prod(shape[:axis], dtype=int))
    high = low * shape[axis]
    passed = np.cumprod((1, *split))
    inside = [place for place in batch if low <= passed[place] < high]
    if not inside:
        return None
    return (
        tuple(-1 if i == axis else size for i, size in enumerate(shape)),
        tuple(-1 if i == inside[0] else size for i, size in enumerate(split)),
    )
