"""Which axes are batch, heads, tokens and channels: by where the elements come from, not by permutations."""

from dataclasses import dataclass

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.provenance import FILL, Crossed, Tracer, layout_of, numbered_value
from attnrewrite.site import Operand


def crosses_layout(graph: GraphView, operation: Operation) -> Crossed | None:
    """Operations that keep batch and channel positions: elementwise maps, norms, pooling, depthwise convolutions."""
    if operation.kind == "map":
        shape = graph.shape(operation.value)
        live = [o for o in operation.inputs if not graph.is_constant(o)]
        full = [o for o in live if graph.shape(o) == shape] or [o for o in live if len(graph.shape(o)) == len(shape)]
        return Crossed((full or live or list(operation.inputs))[0]) if operation.inputs else None
    if operation.kind in ("norm", "pool") or (operation.kind == "conv" and operation.attributes["depthwise"]):
        return (
            Crossed(operation.inputs[0])
            if len(graph.shape(operation.inputs[0])) == len(graph.shape(operation.value))
            else None
        )
    return None


def crosses_pooling(graph: GraphView, operation: Operation) -> Crossed | None:
    """What `crosses_layout` crosses, and reductions over tokens: a pooled token counts as the first of its tokens."""
    axes = operation.attributes.get("axes", ())
    if operation.kind == "reduce" and axes and len(graph.shape(operation.inputs[0])) > len(axes):  # type: ignore[arg-type]
        return Crossed(operation.inputs[0])
    return crosses_layout(graph, operation)


@dataclass(frozen=True)
class Coordinates:
    """Channel and token of every element of an operand, arranged as [lead, tokens, channels] of the product."""

    channel: np.ndarray
    token: np.ndarray


@dataclass(frozen=True)
class Side:
    """An operand of a product, or its result, read as [lead, tokens, channels].

    `lead` is the shape of its product's leading axes, `transposed` says that its last two axes are
    [channels, tokens], and `order[l]` is where the entry of score lead l stands among its own (None: in place).
    """

    value: str
    transposed: bool
    lead: tuple[int, ...]
    order: np.ndarray | None = None

    def lines(self, array: np.ndarray) -> np.ndarray:
        """An array of the operand's shape as [lead, tokens, channels], in the order of the scores' lead."""
        if self.transposed:
            array = np.swapaxes(array, -1, -2)
        flat = np.broadcast_to(array, (*self.lead, *array.shape[-2:])).reshape(-1, *array.shape[-2:])
        return flat if self.order is None else flat[self.order]

    def numbers(self, graph: GraphView) -> np.ndarray:
        """The operand's own elements, numbered row-major, as `lines`."""
        return self.lines(numbered_value(graph, self.value))


@dataclass(frozen=True)
class LeadAxes:
    """How the lead axes of the products fold: `lead[b, h]` is the flat lead index of batch entry b and head h."""

    lead: np.ndarray
    kv_heads: int
    axis: str  # "token" or "channel"

    @property
    def batch(self) -> int:
        return int(self.lead.shape[0])

    @property
    def heads(self) -> int:
        return int(self.lead.shape[1])

    def split(self, lines: np.ndarray) -> np.ndarray:
        """[lead, ...] as [batch, heads, ...]: the same elements where they lie so, else a copy."""
        in_place = np.array_equal(self.lead.reshape(-1), np.arange(self.lead.size))
        return lines.reshape(*self.lead.shape, *lines.shape[1:]) if in_place else lines[self.lead]


def split_lead(graph: GraphView, layout: Tracer, query: Side, key: Side, value: Side) -> LeadAxes | Refusal:
    """Tell batch from heads, and tokens from channels, by where the elements of the operands come from."""
    found: dict[str, Coordinates] = {}
    projected: set[str] = set()
    for role, side in (("query", query), ("key", key), ("value", value)):
        if graph.is_constant(side.value):
            continue
        origin = layout.trace(side.value)
        channel, token = layout.coordinates(side.value)
        if all(graph.operation(source).kind in ("linear", "conv") for source in origin.sources):
            projected.add(role)
        found[role] = Coordinates(side.lines(channel), side.lines(token))
    if projected:  # elsewhere the last axis is only a guess at the channels
        found = {role: part for role, part in found.items() if role in projected}
    axis = _attended_axis([found[role] for role in ("query", "key") if role in found])
    for roles in (("query", "key", "value"), ("query", "key"), ("query",), ("key",), ("value",)):
        known = [found[role] for role in roles if role in found]
        if not known:
            continue
        heads = _ranks([key for c in known for key in _extent(c.channel)])
        batch = _ranks([key for c in known for key in _extent(c.token)])
        n_heads, n_batch = int(heads.max()) + 1, int(batch.max()) + 1
        grid = np.full((n_batch, n_heads), -1, np.int64)
        grid[batch, heads] = np.arange(len(heads))
        if n_heads * n_batch == len(heads) and (grid >= 0).all():
            kv = int(_ranks(_extent(found["key"].channel)).max()) + 1 if "key" in found else n_heads
            return LeadAxes(grid, min(kv, n_heads), axis)
    return Refusal("unfolded-heads", "batch and heads could not be told apart")


