"""A model's graph as few boxes: each attention site one, each near miss one, and the rest in runs by module.

A graph of thousands of operators is read by nobody. Boxes follow the module paths, cut only where a box would
otherwise both feed another and read from it: the boxes' own graph has no cycle, so that it can be drawn from top to
bottom.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from attnrewrite.pages.graph.region import site_values
from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import Scan

BoxKind = Literal["input", "run", "site", "miss", "output"]
Label = tuple[BoxKind, str | int]

_BOXES_WANTED = 40  # a module with more than this share of the operators is shown as its parts
_FEW = 4  # parts with fewer operators stay with their module
_LEAST = 32  # modules of so few operators are not taken apart
_WEIGHTY = frozenset({"linear", "conv", "matmul", "sdpa", "softmax", "other"})


@dataclass(frozen=True)
class Box:
    """Values of the graph that are drawn as one. `about` is the place of its site or near miss in the scan.

    `values` are in graph order, with the constants that they read; the box of the model's results has none. `name` is
    the module path that most of them were computed in, or "".
    """

    kind: BoxKind
    name: str
    values: tuple[str, ...]
    about: int | None = None


@dataclass(frozen=True)
class BoxGraph:
    """Boxes in an order in which producers come before users, and (producer, user) pairs of their places."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def box_graph(graph: GraphView, found: Scan) -> BoxGraph:
    """Every value of the graph (as `shown`) in exactly one box; the extra one, last, stands for the model's results."""
    live = [value for value in graph.values if not graph.is_constant(value)]
    labels = _labels(graph, found, live)
    sorter = _Sorter()
    for value in live:
        sorter.put(value, labels[value], _read(graph, value))
    return _finished(graph, found, _without_light_runs(graph, sorter), sorter.labels)


def _read(graph: GraphView, value: str) -> tuple[str, ...]:
    """What a value is computed from, the data that directs a movement included."""
    operation = graph.operation(value)
    return (*operation.inputs, *operation.attributes.get("directed_by", ()))  # type: ignore[misc]


def _labels(graph: GraphView, found: Scan, live: list[str]) -> dict[str, Label]:
    """For each live value the box that it would go to, were there no order to keep."""
    labels: dict[str, Label] = {}
    known = set(live)
    for number, miss in enumerate(found.near_misses):
        labels |= {value: ("miss", number) for value in miss.nodes if value in known and value not in labels}
    for number, site in enumerate(found.sites):
        labels |= {value: ("site", number) for value in site_values(graph, site) if value not in labels}
    rest = [value for value in live if value not in labels]
    inputs = [value for value in rest if graph.operation(value).kind == "input"]
    labels |= {value: ("input", value) for value in inputs}
    paths = module_paths([(value, graph.scope(value)) for value in rest if value not in labels])
    return labels | {value: ("run", path) for value, path in paths.items()}


