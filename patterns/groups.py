"""Heads that a model computes one by one in a loop: single sites whose results one operation joins.

Such sites are one attention of several heads, written apart. They are told by structure: projections of the same
tokens, the same shapes, scale and masks, and results that nothing reads before one operation joins them all.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.provenance import FILL, layout_of, push
from attnrewrite.site import AttentionSite, Core, Group, Layout, Operand, Projection, Scan


@dataclass(frozen=True)
class _Way:
    """From a site's output through movement to an operation that joins it with others; `alone`: none else reads it."""

    site: AttentionSite
    core: Core
    path: tuple[str, ...]
    alone: bool


def with_groups(graph: GraphView, found: Scan) -> Scan:
    """`found` with its groups: sites that one operation joins, as heads of one attention or with the reason why not.

    A loop that lays each head beside those before it joins them in several operations: a group is what the last of
    them joins, where that is one attention, else what the first does.
    """
    ways = [list(_ways(graph, site, site.core)) for site in found.sites if site.core and site.axis == "token"]
    groups: list[Group] = []
    for value, joined in _nested(ways).items():
        group = _group(graph, value, joined)
        if isinstance(group.output, Operand):
            groups.append(group)
    members = {member for group in groups for member in group.members}
    first = _joints(way for each in ways for way in each[:1] if way.site.id not in members)
    return replace(found, groups=(*groups, *(_group(graph, value, joined) for value, joined in first.items())))


def _joints(ways: Iterable[_Way]) -> dict[str, list[_Way]]:
    """The ways of each operation that joins several sites."""
    found: dict[str, list[_Way]] = {}
    for way in ways:
        found.setdefault(way.path[-1], []).append(way)
    return {value: joined for value, joined in found.items() if len(joined) > 1}


def _nested(ways: Sequence[Sequence[_Way]]) -> dict[str, list[_Way]]:
    """The ways of each operation that is the last of several to join sites."""
    last = {each[-1].path[-1] for each in ways if len(each) > 1}
    return {value: joined for value, joined in _joints(way for each in ways for way in each).items() if value in last}


def named_as_before(found: Scan, before: Scan, joined: Mapping[str, Group]) -> Scan:
    """`found`, the scan after groups of `before` were joined, its sites under the ids and names that they had.

    `joined` are the groups by the value that they joined in. A joined site has its group's id.
    """
    known = {node: site for site in before.sites for node in site.nodes}
    first = {site.id: site for site in before.sites}
    sites = []
    for site in found.sites:
        group = next((joined[node] for node in site.nodes if node in joined), None)
        own = first[group.id] if group else next(known[node] for node in site.nodes if node in known)
        sites.append(replace(site, id=own.id, name=own.name, members=group.members if group else ()))
    left = tuple(group for group in before.groups if group not in joined.values())
    return replace(found, sites=tuple(sites), groups=left)


def _group(graph: GraphView, value: str, ways: Sequence[_Way]) -> Group:
    """The sites that `value` joins, in the order in which it does."""
    ways = sorted(ways, key=lambda way: int(np.argmax(_pushed(graph, way) != FILL)))
    return Group(tuple(way.site.id for way in ways), _apart(ways) or _together(graph, value, ways))


def _ways(graph: GraphView, site: AttentionSite, core: Core) -> Iterator[_Way]:
    """The ways to the operations that join a site's output with others, nearest first."""
    value, alone = core.output.value, True
    path: tuple[str, ...] = ()
    while True:
        users = graph.users(value)
        moves = [
            user for user in users if graph.operation(user).kind == "move" and value in graph.operation(user).inputs
        ]
        if len(moves) != 1:
            return
        value, path, alone = moves[0], (*path, moves[0]), alone and len(users) == 1
        if len(set(graph.operation(value).inputs)) > 1:
            yield _Way(site, core, path, alone)


def _pushed(graph: GraphView, way: _Way) -> np.ndarray:
    """Which of the site's elements stands where in what joins it, flattened."""
    return push(graph, way.core.output.value, way.path).reshape(-1)


def _apart(ways: Sequence[_Way]) -> Refusal | None:
    """Why sites whose results one operation joins are no heads of one attention; None where they may be."""
    read = next((way.site for way in ways if not way.alone), None)
    if read is not None:
        return Refusal("read-between", f"what {read.id} makes is read before it is joined with the others")
    first, *others = ways
    for what, number in _likeness(first).items():
        unlike = next((way for way in others if _likeness(way)[what] != number), None)
        if unlike is not None:
            return Refusal("unlike-heads", f"{first.site.id} and {unlike.site.id} differ in their {what}")
    if any(way.core.temperature is not None for way in ways):
        return Refusal("scores-multiplied", "a tensor multiplies their scores")
    if any(term.dropped is not None and np.isfinite(term.filling) for term in first.core.terms):
        return Refusal("number-masked", "a mask writes a finite number over their scores")
    for role in ("query", "key", "value"):
        projections = [getattr(way.site, role) for way in ways]
        read_ones = {p.input if isinstance(p, Projection) else None for p in projections}
        if len(read_ones) > 1 or None in read_ones:
            return Refusal("other-tokens", f"not each {role} of theirs is traced to a projection of the same tokens")
    return None


def _likeness(way: _Way) -> dict[str, Hashable]:
    """What heads of one attention have in common, each under its name."""
    site, core = way.site, way.core
    return {
        "number of heads": (site.heads, site.kv_heads),
        "channels": (site.head_dim, site.value_dim),
        "numbers of tokens": (site.n_queries, site.n_keys),
        "windows": site.windows,
        "scale": core.scale,
        "biases and masks": tuple((t.operand.layout, t.factor, t.dropped, t.filling) for t in core.terms),
    }


def _together(graph: GraphView, value: str, ways: Sequence[_Way]) -> Operand | Refusal:
    """The value that the sites' results are joined in, as the heads of one attention."""
    shape = graph.shape(value)
    places = []
    for way in ways:
        index = _pushed(graph, way)
        numbers = _numbers(way.core.output.layout, graph.shape(way.core.output.value))
        place = np.full(numbers.size, FILL, np.int64)
        place[index[index != FILL]] = np.flatnonzero(index != FILL)
        places.append(place[numbers])
    position = np.concatenate(places, axis=1)
    layout = layout_of(position, shape, graph.batch_axes(value))
    if isinstance(layout, Refusal):
        return Refusal("not-joined", "they are joined with other tensors, or in no order of heads, tokens and channels")
    return Operand(value, layout)


def _numbers(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """The elements of a tensor, numbered row-major, as [batch, heads, tokens, channels]."""
    split = np.arange(np.prod(shape, dtype=int)).reshape(layout.split)
    groups = (layout.batch, layout.heads, layout.tokens, layout.channels)
    sizes = [int(np.prod([split.shape[axis] for axis in axes], dtype=int)) for axes in groups]
    return split.transpose(layout.order).reshape(sizes)
