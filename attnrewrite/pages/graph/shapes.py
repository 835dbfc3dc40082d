"""Words for the picture: shapes with the batch as B, rows as ranges, names cut to the room there is."""

from collections import Counter
from collections.abc import Iterable

from attnrewrite.patterns.graph import GraphView

_RANGES = 4  # rows in more pieces than this are given as a count


class Shapes:
    """Shapes as text. An axis that follows the batch reads B, or 64B where windows are folded into it."""

    def __init__(self, graph: GraphView) -> None:
        self._graph = graph
        shapes = [graph.shape(value) for value in graph.values if graph.operation(value).kind == "input"]
        self._batch = shapes[0][0] if shapes and shapes[0] else 1

    def __call__(self, value: str) -> str:
        """'B×197×192'; 'scalar' for a tensor without axes."""
        open_axes = self._graph.batch_axes(value)
        sizes = (
            self._open(size) if axis in open_axes else str(size) for axis, size in enumerate(self._graph.shape(value))
        )
        return "×".join(sizes) or "scalar"

    def _open(self, size: int) -> str:
        times, rest = divmod(size, max(self._batch, 1))
        return str(size) if rest else "B" if times == 1 else f"{times}B"


def ranges(rows: tuple[int, ...], total: int) -> str:
    """'rows 0–191 of 576'."""
    if rows == tuple(range(total)):
        return f"all {total} rows"
    pieces: list[list[int]] = []
    for row in rows:
        if pieces and row == pieces[-1][1] + 1:
            pieces[-1][1] = row
        else:
            pieces.append([row, row])
    if len(pieces) > _RANGES:
        return f"{len(rows)} of {total} rows, in {len(pieces)} pieces from {min(rows)} to {max(rows)}"
    return f"rows {', '.join(f'{a}–{b}' if a != b else str(a) for a, b in pieces)} of {total}"


def cut(text: str, room: int) -> str:
    """`text`, or its two ends where it is longer than `room` characters: module paths differ at both."""
    if len(text) <= room:
        return text
    head = (room - 1) // 2
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def listed(parts: Iterable[str], room: int) -> str:
    """As many of the parts as there is room for, joined by commas; then an ellipsis."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > room:
            return f"{text}, …" if text else cut(part, room)
        text = longer
    return text


def operators(graph: GraphView, values: Iterable[str]) -> Counter[str]:
    """How often each operator stands among live values; what does nothing (dropout, copies) is left out."""
    live = (graph.operation(value) for value in values if not graph.is_constant(value))
    return Counter(each.name.removeprefix("_unsafe_") for each in live if each.name != "identity")


def counted(number: int, what: str) -> str:
    """'1 site', '12 sites', '2 near misses'."""
    plural = f"{what}es" if what.endswith(("ss", "x")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
