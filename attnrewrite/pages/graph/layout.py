"""Where boxes and the lines between them go: layers from top to bottom, few crossings, straight main roads.

The usual three steps (Sugiyama, Tagawa & Toda 1981): layers by longest path, order within a layer by the mean place of
the neighbours, then places by least squares that keep order and distance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP, LAYER_GAP, MARGIN = 24.0, 34.0, 16.0
_ORDER_SWEEPS, _PLACE_SWEEPS = 6, 10
_BOX, _BEND = 6.0, 1.0  # how hard a box and a bend of a line pull at their neighbours


@dataclass(frozen=True)
class Line:
    """From `source` to `user` (places of boxes): `d` is an SVG path."""

    source: int
    user: int
    d: str


@dataclass(frozen=True)
class Layout:
    """Left upper corners of the boxes in the order given, the lines, and the size of the whole."""

    places: tuple[tuple[float, float], ...]
    lines: tuple[Line, ...]
    width: float
    height: float


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Places for boxes of the given (width, height), producers above users. `edges` have no cycle."""
    layers = _layers(len(sizes), edges)
    # A line that passes layers has a bend in each; all lines of one source share them.
    bends = {(source, layer) for source, user in edges for layer in range(layers[source] + 1, layers[user])}
    number = {bend: len(sizes) + place for place, bend in enumerate(sorted(bends))}
    widths = [width for width, _ in sizes] + [0.0] * len(bends)
    layer_of = [*layers, *(layer for _, layer in sorted(bends))]
    routes = {
        (source, user): [source, *(number[source, layer] for layer in range(layers[source] + 1, layers[user])), user]
        for source, user in edges
    }
    above: list[set[int]] = [set() for _ in widths]
    below: list[set[int]] = [set() for _ in widths]
    for route in routes.values():
        for first, second in pairwise(route):
            below[first].add(second)
            above[second].add(first)
    rows = _ordered(layer_of, above, below)
    centres = _placed(rows, widths, above, below, len(sizes))
    heights = [max((sizes[each][1] for each in row if each < len(sizes)), default=0.0) for row in rows]
    tops = [MARGIN + sum(heights[:layer]) + LAYER_GAP * layer for layer in range(len(rows))]
    places = tuple(
        (centres[box] - sizes[box][0] / 2, tops[layers[box]] + (heights[layers[box]] - sizes[box][1]) / 2)
        for box in range(len(sizes))
    )
    lines = tuple(
        Line(*pair, _path(route, centres, places, sizes, tops, heights, layer_of)) for pair, route in routes.items()
    )
    width = max((x + size[0] for (x, _), size in zip(places, sizes, strict=True)), default=0.0)
    width = max([width, *centres]) + MARGIN
    return Layout(places, lines, width, (tops[-1] + heights[-1] if rows else 0.0) + MARGIN)


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """One layer below the lowest producer; what has none stands right above its first user."""
    users: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for source, user in edges:
        users[source].append(user)
        waiting[user] += 1
    layers, order = [0] * count, [box for box in range(count) if not waiting[box]]
    sources = list(order)
    for box in order:
        for user in users[box]:
            layers[user] = max(layers[user], layers[box] + 1)
            waiting[user] -= 1
            if not waiting[user]:
                order.append(user)
    for box in sources:
        layers[box] = min((layers[user] - 1 for user in users[box]), default=0)
    lowest = min(layers, default=0)
    return [layer - lowest for layer in layers]


def _ordered(layer_of: list[int], above: list[set[int]], below: list[set[int]]) -> list[list[int]]:
    """Each layer's boxes and bends from left to right."""
    rows: list[list[int]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for each, layer in enumerate(layer_of):
        rows[layer].append(each)
    place = {each: float(number) for row in rows for number, each in enumerate(row)}
    for sweep in range(_ORDER_SWEEPS):
        beside = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(key=lambda each: _mean([place[other] for other in beside[each]], place[each]))
            place |= {each: float(number) for number, each in enumerate(row)}
    return rows


def _placed(
    rows: list[list[int]], widths: list[float], above: list[set[int]], below: list[set[int]], boxes: int
) -> list[float]:
    """The x of every centre."""
    centres = [0.0] * len(widths)
    for row in rows:
        for place, each in zip(_apart([0.0] * len(row), [1.0] * len(row), [widths[e] for e in row]), row, strict=True):
            centres[each] = place
    for sweep in range(_PLACE_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for each in row:
                pull = [(centres[o], _BOX if o < boxes and each < boxes else _BEND) for o in above[each] | below[each]]
                total = sum(weight for _, weight in pull)
                wanted.append(sum(x * weight for x, weight in pull) / total if pull else centres[each])
            weights = [_BOX if each < boxes else _BEND for each in row]
            for place, each in zip(_apart(wanted, weights, [widths[e] for e in row]), row, strict=True):
                centres[each] = place
    left = min((centre - width / 2 for centre, width in zip(centres, widths, strict=True)), default=0.0)
    return [centre - left + MARGIN for centre in centres]


def _apart(wanted: list[float], weights: list[float], widths: list[float]) -> list[float]:
    """The centres nearest to `wanted` that keep the order and the gaps: isotonic regression on what is left over."""
    offsets, offset = [], 0.0
    for number, width in enumerate(widths):
        offset += 0 if number == 0 else (widths[number - 1] + width) / 2 + GAP
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        pools.append((want - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, w1, n1), (second, w2, n2) = pools[-2:]
            pools[-2:] = [((first * w1 + second * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    free = [mean for mean, _, members in pools for _ in range(members)]
    return [start + offset for start, offset in zip(free, offsets, strict=True)]


def _path(
    route: list[int],
    centres: list[float],
    places: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    tops: list[float],
    heights: list[float],
    layer_of: list[int],
) -> str:
    """From the lower edge of the first box, past the bends, to the upper edge of the last."""
    first, last = route[0], route[-1]
    x, y = centres[first], places[first][1] + sizes[first][1]
    d = [f"M{x:.0f} {y:.0f}"]
    for each in route[1:]:
        top = places[last][1] if each == last else tops[layer_of[each]]
        middle = (y + top) / 2
        d.append(f"C{x:.0f} {middle:.0f} {centres[each]:.0f} {middle:.0f} {centres[each]:.0f} {top:.0f}")
        x, y = centres[each], top
        if each != last:
            y = top + heights[layer_of[each]]
            d.append(f"V{y:.0f}")
    return "".join(d)


def _mean(numbers: list[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise
