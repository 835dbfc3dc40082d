"""A model's graph as one page: sites and near misses in colour, the rest in runs, and each of them open to a look."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnrewrite.errors import Refusal
from attnrewrite.pages.graph.boxes import Box, BoxGraph, box_graph
from attnrewrite.pages.graph.layout import Layout, layered
from attnrewrite.pages.graph.region import shown
from attnrewrite.pages.graph.shapes import Shapes, counted, cut, listed, operators
from attnrewrite.pages.graph.sites import SitePanel, site_panel
from attnrewrite.pages.render import render
from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import AttentionSite, NearMiss, Scan

WIDTH, ROOM = 264, 37  # of a box, in pixels and in characters
_HEIGHTS = {"input": 44.0, "run": 64.0, "site": 64.0, "miss": 64.0, "output": 30.0}
_MOST_LISTED = 300  # operators that one run lists by name
_MOST_LISTED_ON_PAGE = 12_000  # and all of them together, so that the page of a huge model stays light


@dataclass(frozen=True)
class Listed:
    """One operator of a run: its name, the module that it is in, and the shape of what it makes."""

    operator: str
    where: str
    shape: str


@dataclass(frozen=True)
class DrawnBox:
    """A box as the page draws it. `lines` are its text, `words` what the filter looks through.

    One of `site` with `panel`, `miss`, or neither. `listed` are a run's operators, `unlisted` how many more there are.
    """

    box: Box
    x: float
    y: float
    height: float
    title: str
    lines: tuple[str, ...]
    words: str
    site: AttentionSite | None
    panel: SitePanel | None
    miss: NearMiss | None
    counts: tuple[tuple[str, int], ...]
    listed: tuple[Listed, ...]
    unlisted: int


def graph_page(graph: GraphView, found: Scan, supported: Mapping[str, Mapping[str, Refusal | None]]) -> str:
    """The page, self-contained HTML. `supported` says for each site id what each variant says of it.

    Raises:
        InputError: jinja2 is not installed.
    """
    graph = shown(graph, found)
    grouped = box_graph(graph, found)
    layout = layered([(float(WIDTH), _HEIGHTS[box.kind]) for box in grouped.boxes], grouped.edges)
    boxes = _drawn(graph, found, supported, grouped, layout)
    drawn = {box.miss for box in boxes if box.miss is not None}
    return render(
        "graph.html.jinja",
        {"counted": counted, "short": lambda text, bold=0: cut(text, ROOM - bold)},
        model=found.model,
        frontend={"fx": "torch.export", "onnx": "ONNX"}[found.frontend],
        boxes=boxes,
        lines=layout.lines,
        size=(layout.width, layout.height),
        box_width=WIDTH,
        sites=len(found.sites),
        misses=len(found.near_misses),
        undrawn=[miss for miss in found.near_misses if miss not in drawn],
        operators=sum(sum(count for _, count in box.counts) for box in boxes),
    )


def _drawn(
    graph: GraphView,
    found: Scan,
    supported: Mapping[str, Mapping[str, Refusal | None]],
    grouped: BoxGraph,
    layout: Layout,
) -> list[DrawnBox]:
    shapes = Shapes(graph)
    room = _MOST_LISTED_ON_PAGE
    drawn = []
    for box, (x, y) in zip(grouped.boxes, layout.places, strict=True):
        site = found.sites[box.about] if box.kind == "site" and box.about is not None else None
        miss = found.near_misses[box.about] if box.kind == "miss" and box.about is not None else None
        live = [value for value in box.values if not graph.is_constant(value)]
        listed = live[: min(_MOST_LISTED, room)] if box.kind == "run" else []
        room -= len(listed)
        counts = tuple(operators(graph, live).most_common())
        title, lines = _text(graph, shapes, box, site, miss, counts)
        named = (box.name, title, *lines, *(name for name, _ in counts), *_words(site, miss))
        drawn.append(
            DrawnBox(
                box=box, x=x, y=y, height=_HEIGHTS[box.kind], title=title,
                lines=lines, words=" ".join(dict.fromkeys(named)).lower(),
                site=site, panel=site_panel(graph, shapes, site, box.values, supported[site.id]) if site else None,
                miss=miss, counts=counts,
                listed=tuple(Listed(graph.operation(v).name, graph.scope(v) or v, shapes(v)) for v in listed),
                unlisted=len(live) - len(listed) if box.kind == "run" else 0,
            )
        )  # fmt: skip
    return drawn


def _text(
    graph: GraphView,
    shapes: Shapes,
    box: Box,
    site: AttentionSite | None,
    miss: NearMiss | None,
    counts: tuple[tuple[str, int], ...],
) -> tuple[str, tuple[str, ...]]:
    """A box's title and the lines under it."""
    if box.kind == "output":
        return "result", ()
    if box.kind == "input":
        return box.name, (shapes(box.values[0]),)
    if site is not None:
        return site.name, (f"{site.id} · {_kind(site)}", f"{site.heads} heads × {site.head_dim} · {_tokens(site)}")
    if miss is not None:
        return miss.name, (f"near miss: {miss.code}", miss.anchor)
    made = [value for value in box.values if not graph.is_constant(value)]
    kinds = listed(
        (f"{count} {name}" if count > 1 else name for name, count in _most_work_first(graph, box, counts)), ROOM - 3
    )
    return box.name or "the model itself", (kinds, f"→ {shapes(made[-1])}" if made else "")


def _most_work_first(graph: GraphView, box: Box, counts: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """The counts with what computes first and what only moves data last."""
    movement = {graph.operation(value).name for value in box.values if graph.operation(value).kind == "move"}
    weighty = {
        graph.operation(value).name
        for value in box.values
        if graph.operation(value).kind in ("linear", "conv", "matmul", "sdpa", "softmax")
    }
    return sorted(counts, key=lambda each: (each[0] not in weighty, each[0] in movement))


def _kind(site: AttentionSite) -> str:
    traits: list[str] = [site.kind]
    if site.axis == "channel":
        traits.append("over channels")
    if site.windowed:
        traits.append(f"{site.windows} windows")
    if site.bias != "none":
        traits.append(f"{site.bias.replace('-', ' ')} bias")
    return ", ".join(traits)


def _tokens(site: AttentionSite) -> str:
    return f"{site.n_queries} → {site.n_keys} tokens"


def _words(site: AttentionSite | None, miss: NearMiss | None) -> tuple[str, ...]:
    if site is not None:
        return ("site", site.id, site.anchor, site.kind, site.axis, *(("windowed",) if site.windowed else ()))
    return ("near miss", miss.code, miss.sentence, miss.anchor) if miss is not None else ()
