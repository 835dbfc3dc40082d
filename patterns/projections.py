"""From the operands of a site back to the parameters that make them, and forward to the map that reads its output."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.axes import LeadAxes, Side
from attnrewrite.patterns.graph import GraphView, Operation, parameters_of
from attnrewrite.patterns.provenance import (
    FILL,
    Provenance,
    Tracer,
    constant_factor,
    coordinates,
    digits,
    layout_of,
    push,
)
from attnrewrite.site import Normalization, Operand, OutputProjection, Projection, Untraced


def is_map(graph: GraphView, operation: Operation) -> bool:
    """A linear map or pointwise convolution whose weights depend on parameters alone."""
    if operation.kind == "linear":
        return len(operation.inputs) > 1 and all(graph.is_constant(weight) for weight in operation.inputs[1:])
    if operation.kind == "conv" and operation.attributes["pointwise"]:
        return all(graph.is_constant(weight) for weight in operation.inputs[1:])
    return False


def _is_convolution(graph: GraphView, operation: Operation) -> bool:
    """A convolution of parameters over more than one token: what projects and shortens the tokens at once."""
    return operation.kind == "conv" and all(graph.is_constant(weight) for weight in operation.inputs[1:])


@dataclass(frozen=True)
class Tracers:
    """Tracers of one graph, each through more than the last: data movement alone; all that keeps positions as well,
    such as normalisation and rotation; the pooling of tokens as well."""

    strict: Tracer
    layout: Tracer
    pooled: Tracer

    def forget(self) -> None:
        """Give back the memory of what was traced: sites share little, and a large model has many."""
        for tracer in (self.strict, self.layout, self.pooled):
            tracer.forget()


def trace_projection(graph: GraphView, tracers: Tracers, side: Side, lead_axes: LeadAxes) -> Projection | Untraced:
    """The projection that makes one operand, directly or through normalisation, rotation and pooling."""
    exact = tracers.strict.trace(side.value)
    direct = _from_map(graph, tracers.strict, side, lead_axes, tracers.strict)
    if isinstance(direct, Projection):
        return direct
    through = [_from_map(graph, tracers.strict, side, lead_axes, tracer) for tracer in (tracers.layout, tracers.pooled)]
    for found in through:
        if isinstance(found, Projection) and len(set(found.rows)) > 1:
            return replace(found, direct=False, factor=1.0)
    return direct if exact.source is None else through[0]


@dataclass(frozen=True)
class _Origin:
    """The map that makes an operand, the BatchNorm behind it if there is one, and which (channel, token) of its result
    each element of the operand is, times `factor`.
    """

    operation: Operation
    normalization: Normalization | None
    channel: np.ndarray
    token: np.ndarray
    factor: float


def _origin(graph: GraphView, strict: Tracer, tracer: Tracer, value: str) -> _Origin | Untraced:
    """The map that makes an operand, through a BatchNorm by stored statistics."""
    traced = tracer.trace(value)
    if len(traced.sources) > 1:
        return Untraced("several-sources", f"it is put together from {len(traced.sources)} tensors")
    operation, normalization = graph.operation(traced.sources[0]), None
    if operation.kind == "norm" and operation.attributes["style"] == "batch":
        before = strict.trace(operation.inputs[0])
        if before.source is None:
            return Untraced("several-sources", "its BatchNorm reads several tensors, or padding")
        channel, _ = strict.coordinates(operation.inputs[0])
        if (np.moveaxis(channel, 1, -1) != np.arange(channel.shape[1])).any():
            return Untraced("mixed-channels", "its BatchNorm normalises other channels than those it projects to")
        normalization = Normalization(**{part: operation.attributes[part] for part in _BATCH_NORM})  # type: ignore[arg-type]
        numbers = np.where(traced.numbers == 0, 0, before.numbers.reshape(-1)[traced.index])
        through_norm = Provenance((before.source,), (0,), numbers, 1.0, ())
        operation = graph.operation(before.source)
    if operation.kind == "constant":
        return Untraced("constant", "it is a learned constant, not a projection of tokens")
    if not (is_map(graph, operation) or _is_convolution(graph, operation)):
        return Untraced("no-projection", f"it comes from {operation.name}, not from a linear map of parameters")
    places = tracer.coordinates(value) if normalization is None else coordinates(graph, through_norm)
    return _Origin(operation, normalization, *places, traced.factor)


def _from_map(
    graph: GraphView, strict: Tracer, side: Side, lead_axes: LeadAxes, tracer: Tracer
) -> Projection | Untraced:
    """The map that makes an operand, as far as `tracer` sees, with the rows and the tokens that the operand takes."""
    origin = _origin(graph, strict, tracer, side.value)
    if isinstance(origin, Untraced):
        return origin
    operation = origin.operation
    channels, tokens = (lead_axes.split(side.lines(each)) for each in (origin.channel, origin.token))
    if lead_axes.axis == "channel":
        channels, tokens = np.swapaxes(channels, 2, 3), np.swapaxes(tokens, 2, 3)
    rows, is_padded = channels.max(axis=(0, 2)), (channels == FILL).any()
    if _is_mixed(channels, rows[None, :, None, :]) or (rows == FILL).any():
        return Untraced("mixed-channels", "different tokens read different channels of its projection")
    place = tokens[:, 0, :, 0]
    if not is_padded and (tokens != place[:, None, :, None]).any():
        return Untraced("mixed-tokens", "different channels read different tokens of its projection")
    if place.shape[0] > 1 and (place == place[:1]).all():
        place = place[:1]
    read = None if is_padded or not is_map(graph, operation) else _input_operand(graph, operation, place)
    return Projection(
        input=read,
        weight=operation.inputs[1],
        bias=operation.inputs[2] if len(operation.inputs) > 2 else None,
        rows=tuple(int(row) for row in rows.reshape(-1)),
        parameters=tuple(p for weight in operation.inputs[1:] for p in parameters_of(graph, weight)),
        transposed=bool(operation.attributes.get("transposed", False)),
        normalization=origin.normalization,
        factor=origin.factor,
        direct=read is not None,
    )


def _is_mixed(channels: np.ndarray, own: np.ndarray) -> bool:
    """Whether some element, padding aside, is of another channel than its `own`."""
    other = channels != own
    return bool(other.any()) and bool((other & (channels != FILL)).any())


_BATCH_NORM = ("weight", "bias", "mean", "variance", "epsilon")


def _input_operand(graph: GraphView, operation: Operation, place: np.ndarray) -> Operand | None:
    """What a map reads, as [batch, 1, tokens, channels]; `place` [batch, tokens] numbers its positions."""
    return _positions_as_operand(graph, operation, operation.inputs[0], place)


def _positions_as_operand(graph: GraphView, operation: Operation, value: str, place: np.ndarray) -> Operand | None:
    shape = graph.shape(value)
    if operation.kind == "conv":
        channels, inner = shape[1], int(np.prod(shape[2:], dtype=int))
        base, step = place // inner * channels * inner + place % inner, inner
    else:
        channels, base, step = shape[-1], place * shape[-1], 1
    layout = layout_of(base[:, None, :, None], shape, graph.batch_axes(value), np.arange(channels) * step)
    return None if isinstance(layout, Refusal) else Operand(value, layout)


Own = Callable[[str], bool]  # whether a value is made of the site's own queries, keys or values


@dataclass(frozen=True)
class _Reached:
    """The map that reads a site's output, the values passed on the way, and whether these only moved the data."""

    operation: Operation
    path: tuple[str, ...]
    direct: bool