def is_aligned(graph: GraphView, layout: Tracer, key: Side, value: Side) -> bool:
    """Whether key m and value m come from the same token, as far as their origins tell: False where each lead entry has
    the same tokens of both, in another order.
    """
    of_key, of_value = (_projected(graph, layout, side) for side in (key, value))
    if of_key is None or of_value is None:
        return True
    if of_key.reads == of_value.reads and np.array_equal(of_key.token, of_value.token):
        return True
    keys, values = (_tokens_read(graph, layout, found) for found in (of_key, of_value))
    if keys[0] != values[0] or keys[1].shape != values[1].shape:
        return True
    same_tokens = np.array_equal(np.sort(keys[1]), np.sort(values[1]))
    return not same_tokens or np.array_equal(keys[1], values[1])


@dataclass(frozen=True)
class _Projected:
    """A projection, by its kind and the value that it reads, and the `token` of each element that it makes."""

    kind: str
    reads: str
    token: np.ndarray


def _projected(graph: GraphView, layout: Tracer, side: Side) -> _Projected | None:
    """The projection that makes an operand, where one alone does, of one token each."""
    if graph.is_constant(side.value):
        return None
    origin = layout.trace(side.value)
    operation = graph.operation(origin.sources[0])
    if len(origin.sources) > 1 or not (operation.kind == "linear" or operation.attributes.get("pointwise")):
        return None
    return _Projected(operation.kind, operation.inputs[0], side.lines(layout.coordinates(side.value)[1]))


def _tokens_read(graph: GraphView, layout: Tracer, found: _Projected) -> tuple[tuple[str, ...], np.ndarray]:
    """The tokens [lead, tokens] that a projection reads, and what tensors they are tokens of."""
    before = layout.coordinates(found.reads)[1]
    if found.kind == "conv":
        before = np.moveaxis(before, 1, -1)
    places = before.reshape(-1, before.shape[-1])[:, 0]
    tokens = np.where(found.token == FILL, FILL, places[found.token]).max(axis=2)
    return layout.trace(found.reads).sources, tokens


def _extent(numbers: np.ndarray) -> list[np.ndarray]:
    """Smallest and largest number in each lead entry, padding aside."""
    least, most = numbers.min(axis=(1, 2)), numbers.max(axis=(1, 2))
    if (least == FILL).any():
        least = np.where(numbers == FILL, np.iinfo(numbers.dtype).max, numbers).min(axis=(1, 2))
    return [least, most]


def _ranks(keys: list[np.ndarray]) -> np.ndarray:
    """Each row of keys numbered by order of first appearance."""
    _, first, inverse = np.unique(np.stack(keys), axis=1, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse.reshape(-1)]


def _attended_axis(known: list[Coordinates]) -> str:
    """Token attention sums its scores over channels; channel attention sums them over tokens."""
    for part in known:
        if part.channel.shape[2] > 1 or part.channel.shape[1] > 1:
            along_contraction = len(np.unique(part.channel[0, 0])) > 1
            along_rows = len(np.unique(part.channel[0, :, 0])) > 1
            if along_rows != along_contraction:
                return "channel" if along_rows else "token"
    return "token"


def operand(graph: GraphView, side: Side, lead_axes: LeadAxes) -> Operand | Refusal:
    """The operand with the layout that reads it as [batch, heads, tokens, channels]; shared axes have length one."""
    position = lead_axes.split(side.numbers(graph))
    for axis in (0, 1):
        first = np.take(position, [0], axis=axis)
        if position.shape[axis] > 1 and (position == first).all():
            position = first
    layout = layout_of(position, graph.shape(side.value), graph.batch_axes(side.value))
    return layout if isinstance(layout, Refusal) else Operand(side.value, layout)
