"""What the page shows of one site: its facts, its projections, what the variants say, and its own operators drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnrewrite.errors import Refusal
from attnrewrite.pages.graph.layout import Line, layered
from attnrewrite.pages.graph.region import projecting
from attnrewrite.pages.graph.shapes import Shapes, cut, ranges
from attnrewrite.patterns.graph import GraphView, parameters_of
from attnrewrite.site import AttentionSite, OutputProjection, Projection, Untraced

_MOST_DRAWN = 150  # operators of one site beyond which a drawing is no help
_WIDTH, _LINE_HEIGHT, _ROOM = 204, 15, 29


@dataclass(frozen=True)
class Node:
    """One operator in a site's drawing: `lines` are its text, the first in bold. `role` is its colour's name."""

    x: float
    y: float
    width: float
    height: float
    role: str
    lines: tuple[str, ...]
    full: str


@dataclass(frozen=True)
class Drawing:
    nodes: tuple[Node, ...]
    lines: tuple[Line, ...]
    width: float
    height: float


@dataclass(frozen=True)
class ProjectionFact:
    """A row of the projections' table. `weight` is empty where `how` says why it could not be traced."""

    role: str
    parameters: tuple[str, ...]
    weight: str
    rows: str
    how: str


@dataclass(frozen=True)
class SitePanel:
    """All that the page says of a site. `able` are the variants that can stand there, `refused` the others by reason.

    `drawing` is None where the site has too many operators to draw.
    """

    facts: tuple[tuple[str, str], ...]
    projections: tuple[ProjectionFact, ...]
    able: tuple[str, ...]
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    drawing: Drawing | None


def site_panel(
    graph: GraphView,
    shapes: Shapes,
    site: AttentionSite,
    values: Sequence[str],
    supported: Mapping[str, Refusal | None],
) -> SitePanel:
    """The panel of a site whose box holds `values`; `supported` is what each variant says of it."""
    live = [value for value in values if not graph.is_constant(value)]
    return SitePanel(
        facts=_facts(shapes, site),
        projections=tuple(
            _projection(graph, shapes, role, part)
            for role, part in zip(("query", "key", "value", "output"), (*site.projections, site.output), strict=True)
        ),
        able=tuple(name for name, refusal in supported.items() if refusal is None),
        refused=tuple((reason, tuple(names)) for reason, names in by_reason(supported).items()),
        drawing=_drawing(graph, shapes, site, live) if len(live) <= _MOST_DRAWN else None,
    )


def by_reason(supported: Mapping[str, Refusal | None]) -> dict[str, list[str]]:
    """The variants that refuse a site, gathered under their reason."""
    gathered: dict[str, list[str]] = {}
    for name, refusal in supported.items():
        if refusal is not None:
            gathered.setdefault(str(refusal), []).append(name)
    return gathered


def _facts(shapes: Shapes, site: AttentionSite) -> tuple[tuple[str, str], ...]:
    heads = f"{site.heads} × {site.head_dim}"
    if site.value_dim != site.head_dim:
        heads += f", values of {site.value_dim}"
    if site.kv_heads != site.heads:
        heads += f", {site.kv_heads} of keys and values"
    tokens = f"{site.n_queries} queries → {site.n_keys} keys"
    windows = f"{site.windows} windows of each image" if site.windowed else "none"
    facts = {
        "attention": f"{site.kind}, over {site.axis}s, {site.anchor} in the graph",
        "heads × channels": heads,
        "tokens": tokens,
        "windows": windows,
        "grid": _grid(site),
        "scale": "a tensor of the graph" if site.scale is None else f"{site.scale:.6g}{_root(site)}",
        "bias": _bias(shapes, site),
        "also": ", ".join(_extras(site)) or "nothing",
    }
    if site.core_reason:
        facts["cannot be rewritten"] = site.core_reason.sentence
    return tuple(facts.items())


def _grid(site: AttentionSite) -> str:
    if site.grid is None:
        return "not known to be an image"
    prefix = f"{site.grid.prefix} before, then " if site.grid.prefix else ""
    return f"{prefix}{site.grid.rows} × {site.grid.columns}"


def _root(site: AttentionSite) -> str:
    usual = site.scale is not None and math.isclose(site.scale, site.head_dim**-0.5, rel_tol=1e-5)
    return f" = 1/√{site.head_dim}" if usual else ""


def _bias(shapes: Shapes, site: AttentionSite) -> str:
    names = {"none": "none", "constant": "constant", "input": "from the input", "depends-on-query": "from the query"}
    terms = site.core.terms if site.core else ()
    sizes = [" " + shapes(term.operand.value) for term in terms]
    return names[site.bias] + ",".join(sizes)


