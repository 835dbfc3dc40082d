"""Tokens that are an image: how many rows and columns, and how many tokens stand before them."""

from functools import partial

import numpy as np

from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.provenance import FILL, Crossed, Provenance, Tracer, mixed_radix
from attnrewrite.patterns.relations import ancestors, batch_size, earlier_of
from attnrewrite.site import Grid, Projection

_MOST_PREFIX_TOKENS = 32
_ROUNDING = frozenset({"quantize", "dequantize", "clamp"})


def find_grid(graph: GraphView, strict: Tracer, query: Projection | None, tokens: int, windows: int) -> Grid | None:
    """The grid behind the tokens of a self-attention: of the window, of a feature map, or of its own rows."""
    if query is None or query.input is None:
        return None
    if windows > 1:
        return _window_grid(graph, strict, query, tokens)
    found = tuple(ancestors(graph, query.input.value))
    for value in found:
        operation, shape = graph.operation(value), graph.shape(value)
        if operation.kind in ("conv", "pool") and len(shape) == 4:
            prefix = tokens - shape[2] * shape[3]
            if _stand_before(graph, found, tokens, prefix):
                moved = _in_other_order(graph, query, value, 1, tokens, prefix)
                return None if moved else Grid(shape[2], shape[3], prefix)
    return _patch_grid(graph, query, tokens, found) or _merged_grid(graph, query, tokens, found)


def _in_other_order(graph: GraphView, query: Projection, source: str, step: int, tokens: int, prefix: int) -> bool:
    """Whether the tokens behind the first `prefix` are known not to be the pixels of a map or the patches `source`, one
    after the other: their elements lie `step` apart there. Where they cannot be followed so far back, nothing is known.
    """
    assert query.input is not None
    behind = Tracer(graph, partial(_same_token, graph)).trace(query.input.value)
    if source not in behind.sources:
        return False
    return bool((np.diff(_first_channel(behind, query, tokens)[prefix:]) != step).any())


def _patch_grid(graph: GraphView, query: Projection, tokens: int, found: tuple[str, ...]) -> Grid | None:
    """The rows and columns of the patches that a picture is cut into, of whose pixels a linear layer makes tokens."""
    tracer, images = Tracer(graph, partial(_in_place, graph)), batch_size(graph)
    for value in reversed(found):  # a picture's own layer is the farthest
        operation, shape = graph.operation(value), graph.shape(value)
        if operation.kind != "linear" or len(shape) < 2 or (len(shape) == 2 and shape[0] % images):
            continue
        rows = shape[-2] if len(shape) > 2 else shape[0] // images  # Gemm takes those of all images
        if _stand_before(graph, found, tokens, prefix := tokens - rows):
            size = _patches(graph, tracer.trace(operation.inputs[0]), rows)
            if size is not None:
                moved = _in_other_order(graph, query, value, shape[-1], tokens, prefix)
                return None if moved else Grid(*size, prefix)
    return None