def trace_output(graph: GraphView, output: Side, lead_axes: LeadAxes, own: Own) -> OutputProjection | Untraced:
    """The map that reads the heads' outputs, through data movement, activations and normalisation."""
    reached = _follow(graph, output.value, own)
    if isinstance(reached, Untraced):
        return reached
    operation = reached.operation
    numbers = lead_axes.split(output.numbers(graph))
    if lead_axes.axis == "channel":
        numbers = np.swapaxes(numbers, 2, 3)
    images, heads, tokens, width = numbers.shape
    canonical = np.full(numbers.size + 1, FILL, numbers.dtype)  # the last is where FILL points
    canonical[numbers.reshape(-1)] = np.arange(numbers.size, dtype=numbers.dtype)
    read = canonical[push(graph, output.value, reached.path)]
    if operation.kind == "conv":
        read = np.moveaxis(read, 1, -1)
    read = read.reshape(-1, read.shape[-1])
    image, head, token, within = digits(read, heads, tokens, width)
    channel, is_padded = head * width + within, (read == FILL).any()
    if is_padded:
        channel[read == FILL] = FILL
    held = channel.max(axis=0)
    if _is_mixed(channel, held) or sorted(held[held != FILL]) != list(range(heads * width)):
        return Untraced("mixed-output", "the map after it does not read one token's heads at a time")
    columns = np.empty(heads * width, np.int64)
    columns[held[held != FILL]] = np.flatnonzero(held != FILL)
    written = None
    if reached.direct and not is_padded and read.shape == (images * tokens, heads * width):
        written = _written(graph, operation, image * tokens + token, images)
    return OutputProjection(
        output=written,
        weight=operation.inputs[1],
        bias=operation.inputs[2] if len(operation.inputs) > 2 else None,
        columns=tuple(int(c) for c in columns),
        parameters=tuple(p for weight in operation.inputs[1:] for p in parameters_of(graph, weight)),
        transposed=bool(operation.attributes.get("transposed", False)),
        direct=written is not None,
    )