def _extras(site: AttentionSite) -> list[str]:
    traits = {
        "causal mask": site.causal,
        "queries and keys normalised": site.qk_norm,
        "rotary embedding": site.rope,
        "heads mixed": site.talking_heads,
        "probabilities used elsewhere": site.probs_escape,
    }
    return [what for what, holds in traits.items() if holds]


def _projection(
    graph: GraphView, shapes: Shapes, role: str, part: Projection | OutputProjection | Untraced
) -> ProjectionFact:
    if isinstance(part, Untraced):
        return ProjectionFact(role, (), "", "", f"not traced: {part.sentence}")
    rows = part.rows if isinstance(part, Projection) else part.columns
    shape = graph.shape(part.weight)
    across = (isinstance(part, OutputProjection)) != part.transposed
    total = shape[1] if across and len(shape) > 1 else shape[0]
    how = []
    if not part.direct:
        between = "normalised or rotated before the product", "more stands between, or reads the heads too"
        how.append(between[isinstance(part, OutputProjection)])
    if isinstance(part, Projection) and part.factor != 1.0:
        how.append(f"times {part.factor:.6g}")
    if part.normalization is not None:
        how.append("a BatchNorm follows")
    if part.bias is None:
        how.append("no bias")
    said = ranges(rows, total)
    names = tuple(graph.title(parameter) for parameter in part.parameters)
    return ProjectionFact(
        role, names, shapes(part.weight), said.replace("rows", "columns") if role == "output" else said, ", ".join(how)
    )


def _drawing(graph: GraphView, shapes: Shapes, site: AttentionSite, live: Sequence[str]) -> Drawing:
    inside = set(live)
    read = {value: graph.operation(value).inputs for value in live}
    outside = (operand for value in live for operand in read[value] if operand not in inside)
    drawn = [*dict.fromkeys(operand for operand in outside if not graph.is_constant(operand)), *live]
    place = {value: number for number, value in enumerate(drawn)}
    edges = sorted({(place[o], place[value]) for value in live for o in read[value] if o in place})
    texts = [_text(graph, shapes, site, value, value in inside, live) for value in drawn]
    sizes = [(float(_WIDTH), 11.0 + _LINE_HEIGHT * len(lines)) for _, lines, _ in texts]
    layout = layered(sizes, edges)
    nodes = tuple(
        Node(*where, *size, role, tuple(cut(line, _ROOM) for line in lines), full)
        for where, size, (role, lines, full) in zip(layout.places, sizes, texts, strict=True)
    )
    return Drawing(nodes, layout.lines, layout.width, layout.height)


def _text(
    graph: GraphView, shapes: Shapes, site: AttentionSite, value: str, inside: bool, live: Sequence[str]
) -> tuple[str, tuple[str, ...], str]:
    """(role, lines, all of it) of one operator."""
    operation, shape = graph.operation(value), shapes(value)
    if not inside:
        return "given", (f"from {operation.name}", shape), f"{graph.scope(value)} {value}: {shape}"
    role, what = _role(graph, site, value, live)
    constants = [operand for operand in operation.inputs if graph.is_constant(operand)]
    shown = [f"{_named(graph, operand)} {shapes(operand)}" for operand in constants]
    scalar = operation.attributes.get("scalar")
    name = operation.name if scalar is None else f"{operation.name} {float(scalar):.6g}"  # type: ignore[arg-type]
    lines = (name if not what else f"{name}: {what}", *shown[:2], f"→ {shape}")
    return role, lines, " · ".join((value, *shown, shape))


def _role(graph: GraphView, site: AttentionSite, value: str, live: Sequence[str]) -> tuple[str, str]:
    operation = graph.operation(value)
    roles = projecting(graph, value, site)
    if roles:
        what = roles[0] if len(roles) == 1 else ", ".join(role[0] for role in roles)
        return (roles[0] if len(roles) == 1 else "packed"), f"{what} projection"
    if operation.kind == "sdpa":
        return "softmax", "softmax(q·k) v"
    if operation.kind == "softmax":
        return "softmax", "over the keys"
    biases = {term.operand.value for term in site.core.terms} if site.core else set()
    if biases.intersection(operation.inputs):
        return "bias", "the bias"
    if operation.kind == "matmul":
        anchors = [place for place, other in enumerate(live) if graph.operation(other).kind == "softmax"]
        is_scores = bool(anchors) and live.index(value) < anchors[-1]
        return "product", "query · key" if is_scores else "attention · value"
    return operation.kind if operation.kind == "move" else "plain", ""


def _named(graph: GraphView, value: str) -> str:
    """A constant by its name, or by the one parameter that it is made from."""
    if graph.operation(value).kind == "constant":
        return graph.title(value)
    leaves = parameters_of(graph, value)
    return f"of {graph.title(leaves[0])}" if len(leaves) == 1 else f"a constant of {len(leaves)} parameters"