def _patches(graph: GraphView, pixels: Provenance, patches: int) -> tuple[int, int] | None:
    """How many rows and columns are so many `patches` [..., pixels] of a picture, which lie at regular distances along
    two axes of it that are side by side. A pixel amidst them tells: those at their edges may be padding.
    """
    shape, index = graph.shape(pixels.sources[0]), pixels.index
    if len(pixels.sources) > 1 or len(shape) != 4 or index.ndim < 2:
        return None
    amidst = index.reshape(-1, patches, index.shape[-1])[0, :, index.shape[-1] // 2]
    distances = None if (amidst == FILL).any() else mixed_radix(amidst - amidst[0])
    if distances is None or len(distances) != 2:
        return None
    (rows, down), (columns, right) = distances
    for axis in (1, 2):
        height, width = shape[axis : axis + 2]
        pixel = int(np.prod(shape[axis + 2 :], dtype=int))
        line = width * pixel
        if down % line == right % pixel == 0 and rows * down <= height * line and columns * right <= line:
            return rows, columns
    return None


def _stand_before(graph: GraphView, found: tuple[str, ...], tokens: int, prefix: int) -> bool:
    """Whether so many tokens, or none, stand before those of an image."""
    return prefix == 0 or (0 < prefix <= _MOST_PREFIX_TOKENS and _joined_after(graph, found, tokens, prefix))


def _merged_grid(graph: GraphView, query: Projection, tokens: int, found: tuple[str, ...]) -> Grid | None:
    """The rows and columns of a [..., rows, columns, C] that the tokens are, in order, where a feature map behind it is
    the same picture at another resolution: a stage after merged patches whose window is the whole map.
    """
    assert query.input is not None
    behind = Tracer(graph, partial(_before_rounding, graph)).trace(query.input.value)
    shape = graph.shape(behind.source) if behind.source else ()
    if len(shape) < 4 or shape[-3] * shape[-2] != tokens or (np.diff(behind.index.ravel()) != 1).any():
        return None
    rows, columns = shape[-3:-1]
    maps = [graph.shape(value)[2:] for value in found if graph.operation(value).kind in ("conv", "pool")]
    if any(len(size) == 2 and _is_reduced(size, (rows, columns)) for size in maps):
        return Grid(rows, columns)
    return None


def _is_reduced(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    """Whether one stride makes both sides of `large` those of `small`, padded where it does not divide them."""
    return any(tuple(-(-side // stride) for side in large) == small for stride in range(1, large[0] + 1))


def _joined_after(graph: GraphView, values: tuple[str, ...], tokens: int, prefix: int) -> bool:
    """Whether some concatenation puts exactly `prefix` tokens before the image's, along whichever axis tokens have."""
    for value in values:
        operation, shape = graph.operation(value), graph.shape(value)
        parts = [graph.shape(operand) for operand in operation.inputs]
        if operation.name not in ("cat", "concat") or any(len(part) != len(shape) for part in parts):
            continue
        for axis in range(len(shape) - 1):
            sizes = [part[axis] for part in parts]
            if shape[axis] == sum(sizes) == tokens and sizes[-1] == tokens - prefix:
                return True
    return False


def _window_grid(graph: GraphView, strict: Tracer, query: Projection, tokens: int) -> Grid | None:
    """The rows and columns of each window: as its tokens are taken from a map just before the query, or, like
    MobileViT's patches, once for a whole stack of layers.
    """
    return _rows_of_a_window(strict, query, tokens) or _rows_of_a_window(
        Tracer(graph, partial(_same_token, graph)), query, tokens
    )


def _rows_of_a_window(tracer: Tracer, query: Projection, tokens: int) -> Grid | None:
    assert query.input is not None
    line = _first_channel(tracer.trace(query.input.value), query, tokens)
    if (line == FILL).any():
        return None
    digits = mixed_radix(line - line[0])
    if digits is None or len(digits) != 2 or np.prod([size for size, _ in digits]) != tokens:
        return None
    return Grid(digits[0][0], digits[1][0])


def _first_channel(behind: Provenance, query: Projection, tokens: int) -> np.ndarray:
    """Where the first channel of each token that `query` is projected from comes from, in the first window."""
    assert query.input is not None
    layout = query.input.layout
    order = (*layout.batch, *layout.heads, *layout.tokens, *layout.channels)
    first = behind.index.reshape(layout.split).transpose(order)
    return first.reshape(-1, tokens, first.shape[-1])[0, :, 0]


def _in_place(graph: GraphView, operation: Operation) -> Crossed | None:
    """Back through what leaves each element in its place: norms, roundings within a range, and constants that are added
    or multiplied with.
    """
    if operation.kind == "norm":
        return Crossed(operation.inputs[0])
    if (rounded := _before_rounding(graph, operation)) is not None:
        return rounded
    live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
    return Crossed(live[0]) if operation.name in ("add", "mul") and len(live) == 1 else None


def _same_token(graph: GraphView, operation: Operation) -> Crossed | None:
    """Back through what leaves each token in its place: what leaves each element there, functions of one element, and
    residual sums, where one operand is made from the other.
    """
    if (crossed := _in_place(graph, operation)) is not None:
        return crossed
    live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
    if len({graph.shape(value) for value in (operation.value, *live)}) != 1:
        return None
    if operation.kind == "map" and len(live) == 1:
        return Crossed(live[0])
    kept = earlier_of(graph, *live) if operation.name == "add" and len(live) == 2 else None
    return None if kept is None else Crossed(kept)


def _before_rounding(graph: GraphView, operation: Operation) -> Crossed | None:
    """Back through rounding within a range, and by how much zero is off; also where it is written as
    x + (round(x) - x), for the gradient of x.
    """
    shifted = operation.name == "add" and len(operation.inputs) == 1
    if shifted or operation.name in _ROUNDING:
        return Crossed(operation.inputs[0])
    if operation.name != "add":
        return None
    kept, off = operation.inputs[0], graph.operation(operation.inputs[1])
    while off.name == "identity":
        off = graph.operation(off.inputs[0])
    return Crossed(kept) if off.name == "sub" and off.inputs[1:] == (kept,) else None
