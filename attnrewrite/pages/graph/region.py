"""Which values of a graph are drawn as an attention site: from its projections to its output projection."""

from collections.abc import Iterable
from typing import cast

from attnrewrite.patterns.graph import ComputedConstants, GraphView
from attnrewrite.site import AttentionSite, OutputProjection, Scan, Untraced

_PROJECTS = frozenset({"linear", "conv", "matmul"})
_ENDS = frozenset({"linear", "conv", "matmul", "sdpa", "softmax", "input"})


class _Shown:
    """A graph in which the given values, and all that is computed from them, count as computed."""

    def __init__(self, graph: GraphView, marked: set[str]) -> None:
        self._graph = graph
        tokens = cast(GraphView, ComputedConstants(graph)) if marked else graph
        self._live: set[str] = set()
        for value in graph.values:
            computed = not tokens.is_constant(value) or value in marked
            if computed or self._live.intersection(graph.operation(value).inputs):
                self._live.add(value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._graph, name)

    def is_constant(self, value: str) -> bool:
        return value not in self._live and self._graph.is_constant(value)


def shown(graph: GraphView, found: Scan) -> GraphView:
    """The graph as it is drawn: an attention over learned queries alone is drawn as any other, not as a constant."""
    known = set(graph.values)
    nodes = {value for site in found.sites for value in site.nodes}
    nodes |= {value for miss in found.near_misses for value in miss.nodes}
    marked = {value for value in nodes & known if graph.is_constant(value)}
    return cast(GraphView, _Shown(graph, marked))


def site_values(graph: GraphView, site: AttentionSite) -> set[str]:
    """The live values of a site, with its traced projections and what lies between.

    A set without ways out and in again: what is computed from one of them and read by another is among them.
    """
    weights = {part.weight for part in (*site.projections, site.output) if not isinstance(part, Untraced)}
    core = _core_values(graph, site, weights)
    known = set(core)
    for value in core:
        for operand in graph.operation(value).inputs:
            known |= _way_to_projection(graph, operand, known, weights)
    for user in graph.users(site.output.weight) if isinstance(site.output, OutputProjection) else ():
        way = _way_to_projection(graph, user, known, weights)
        known |= way if way & known else set()  # tied weights have users elsewhere
    return _closed(graph, known)


def projecting(graph: GraphView, value: str, site: AttentionSite) -> tuple[str, ...]:
    """Which of the site's projections a value computes: of "query", "key", "value" and "output"."""
    operation = graph.operation(value)
    if operation.kind not in _PROJECTS:
        return ()
    parts = zip(("query", "key", "value", "output"), (*site.projections, site.output), strict=True)
    return tuple(role for role, part in parts if not isinstance(part, Untraced) and part.weight in operation.inputs)


def _core_values(graph: GraphView, site: AttentionSite, weights: set[str]) -> set[str]:
    """The site's own nodes, without what a bias that is computed from the input is made of."""
    operands = [] if site.core is None else [site.core.query, site.core.key, site.core.value]
    reached = {operand.value for operand in operands}
    kept = set()
    for value in site.nodes:
        inputs = graph.operation(value).inputs
        if not operands or reached.intersection(inputs) or weights.intersection(inputs):
            reached.add(value)
            kept.add(value)
    return kept


def _way_to_projection(graph: GraphView, value: str, known: set[str], weights: set[str]) -> set[str]:
    """What lies between a value and the projections behind it, they included; nothing where there are none."""
    found: set[str] = set()
    ends: set[str] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current in found or graph.is_constant(current):
            continue
        operation = graph.operation(current)
        projects = operation.kind in _PROJECTS and bool(weights.intersection(operation.inputs))
        if current in known or projects:
            ends.add(current)
        elif operation.kind in _ENDS:
            continue
        found.add(current)
        if current not in known and not (projects and current != value):
            pending.extend(operation.inputs)
    return _between(graph, ends, found)


def _between(graph: GraphView, starts: set[str], within: Iterable[str]) -> set[str]:
    """The values of `within` that are computed from `starts`, they included."""
    within = set(within)
    users = {value: [user for user in graph.users(value) if user in within] for value in within}
    found, pending = set(starts), list(starts)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def _closed(graph: GraphView, known: set[str]) -> set[str]:
    """`known` with what is computed from it and computes it."""
    order = [value for value in graph.values if not graph.is_constant(value)]
    places = [number for number, value in enumerate(order) if value in known]
    if not places:
        return known
    window = order[places[0] : places[-1] + 1]
    after, before = set(known), set(known)
    for value in window:
        if after.intersection(graph.operation(value).inputs):
            after.add(value)
    for value in reversed(window):
        if value in before:
            before.update(graph.operation(value).inputs)
    return known | (after & before & set(window))
