"""The command that looks: the sites and near misses of a model as a table, as JSON, and as pages."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnrewrite.cli.app import command
from attnrewrite.cli.engine import explain_package
from attnrewrite.cli.options import ModelOptions, Original, RunOptions, SourceName
from attnrewrite.cli.output import Outcome, table
from attnrewrite.errors import InputError, Refusal
from attnrewrite.outputs import check_free_file, write_file
from attnrewrite.pages.render import check_pages
from attnrewrite.site import AttentionSite, Scan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

Supported = Mapping[str, Mapping[str, Refusal | None]]  # for each site id, what each variant says of it
_INDENT = 6  # of what a terminal wraps


@command("attnrewrite explain timm:vit_tiny_patch16_224 --graph graph.html")
def explain(
    source: SourceName,
    model: ModelOptions,
    run: RunOptions,
    graph: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page that draws the graph and its sites.")
    ] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture to run the model on, for --maps.")] = None,
    maps: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page that lays over --image what each site attends to."),
    ] = None,
    original: Original = None,
    force: Annotated[bool, typer.Option("--force", help="Replace pages that exist.")] = False,
) -> Outcome:
    """Find every attention site, and every softmax that almost is one, and say which variants can stand there.

    With --image and --maps, a folder that convert wrote is shown beside the model it was made from, which is found by
    the folder's report if you wrote the folder on this machine; else name it with --original.

    SOURCE may also be a .mlpackage: it is held against the rules of the Neural Engine instead.
    """
    from attnrewrite.targets.record import is_package

    if is_package(source):
        if graph or image or maps or original:
            raise InputError("--graph, --image, --maps and --original are for models, not packages: leave them out")
        return explain_package(source)
    _check_pages(graph, image, maps, force=force)
    if original is not None and maps is None:
        raise InputError(f"--original {original} is what --image and --maps show a converted folder beside: give both")
    how = asdict(model if original is None else replace(model, checkpoint=None))
    from attnrewrite import api

    run.execution.apply()
    view, scan = api.examine(source, **how)
    supported = api.supported(scan)
    nothing = f"attnrewrite: nothing matched: {scan.model} holds no attention that can be rewritten"
    notes = [] if len(scan) else [nothing]
    pages = {}  # written when all are made
    if graph is not None:
        from attnrewrite.pages.graph.page import graph_page

        pages[graph] = graph_page(view, scan, supported)
    if maps is not None and image is not None:
        from attnrewrite.frontends.sources import load_source
        from attnrewrite.pages.maps.image_maps import image_maps
        from attnrewrite.pages.maps.page import maps_page

        loaded = load_source(source, **how)
        beside = None if original is None else loaded.original(original, model.checkpoint)
        pages[maps] = maps_page(image_maps(loaded, image, beside))
    notes += [_written(page, text, run, force=force) for page, text in pages.items()]
    shown = scan_table(scan, supported)
    return Outcome(scan_data(scan, supported), shown, exit_code=0 if len(scan) else 3, note="; ".join(notes) or None)


def _check_pages(graph: Path | None, image: Path | None, maps: Path | None, *, force: bool) -> None:
    """Raise InputError, before any work, for pages that could not be made."""
    if (image is None) != (maps is None):
        raise InputError("--image FILE and --maps FILE belong together: the picture to read, and the page to write")
    if image is not None:
        from attnrewrite.images.decode import is_whole

        if not is_whole(image):
            raise InputError(f"--image {image} is not an image that can be read to its end: give another")
    pages = [page for page in (graph, maps) if page is not None]
    if len(pages) == 2 and graph == maps:
        raise InputError(f"--graph and --maps are both {graph}: give each page a name of its own")
    for page in pages:
        check_free_file(page, force=force)
        check_pages()


def _written(out: Path, text: str, run: RunOptions, *, force: bool) -> str:
    """Write a page unless this is a dry run; the note that says so."""
    if run.dry_run:
        return f"would write {out}; nothing was written"
    write_file(out, text, force=force)
    return f"written: {out}"


def scan_data(scan: Scan, supported: Supported) -> dict[str, Any]:
    """A scan as `explain --json` prints it."""
    keys = ("id", "name", "kind", "axis", "heads", "head_dim", "n_queries", "n_keys", "windowed", "scale", "bias")
    return {
        "model": scan.model,
        "frontend": scan.frontend,
        "sites": [
            {key: getattr(site, key) for key in keys}
            | {"group": scan.group_of(site.id), "supported": said(supported[site.id])}
            for site in scan
        ],
        "near_misses": [{"anchor": m.anchor, "reason": m.code, "detail": m.sentence} for m in scan.near_misses],
        "groups": [
            {"id": group.id, "members": list(group.members), "apart": None if group.apart is None else str(group.apart)}
            for group in scan.groups
        ],
    }


def said(answers: Mapping[str, Refusal | None]) -> dict[str, bool | str]:
    """What each variant says of a site: True, or the sentence of its refusal."""
    return {name: refusal is None or refusal.sentence for name, refusal in answers.items()}


def scan_table(scan: Scan, supported: Supported) -> "RenderableType":
    """A line for each site and for each near miss, and under the sites what the variants say, each answer once."""
    from rich.console import Group
    from rich.text import Text

    from attnrewrite.pages.graph.shapes import counted

    counts = f"{counted(len(scan), 'attention site')}, {counted(len(scan.near_misses), 'near miss')}"
    title = Text.assemble((scan.model, "bold"), f": {counts}")
    answers = list(dict.fromkeys(tuple(supported[site.id].items()) for site in scan))
    windowed = any(site.windowed for site in scan)
    grouped = any(group.apart is None for group in scan.groups)
    rows = []
    for site in scan:
        answer = 1 + answers.index(tuple(supported[site.id].items()))
        rows.append([*_row(site, windowed), *([scan.group_of(site.id) or ""] if grouped else []), f"({answer})"])
    headings = ("id", "name", "kind", "heads", "tokens", *(("windows",) if windowed else ()), "bias")
    headings += (*(("group",) if grouped else ()), "variants")
    columns = {heading: "right" if heading in ("heads", "tokens", "windows") else "left" for heading in headings}
    parts: list[Any] = [title]
    if rows:
        parts += ["", table(None, columns, rows), "", *_answers(answers)]
    if scan.groups:
        parts += [Text("\ngroups", style="bold"), *_groups(scan)]
    if scan.near_misses:
        parts += [Text("\nnear misses", style="bold"), *_misses(scan)]
    if not rows and not scan.near_misses:
        parts.append("its graph has no softmax and no attention operator")
    return Group(*parts)


def _row(site: AttentionSite, windowed: bool) -> list[str]:
    kind = site.kind + (", over channels" if site.axis == "channel" else "")
    windows = [str(site.windows) if site.windowed else ""] if windowed else []
    heads, tokens = f"{site.heads}x{site.head_dim}", f"{site.n_queries}x{site.n_keys}"
    return [site.id, site.name, kind, heads, tokens, *windows, site.bias]


def _answers(answers: list[tuple[tuple[str, Refusal | None], ...]]) -> Iterator["RenderableType"]:
    """Each answer's number, the variants that can stand there, and the others under their reason."""
    from rich.text import Text

    from attnrewrite.pages.graph.sites import by_reason

    yield Text("variants", style="bold")
    for number, answer in enumerate(answers, start=1):
        able = ", ".join(name for name, refusal in answer if refusal is None) or "none"
        yield Hanging(Text.assemble(f"({number}) ", ("can stand there: ", "green"), able))
        for reason, names in by_reason(dict(answer)).items():
            yield Hanging(Text.assemble("    ", ("cannot: ", "yellow"), f"{', '.join(names)} ({reason})"))


def _groups(scan: Scan) -> Iterator["RenderableType"]:
    """The heads that are computed apart, and sites that are joined without being heads of one attention."""
    from rich.text import Text

    for group in scan.groups:
        members = ", ".join(group.members)
        if group.apart is None:
            yield Hanging(Text(f"{group.id}: {members} are heads of one attention; convert makes one site of them"))
        else:
            yield Hanging(Text(f"{members} are joined, but rewritten one by one: {group.apart}"))


def _misses(scan: Scan) -> Iterator["RenderableType"]:
    from rich.text import Text

    for miss in scan.near_misses:
        yield Hanging(Text.assemble((miss.name, "yellow"), f" ({miss.anchor}, {miss.code}): {miss.sentence}"))


@dataclass(frozen=True)
class Hanging:
    """A line of text whose continuations are indented on a terminal; one line where the output is piped."""

    text: "Text"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RenderableType"]:
        if console.soft_wrap:
            yield self.text
            return
        first, *more = self.text.wrap(console, options.max_width - _INDENT)
        yield first
        for line in more:
            line.pad_left(_INDENT)
            yield line