def module_paths(scopes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """For each (value, module path), as much of the path as leaves boxes of a readable size."""
    split = {value: tuple(part for part in path.split(".") if part) for value, path in scopes}
    counts = Counter(path[:depth] for path in split.values() for depth in range(len(path) + 1))
    most = max(_LEAST, len(split) // _BOXES_WANTED)
    return {value: ".".join(_cut(path, counts, most)) for value, path in split.items()}


def _cut(path: tuple[str, ...], counts: Counter[tuple[str, ...]], most: int) -> tuple[str, ...]:
    depth = 0
    while depth < len(path) and counts[path[:depth]] > most and counts[path[: depth + 1]] >= _FEW:
        depth += 1
    return path[:depth]


class _Sorter:
    """Boxes while they fill. `before` holds, for each box, every box that it depends on, as the bits of a number."""

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self.values: list[list[str]] = []
        self.before: list[int] = []
        self.owner: dict[str, int] = {}
        self._latest: dict[Label, int] = {}

    def put(self, value: str, label: Label, read: Iterable[str]) -> None:
        """Into the latest box of the label, or a new one where that box would come to depend on itself."""
        sources = {self.owner[operand] for operand in read if operand in self.owner}
        box = self._latest.get(label)
        if box is None or any(source != box and self.before[source] >> box & 1 for source in sources):
            box = self._latest[label] = len(self.labels)
            self.labels.append(label)
            self.values.append([])
            self.before.append(0)
        self.owner[value] = box
        self.values[box].append(value)
        gained = 0
        for source in sources - {box}:
            gained |= self.before[source] | 1 << source
        if gained & ~self.before[box]:
            for other, before in enumerate(self.before):
                if other == box or before >> box & 1:
                    self.before[other] = before | gained


def _without_light_runs(graph: GraphView, sorter: _Sorter) -> dict[str, int]:
    """The box of each value, once runs without a product have joined the one run that alone feeds them, if one does.

    Mostly it is the norm before a site, which goes to the block before. No way round can lead from a box to its only
    source, so that no cycle comes of it.
    """
    sources: list[set[int]] = [set() for _ in sorter.labels]
    for value, box in sorter.owner.items():
        sources[box] |= {sorter.owner[o] for o in _read(graph, value) if o in sorter.owner} - {box}
    into = list(range(len(sources)))

    def root(box: int) -> int:
        return box if into[box] == box else root(into[box])

    for box, (kind, _) in enumerate(sorter.labels):
        feeding = {root(source) for source in sources[box]}
        if kind != "run" or len(feeding) != 1 or any(graph.operation(v).kind in _WEIGHTY for v in sorter.values[box]):
            continue
        (only,) = feeding
        if sorter.labels[only][0] == "run":
            into[box] = only
    return {value: root(box) for value, box in sorter.owner.items()}


def _finished(graph: GraphView, found: Scan, owner: dict[str, int], labels: list[Label]) -> BoxGraph:
    """The boxes in order, constants with what reads them, and the results."""
    edges = {(owner[o], owner[v]) for v in owner for o in _read(graph, v) if o in owner and owner[o] != owner[v]}
    order = _sorted(list(dict.fromkeys(owner.values())), edges)
    place = {box: number for number, box in enumerate(order)}
    everywhere = {value: place[box] for value, box in _with_constants(graph, owner).items()}
    values: list[list[str]] = [[] for _ in order]
    for value in graph.values:
        if value in everywhere:
            values[everywhere[value]].append(value)
    anchors = _anchors(graph, found)
    boxes = [_box(graph, labels[box], tuple(own), anchors) for box, own in zip(order, values, strict=True)]
    results = {place[owner[v]] for v in owner if _is_result(graph, v)}
    pairs = sorted((place[a], place[b]) for a, b in edges)
    return BoxGraph((*boxes, Box("output", "", ())), (*pairs, *((result, len(boxes)) for result in sorted(results))))


def _anchors(graph: GraphView, found: Scan) -> dict[Label, str]:
    """For each site and near miss the value that its box is known by, should its values not fit into one box."""
    anchors: dict[Label, str] = {}
    for number, miss in enumerate(found.near_misses):
        if miss.nodes:
            anchors["miss", number] = miss.nodes[-1]
    for number, site in enumerate(found.sites):
        fused = [value for value in site.nodes if graph.operation(value).kind in ("softmax", "sdpa")]
        anchors["site", number] = fused[-1]
    return anchors


def _box(graph: GraphView, label: Label, values: tuple[str, ...], anchors: dict[Label, str]) -> Box:
    kind, key = label
    if kind == "input":
        return Box(kind, str(key), values)
    if kind == "run":
        return Box(kind, str(key) or _most_common_scope(graph, values), values)
    if label in anchors and anchors[label] not in values:
        return Box("run", _most_common_scope(graph, values), values)
    return Box(kind, _most_common_scope(graph, values), values, int(key))


def _most_common_scope(graph: GraphView, values: tuple[str, ...]) -> str:
    paths = Counter(graph.scope(value) for value in values if not graph.is_constant(value))
    return paths.most_common(1)[0][0] if paths else ""


def _is_result(graph: GraphView, value: str) -> bool:
    return any(graph.operation(user).name == "output" for user in graph.users(value))


def _with_constants(graph: GraphView, owner: dict[str, int]) -> dict[str, int]:
    """Constants beside what first reads them; those that only sizes are made of, with what is computed next."""
    complete = dict(owner)
    following = next(reversed(owner.values()), 0)
    readers: dict[str, str] = {}
    for value in graph.values:
        for operand in graph.operation(value).inputs:
            readers.setdefault(operand, value)
    for value in reversed(graph.values):
        if value not in complete:
            users = (readers.get(value), *graph.users(value))
            complete[value] = next((complete[user] for user in users if user in complete), following)  # type: ignore[index]
        following = complete[value]
    return complete


def _sorted(boxes: list[int], edges: set[tuple[int, int]]) -> list[int]:
    """Producers before users; among those that are ready, the one found first in the graph."""
    waiting = Counter(user for _, user in edges)
    users: dict[int, list[int]] = {}
    for source, user in edges:
        users.setdefault(source, []).append(user)
    rank = {box: number for number, box in enumerate(boxes)}
    ready = [rank[box] for box in boxes if not waiting[box]]
    heapq.heapify(ready)
    order = []
    while ready:
        box = boxes[heapq.heappop(ready)]
        order.append(box)
        for user in users.get(box, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, rank[user])
    return order