def _written(graph: GraphView, operation: Operation, place: np.ndarray, images: int) -> Operand | None:
    """What a map writes, as [batch, 1, tokens, channels]; `place` [positions, channels] numbers the token of each
    channel that it reads.
    """
    if (place != place[:, :1]).any():
        return None
    order = np.empty(len(place), np.int64)
    order[place[:, 0]] = np.arange(len(place))
    return _positions_as_operand(graph, operation, operation.value, order.reshape(images, -1))


def _follow(graph: GraphView, value: str, own: Own) -> _Reached | Untraced:
    """The nearest linear map that reads a value, on a way of movement, activations and normalisation."""
    pending: list[tuple[str, tuple[str, ...], bool]] = [(value, (), True)]
    seen = {value}
    stopped: Untraced | None = None
    while pending:
        value, path, direct = pending.pop(0)
        users = graph.users(value)
        if len(users) != 1:
            stopped = stopped or Untraced("read-twice", f"its output is read by {len(users)} operations")
            direct = False
        for user in users:
            operation = graph.operation(user)
            if is_map(graph, operation) and operation.inputs[0] == value:
                return _Reached(operation, path, direct)
            factor = constant_factor(graph, operation)
            moved = operation.kind == "move" and value in operation.inputs
            moved_alone = (moved and len(operation.inputs) == 1) or (factor is not None and factor.factor == 1.0)
            if not moved_alone and not moved and not _keeps_positions(graph, operation, value, own):
                what = f"its output passes through {operation.name} before any linear map"
                stopped = stopped or Untraced("no-output-map", what)
            elif user not in seen:
                seen.add(user)
                pending.append((user, (*path, user), direct and moved_alone))
    return stopped or Untraced("no-output-map", "no linear map reads its output")


def _keeps_positions(graph: GraphView, operation: Operation, value: str, own: Own) -> bool:
    """Whether an operation acts on each element, or normalises, with nothing beside `value` but constants and what the
    site itself projects: queries are added to the heads' outputs where they were pooled."""
    if operation.kind not in ("map", "norm") or graph.shape(operation.value) != graph.shape(value):
        return False
    beside = (operand for operand in operation.inputs if operand != value and not graph.is_constant(operand))
    return all(own(operand) for operand in beside)
