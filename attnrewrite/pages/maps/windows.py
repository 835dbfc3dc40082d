"""Where the tokens of windowed attention lie in the image: the graph's own partition, shifts and padding included."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from attnrewrite.patterns.graph import ComputedConstants, GraphView
from attnrewrite.patterns.provenance import FILL, Tracer, mixed_radix
from attnrewrite.site import AttentionSite, Operand, Projection

OFF = -1  # a token that is padding


@dataclass(frozen=True)
class WindowPlaces:
    """`place` [windows, tokens] numbers each token's place on `rows` x `columns`, row by row; OFF where it is padding.

    `first` are the windows of the first image among all that are folded into the batch.
    """

    rows: int
    columns: int
    place: np.ndarray
    first: np.ndarray

    def lay_out(self, values: np.ndarray) -> np.ndarray:
        """Numbers of every token, [windows, maps, tokens], on the image: [maps, rows, columns]."""
        image = np.zeros((values.shape[1], self.rows * self.columns), values.dtype)
        on = self.place != OFF
        image[:, self.place[on]] = values.transpose(1, 0, 2)[:, on]
        return image.reshape(-1, self.rows, self.columns)


def window_places(graph: GraphView, site: AttentionSite) -> WindowPlaces | str:
    """Where the site's windows lie, or why that is unknown (a clause that says what the site does).

    An index tensor goes the way of the tokens, from the feature map through rolls, padding and partition.
    """
    operand = _tokens(site)
    if operand is None:
        return "attends in windows whose tokens cannot be followed back to the image"
    behind = Tracer(cast(GraphView, ComputedConstants(graph))).trace(operand.value)
    layout = operand.layout
    folded = behind.index.reshape(layout.split).transpose(layout.order)
    groups = (layout.batch, layout.heads, layout.tokens, layout.channels)
    index = folded.reshape([layout.count(axes) for axes in groups])[:, 0, :, 0]
    if len(behind.sources) != 1 or len(index) % site.windows or index.shape[1] != site.n_queries:
        return "attends in windows whose tokens come from more than one tensor"
    shape = graph.shape(behind.sources[0])
    there = index != FILL
    axes = np.unravel_index(np.where(there, index, 0), shape)
    batch = min(graph.batch_axes(behind.sources[0]), default=0)
    first = np.flatnonzero((axes[batch] == 0).all(1))
    spread = [axis for axis in range(len(shape)) if axis != batch and len(np.unique(axes[axis][there])) > 1]
    grid = _grid([shape[axis] for axis in spread], index, there)
    if grid is None or len(first) != site.windows:
        return "attends in windows, and the graph does not show how they lie in the image"
    rows, columns = grid
    place = axes[spread[0]] if len(spread) == 1 else axes[spread[0]] * columns + axes[spread[1]]
    place = np.where(there, place, OFF)[first]
    if not np.array_equal(np.sort(place[place != OFF]), np.arange(rows * columns)):
        return "attends in windows that overlap, or leave out a part of the image"
    return WindowPlaces(rows, columns, place, first)


def _tokens(site: AttentionSite) -> Operand | None:
    """What the queries are made of, or the queries themselves."""
    if isinstance(site.query, Projection) and site.query.input is not None:
        return site.query.input
    return site.core.query if site.core is not None else None


def _grid(sizes: list[int], index: np.ndarray, there: np.ndarray) -> tuple[int, int] | None:
    """Rows and columns of the places that the tokens are spread over: two axes, or one that a window is a square of."""
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    whole = index[there.all(1)]
    if len(sizes) != 1 or not len(whole):
        return None
    digits = mixed_radix(whole[0] - whole[0].min())
    if digits is None or len(digits) != 2 or digits[0][1] % digits[1][1]:
        return None
    columns = digits[0][1] // digits[1][1]
    return (sizes[0] // columns, columns) if sizes[0] % columns == 0 else None
