"""The products of one attention, query key^T and probabilities value, before heads and tokens are told apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.axes import Side
from attnrewrite.patterns.graph import GraphView, Operation
from attnrewrite.patterns.provenance import push
from attnrewrite.patterns.scores import (
    NoProduct,
    Probabilities,
    ScorePath,
    ValuePath,
    varying_axis,
    walk_back,
    walk_forward,
)
from attnrewrite.patterns.softmaxes import loose_scores


@dataclass(frozen=True)
class Products:
    """The operands of one attention. `obstacles` say what else happens on the way from scores to output.

    `scores` leads from the product to the softmax; for a fused operator its product is the operator itself and its
    path is empty. `keys_are_rows` says that the product is key query^T.
    """

    anchor: Operation
    query: Side
    key: Side
    value: Side
    output: Side
    scores: ScorePath
    obstacles: tuple[Refusal, ...]
    talking_heads: bool
    escape: bool
    causal: bool = False
    mask: str | None = None
    keys_are_rows: bool = False


def fused_products(graph: GraphView, anchor: Operation) -> Products | Refusal:
    """A fused attention operator: query, key, value [..., heads, tokens, channels]."""
    if way_out := anchor.attributes.get("opaque"):
        return Refusal("fused-layer", f"{anchor.name} holds attention and what is around it in one: {way_out}")
    shapes = [graph.shape(operand) for operand in anchor.inputs]
    if shapes[1][-2] > 1 and len(shapes[1]) - 2 in graph.batch_axes(anchor.inputs[1]):
        return BATCH_MIXING
    lead = graph.shape(anchor.value)[:-2]
    query, key, value = (
        Side(operand, False, *_shared_lead(shape[:-2], lead))
        for operand, shape in zip(anchor.inputs, shapes, strict=True)
    )
    mask = anchor.attributes["mask"]
    return Products(
        anchor=anchor,
        query=query,
        key=key,
        value=value,
        output=Side(anchor.value, False, lead),
        scores=ScorePath(anchor.value, 2, scale=float(anchor.attributes["scale"])),  # type: ignore[arg-type]
        obstacles=(DROPOUT,) if anchor.attributes.get("dropout") else (),
        talking_heads=False,
        escape=False,
        causal=bool(anchor.attributes["causal"]),
        mask=str(mask) if mask else None,
    )


def _shared_lead(own: tuple[int, ...], lead: tuple[int, ...]) -> tuple[tuple[int, ...], np.ndarray | None]:
    """(lead shape, order) of an operand whose heads may serve several query heads each."""
    own = (1,) * (len(lead) - len(own)) + own
    if all(mine in (1, full) for mine, full in zip(own, lead, strict=True)):
        return lead, None
    places = np.indices(lead).reshape(len(lead), -1)
    shared = [place * mine // full for place, mine, full in zip(places, own, lead, strict=True)]
    return own, np.ravel_multi_index(shared, own)


def softmax_products(graph: GraphView, anchor: Operation) -> Products | Refusal:
    """A softmax between two products: softmax(query key^T) value, or the transpose of either product."""
    axis = int(anchor.attributes["axis"])  # type: ignore[call-overload]
    scores = walk_back(graph, anchor.inputs[0])
    if isinstance(scores, NoProduct):
        return _no_product(graph, anchor, scores)
    scores = scores.scaled(float(anchor.attributes.get("factor", 1.0)))  # type: ignore[arg-type]
    to_softmax = (*scores.path, anchor.value)
    keys = varying_axis(graph, scores.product, to_softmax, axis)
    if axis in graph.batch_axes(anchor.value):
        return BATCH_MIXING
    if keys in ("row", "column") and _runs_over_batch(graph, scores.product, keys):
        if graph.shape(anchor.value)[axis] == _length(graph, scores.product, keys):
            return BATCH_MIXING
        return Refusal(
            "partial-axis",
            "the softmax runs over a part of the product's axis, which holds images or tokens beside the keys",
        )
    if keys not in ("row", "column"):
        return Refusal(
            "wrong-axis",
            "the softmax runs over an axis that is neither queries nor keys of the product before it",
        )
    after = walk_forward(graph, anchor.value)
    readers = [p for p in after.products if _contracted(graph, scores.product, (*to_softmax, *p.path), p) == keys]
    if not readers:
        return _no_values(graph, scores, to_softmax, after, keys)
    reader = readers[0]
    order = _lead_order(graph, scores.product, [(*to_softmax, *way) for way in (reader.path, *reader.others)])
    if isinstance(order, Refusal):
        return order
    found = _assemble(graph, anchor, scores, after, readers, order, keys)
    moved = _rearranged(graph, found, (*to_softmax, *reader.path), reader) or _partial(graph, found, axis)
    return found if moved is None else replace(found, obstacles=(*found.obstacles, moved))


def loose_exponentials(graph: GraphView, operation: Operation) -> Refusal | None:
    """What is wrong with exponentials of scores that weigh values and are no softmax; None where they are no such."""
    exponent = loose_scores(graph, operation)
    if exponent is None:
        return None
    scores = walk_back(graph, exponent)
    if isinstance(scores, NoProduct) or scores.certainty < 2 or not walk_forward(graph, operation.value).products:
        return None
    why = "exponentials of scores weigh values, and are not seen to be divided by their own sum over the keys"
    return Refusal("unnormalised", f"{why}: where they are, write that as a softmax")


def _assemble(
    graph: GraphView,
    anchor: Operation,
    scores: ScorePath,
    after: Probabilities,
    readers: list[ValuePath],
    order: np.ndarray,
    keys: str,
) -> Products:
    reader = readers[0]
    left, right = graph.operation(scores.product).inputs
    lead = graph.shape(scores.product)[:-2]
    value_lead = graph.shape(reader.product)[:-2]
    turned = graph.operation(reader.product).inputs[0] != reader.probabilities  # values^T probabilities^T
    first, second = Side(left, False, lead), Side(right, True, lead)
    return Products(
        anchor=anchor,
        query=first if keys == "column" else second,
        key=second if keys == "column" else first,
        value=Side(reader.values, turned, value_lead, order),
        output=Side(str(anchor.attributes.get("divided", reader.product)), turned, value_lead, order),
        scores=scores,
        obstacles=(*scores.obstacles, *reader.obstacles),
        talking_heads=scores.talking_heads or reader.talking_heads,
        escape=after.escape or len(after.products) > 1,
        keys_are_rows=keys == "row",
    )


def _contracted(graph: GraphView, product: str, path: tuple[str, ...], reader: ValuePath) -> str:
    """Which axis of the scores the product with the values sums over."""
    is_left = graph.operation(reader.product).inputs[0] == reader.probabilities
    rank = len(graph.shape(reader.probabilities))
    return varying_axis(graph, product, path, rank - 1 if is_left else rank - 2)


def _rearranged(graph: GraphView, found: Products, path: tuple[str, ...], reader: ValuePath) -> Refusal | None:
    """Why the score of query n and key m is not what weighs value m for query n: it is rolled, cut or padded."""
    rows, columns = graph.shape(found.scores.product)[-2:]
    index = push(graph, found.scores.product, path)
    if graph.operation(reader.product).inputs[0] != reader.probabilities:
        index = np.swapaxes(index, -1, -2)
    index = index.reshape(-1, *index.shape[-2:])
    if found.keys_are_rows:
        queries, keys, steps = columns, rows, (1, columns)
    else:
        queries, keys, steps = rows, columns, (columns, 1)
    own = np.arange(queries)[:, None] * steps[0] + np.arange(keys) * steps[1]
    if index.shape[1:] == own.shape and (index - index[:, :1, :1] == own).all():
        return None
    return Refusal("rearranged-scores", "scores or probabilities are rearranged, cut or padded along queries or keys")


def _partial(graph: GraphView, found: Products, axis: int) -> Refusal | None:
    """Why the softmax does not run over all keys of one query."""
    rows, columns = graph.shape(found.scores.product)[-2:]
    keys, step = (rows, columns) if found.keys_are_rows else (columns, 1)
    index = np.moveaxis(push(graph, found.scores.product, found.scores.path), axis, -1)
    query = index - index // step % keys * step
    if index.shape[-1] == keys and (query == query[..., :1]).all():
        return None
    return Refusal("partial-softmax", "the softmax runs over a part of the keys, or over several queries")


def _lead_order(graph: GraphView, product: str, ways: Sequence[tuple[str, ...]]) -> np.ndarray | Refusal:
    """For each lead entry of the scores, where it stands among those of the product with the values.

    `ways` lead from the one product to the other: by several, where heads are combined (differential attention).
    """
    shape = graph.shape(product)
    order = np.full(int(np.prod(shape[:-2], dtype=int)), -1)
    for way in ways:
        index = push(graph, product, way)
        first = index.reshape(-1, *index.shape[-2:]).max(axis=(1, 2)) // (shape[-1] * shape[-2])
        if len(np.unique(first)) == len(first) <= len(order) and first.min() >= 0:
            order[first] = np.arange(len(first))
        if (order >= 0).all():
            return order
    return Refusal("mixed-heads", "the probabilities are rearranged across heads before they meet the values")


def _length(graph: GraphView, product: str, keys: str) -> int:
    return graph.shape(product)[-1 if keys == "column" else -2]


def _runs_over_batch(graph: GraphView, product: str, keys: str) -> bool:
    rank = len(graph.shape(product))
    return (rank - 1 if keys == "column" else rank - 2) in graph.batch_axes(product)


DROPOUT = Refusal("active-dropout", "its probabilities pass through dropout")
BATCH_MIXING = Refusal("batch-mixing", "the keys' axis grows with the batch: it attends over images, not over tokens")


def _no_product(graph: GraphView, anchor: Operation, stop: NoProduct) -> Refusal:
    found = stop.stopped_at
    if graph.is_constant(anchor.inputs[0]):
        return Refusal("constant", "the softmax does not depend on the input")
    if not graph.users(anchor.value) or all(
        graph.operation(user).name == "output" for user in graph.users(anchor.value)
    ):
        return Refusal("output", f"the softmax makes an output of the model from {found.name}, not attention")
    detail = f"the softmax's input comes from {found.name} ({found.value}), not from a product of queries and keys"
    return Refusal("no-product", detail)


def _no_values(graph: GraphView, scores: ScorePath, path: tuple[str, ...], after: Probabilities, keys: str) -> Refusal:
    for reader in after.products:
        along = _contracted(graph, scores.product, (*path, *reader.path), reader)
        if along in ("row", "column") and along != keys:
            return Refusal(
                "normalised-over-queries",
                "the softmax runs over one axis of the scores and the product with the values over the other",
            )
    if after.weigh_weights:
        return Refusal("no-values", "the probabilities weigh what is made of weights alone, no values of the input")
    return Refusal("no-values", "no product with values reads the probabilities")
