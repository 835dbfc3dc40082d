"""Tokens that are an image: how many rows and columns, and how many tokens stand before them."""

import numpy as np

from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.relations import ancestors
from attnrewrite.patterns.trace import FILL, Tracer, mixed_radix
from attnrewrite.site import Grid, Projection

_MOST_PREFIX_TOKENS = 32


def find_grid(graph: GraphView, strict: Tracer, query: Projection | None, tokens: int, windows: int) -> Grid | None:
    """The grid behind the tokens of a self-attention, read from the window's layout or from the last feature map."""
    if query is None or query.input is None:
        return None
    if windows > 1:
        return _window_grid(graph, strict, query, tokens)
    found = ancestors(graph, query.input.value)
    for value in found:
        operation, shape = graph.operation(value), graph.shape(value)
        if operation.kind in ("conv", "pool") and len(shape) == 4:
            prefix = tokens - shape[2] * shape[3]
            if prefix == 0 or (
                0 < prefix <= _MOST_PREFIX_TOKENS and _joined_after(graph, tuple(found), tokens, prefix)
            ):
                return Grid(shape[2], shape[3], prefix)
    return None


def _joined_after(graph: GraphView, values: tuple[str, ...], tokens: int, prefix: int) -> bool:
    """Whether some concatenation puts exactly `prefix` tokens before the image's."""
    for value in values:
        operation, shape = graph.operation(value), graph.shape(value)
        if operation.name in ("cat", "concat") and len(shape) == 3 and shape[1] == tokens:
            sizes = [graph.shape(operand)[1] for operand in operation.inputs]
            if sizes[-1] == tokens - prefix and sum(sizes[:-1]) == prefix:
                return True
    return False


def _window_grid(graph: GraphView, strict: Tracer, query: Projection, tokens: int) -> Grid | None:
    assert query.input is not None
    layout = query.input.layout
    index = strict.trace(query.input.value).index
    order = (*layout.batch, *layout.heads, *layout.tokens, *layout.channels)
    first = index.reshape([size if size != -1 else -1 for size in layout.split]).transpose(order)
    line = first.reshape(-1, tokens, first.shape[-1])[0, :, 0]
    if (line == FILL).any():
        return None
    digits = mixed_radix(line - line[0])
    if digits is None or len(digits) != 2 or np.prod([size for size, _ in digits]) != tokens:
        return None
    return Grid(digits[0][0], digits[1][0])
