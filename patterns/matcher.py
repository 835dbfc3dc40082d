"""The matcher: every softmax, SDPA or attention op ends as an AttentionSite or as a NearMiss with a reason."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.axes import LeadAxes, Side, crosses_layout, crosses_pooling, is_aligned, operand, split_lead
from attnrewrite.patterns.graph import ComputedConstants, GraphView, Operation
from attnrewrite.patterns.grid import find_grid
from attnrewrite.patterns.groups import with_groups
from attnrewrite.patterns.masks import LOW, is_of_heads, is_of_keys, is_of_queries
from attnrewrite.patterns.products import Products, fused_products, loose_exponentials, softmax_products
from attnrewrite.patterns.projections import Tracers, trace_output, trace_projection
from attnrewrite.patterns.provenance import Tracer, layout_of, numbered, push
from attnrewrite.patterns.quantised import quantised_around
from attnrewrite.patterns.relations import (
    ancestors,
    batch_size,
    common_scope,
    is_cross,
    region,
    uses_norm,
    uses_rotation,
)
from attnrewrite.patterns.scores import Joined
from attnrewrite.patterns.weights import fingerprint
from attnrewrite.site import Anchor, AttentionSite, Bias, Core, Layout, NearMiss, Operand, Projection, Scan, Term

V_co = TypeVar("V_co", bound=GraphView, covariant=True)


@dataclass(frozen=True)
class Scanned(Generic[V_co]):
    """A graph and what was found in it: a scan is made once, and travels with its graph."""

    graph: V_co
    scan: Scan


def scan(graph: GraphView, model: str) -> Scan:
    """Every attention of a graph, in graph order: a site or a near miss for each softmax and attention operator."""
    readers = {False: _Reader(graph), True: _Reader(cast(GraphView, ComputedConstants(graph)))}
    sites: list[AttentionSite] = []
    misses: list[NearMiss] = []
    for value in graph.values:
        operation = graph.operation(value)
        if loose := loose_exponentials(graph, operation):
            misses.append(NearMiss(loose.code, loose.sentence, "softmax", value, (value,)))
        if operation.kind not in ("softmax", "sdpa"):
            continue
        reader = readers[graph.is_constant(value)]
        result = quantised_around(graph, value) or reader.read(value, len(sites))
        if isinstance(result, NearMiss):
            misses.append(result)
        else:
            sites.append(result)
    return with_groups(graph, Scan(model, graph.frontend, tuple(sites), tuple(misses)))


class _Reader:
    """A graph with its tracers."""

    def __init__(self, graph: GraphView) -> None:
        self.graph = graph
        live = cast(GraphView, ComputedConstants(graph))
        strict = Tracer(live)
        layout = Tracer(live, lambda operation: crosses_layout(live, operation), strict)
        pooled = Tracer(live, lambda operation: crosses_pooling(live, operation), layout)
        self.tracers = Tracers(strict, layout, pooled)

    def read(self, value: str, number: int) -> AttentionSite | NearMiss:
        operation = self.graph.operation(value)
        products_of = fused_products if operation.kind == "sdpa" else softmax_products
        found: Products | AttentionSite | Refusal = products_of(self.graph, operation)
        if isinstance(found, Products):
            self.tracers.forget()
            found = _site(self.graph, self.tracers, _without_neutral(self.graph, found), number)
        if isinstance(found, AttentionSite):
            return found
        anchor = "attention-op" if operation.attributes.get("opaque") else operation.kind
        return NearMiss(found.code, found.sentence, anchor, value, (value,))


def _site(graph: GraphView, tracers: Tracers, found: Products, number: int) -> AttentionSite | Refusal:
    strict, layout = tracers.strict, tracers.layout
    lead_axes = split_lead(graph, layout, found.query, found.key, found.value)
    if isinstance(lead_axes, Refusal):
        return Refusal(lead_axes.code, f"{lead_axes} at {found.anchor.value}")
    sides = (found.query, found.key, found.value)
    query, key, value = (trace_projection(graph, tracers, side, lead_axes) for side in sides)
    own = {source for side in sides for source in layout.trace(side.value).sources}
    output = trace_output(graph, found.output, lead_axes, lambda value: own.issuperset(layout.trace(value).sources))
    n_queries, head_dim = found.query.lines(np.empty(graph.shape(found.query.value), np.int8)).shape[1:]
    n_keys, value_dim = found.value.lines(np.empty(graph.shape(found.value.value), np.int8)).shape[1:]
    core = _core(graph, layout, found, lead_axes)
    windows, bias = _windows(graph, lead_axes), _bias(graph, found)
    traced_query = query if isinstance(query, Projection) else None
    is_token = lead_axes.axis == "token"
    return AttentionSite(
        id=f"site{number}",
        name=common_scope(graph, (found.anchor.value, found.output.value)) or found.anchor.value,
        frontend=graph.frontend,
        anchor=_anchor(found.anchor),
        kind="cross"
        if is_cross(graph, *(_tokens_behind(graph, layout, side) for side in (found.query, found.key)))
        else "self",
        axis="token" if is_token else "channel",
        heads=lead_axes.heads,
        kv_heads=lead_axes.kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        n_queries=n_queries,
        n_keys=n_keys,
        windows=windows,
        scale=_total_scale(strict, found),
        bias=bias,
        core=core if isinstance(core, Core) else None,
        query=query,
        key=key,
        value=value,
        output=output,
        core_reason=core if isinstance(core, Refusal) else None,
        grid=find_grid(graph, strict, traced_query, n_queries, windows) if is_token and n_queries == n_keys else None,
        bias_of_keys=bias in ("constant", "input") and isinstance(core, Core) and _of_keys(graph, core),
        causal=found.causal,
        qk_norm=uses_norm(graph, layout, found.query.value) or uses_norm(graph, layout, found.key.value),
        rope=uses_rotation(graph, layout, found.query.value) or uses_rotation(graph, layout, found.key.value),
        talking_heads=found.talking_heads,
        probs_escape=found.escape,
        fingerprint=fingerprint(graph, (query, key, value, output)),
        nodes=region(graph, (found.query.value, found.key.value, found.value.value), found.output.value),
    )


def _without_neutral(graph: GraphView, found: Products) -> Products:
    """`found` without what changes no probability: constant masks that let everything through, constant zeros added,
    and a query's largest or mean score taken away from all its keys, unless a mask writes a number over some later.
    """
    terms = list(found.scores.terms)
    for place, term in reversed(list(enumerate(terms))):
        fixed = any(later.dropped is not None and later.filling > -np.inf for later in terms[place + 1 :])
        if _lets_all_through(graph, term.operand, term.dropped) or (not fixed and _is_of_queries(graph, found, term)):
            del terms[place]
    mask = found.mask
    if mask and _lets_all_through(graph, mask, False if graph.is_boolean(mask) else None):
        mask = None
    return replace(found, scores=replace(found.scores, terms=tuple(terms)), mask=mask)


def _lets_all_through(graph: GraphView, value: str, dropped: bool | None) -> bool:
    if not graph.is_constant(value):
        return False
    elements = graph.constant(value)
    return not (elements if dropped is None else elements == dropped).any()


def _is_of_queries(graph: GraphView, found: Products, term: Joined) -> bool:
    """Whether `term` adds one number to all keys of a query, no larger than its scores: beside a much larger one, as
    masks of queries have, scores are rounded away.
    """
    path, made = found.scores.path, graph.operation(term.operand)
    while made.kind == "move" and len(made.inputs) == 1:
        made = graph.operation(made.inputs[0])
    if made.name not in ("amax", "max", "amin", "min", "mean") or made.inputs[0] not in (found.scores.product, *path):
        return False
    index = push(graph, found.scores.product, path[: path.index(term.value) + 1])
    rows, columns = graph.shape(found.scores.product)[-2:]
    keys, stride = (rows, columns) if found.keys_are_rows else (columns, 1)
    return is_of_queries(graph, term.operand, index, keys, stride)


def _anchor(operation: Operation) -> Anchor:
    if operation.kind == "sdpa":
        return "attention-op" if operation.attributes.get("anchor") == "attention-op" else "sdpa"
    return "softmax"


def _windows(graph: GraphView, lead_axes: LeadAxes) -> int:
    return max(lead_axes.batch // batch_size(graph), 1)


def _tokens_behind(graph: GraphView, layout: Tracer, side: Side) -> str:
    """The tokens that an operand is projected from."""
    if graph.is_constant(side.value):
        return side.value
    operation = graph.operation(layout.trace(side.value).sources[-1])
    return operation.inputs[0] if operation.kind in ("linear", "conv") else operation.value


def _total_scale(strict: Tracer, found: Products) -> float | None:
    if found.scores.temperature is not None:
        return None
    return found.scores.scale * strict.trace(found.query.value).factor * strict.trace(found.key.value).factor


def _bias(graph: GraphView, found: Products) -> Bias:
    operands = [term.operand for term in found.scores.terms] + ([found.mask] if found.mask else [])
    live = [operand for operand in operands if not graph.is_constant(operand)]
    if not operands:
        return "none"
    if not live:
        return "constant"
    made_from = ancestors(graph, found.query.value, frozenset({"linear", "conv", "matmul", "norm"}))
    nearest = {value for value in made_from if graph.operation(value).kind != "input"}
    return "depends-on-query" if any(nearest & set(ancestors(graph, operand)) for operand in live) else "input"


def _of_keys(graph: GraphView, core: Core) -> bool:
    return bool(core.terms) and all(is_of_keys(graph, term) for term in core.terms)


def _core(graph: GraphView, layout: Tracer, found: Products, lead_axes: LeadAxes) -> Core | Refusal:
    """The site's core as graph tensors; a refusal where it is more than a core can say."""
    if found.obstacles:
        return found.obstacles[0]
    if found.talking_heads:
        return Refusal("talking-heads", "scores or probabilities are mixed across heads")
    if found.causal:
        return Refusal("causal-mask", "its mask is causal")
    operands = {}
    for role in ("query", "key", "value", "output"):
        read = operand(graph, getattr(found, role), lead_axes)
        if isinstance(read, Refusal):
            why = "an operand's axes do not fold into batch, heads, tokens and channels"
            return Refusal(read.code, why)
        operands[role] = read
    terms = [_joined(graph, found, lead_axes, added) for added in found.scores.terms]
    if found.mask:
        terms.append(_fused_mask(graph, found, lead_axes))
    if found.scores.temperature:
        terms.append(_joined(graph, found, lead_axes, found.scores.temperature))
    joined = []
    for term in terms:
        if isinstance(term, Refusal):
            why = "a tensor that joins the scores does not fold into batch, heads, queries and keys"
            return Refusal(term.code, why)
        joined.append(term)
    temperature = joined.pop() if found.scores.temperature else None
    if temperature and not is_of_heads(graph, temperature):
        why = "its scores are multiplied by a tensor that is not proven to be one number for each image and head"
        return Refusal("scores-multiplied", why)
    if uneven := _uneven_filling(graph, joined):
        return uneven
    if not is_aligned(graph, layout, found.key, found.value) and lead_axes.axis == "token":
        return Refusal("unaligned-values", "its keys and values are not in the same order of tokens")
    multiplied = temperature.operand if temperature else None
    return Core(**operands, scale=found.scores.scale, temperature=multiplied, terms=tuple(joined))


def _uneven_filling(graph: GraphView, terms: list[Term]) -> Refusal | None:
    """Why masks that write a finite number over scores cannot be honoured in any order: see `Core.filling`."""
    fillings = {term.filling for term in terms if term.dropped is not None}
    if not all(filling <= LOW for filling in fillings):
        return Refusal("weak-mask", f"what a mask writes over its scores is, by the softmax, not below {LOW:g}")
    if len(fillings) > 1:
        return Refusal("several-fillings", "its masks write several numbers over scores")
    if fillings <= {-np.inf}:
        return None
    masks = [place for place, term in enumerate(terms) if term.dropped is not None]
    added = [(place, term.operand.value) for place, term in enumerate(terms) if term.dropped is None]
    settled = all(graph.is_constant(value) and np.isfinite(graph.constant(value)).all() for _, value in added)
    if not settled or any(place > masks[0] for place, _ in added):
        why = "a mask writes a finite number over its scores, and what is added beside may change that or be infinite"
        return Refusal("biased-filling", why)
    return None


def _joined(graph: GraphView, found: Products, lead_axes: LeadAxes, added: Joined) -> Term | Refusal:
    """A tensor that meets the scores at `added.value`, with the layout of the scores there."""
    path = found.scores.path
    index = push(graph, found.scores.product, path[: path.index(added.value) + 1])
    shape = graph.shape(found.scores.product)
    place = np.full(int(np.prod(shape, dtype=int)), -1, index.dtype)
    place[index.reshape(-1)] = numbered((index.size,))
    numbers = Side(found.scores.product, found.keys_are_rows, shape[:-2]).numbers(graph)
    position = place[lead_axes.split(numbers)]
    layout = layout_of(position, index.shape, graph.batch_axes(added.value))
    if isinstance(layout, Refusal):
        return layout
    return Term(Operand(added.operand, layout), added.factor, added.dropped, added.filling)


def _fused_mask(graph: GraphView, found: Products, lead_axes: LeadAxes) -> Term | Refusal:
    assert found.mask is not None
    lead = graph.shape(found.anchor.value)[:-2]
    axes = frozenset(axis for axis in graph.batch_axes(found.anchor.value) if axis < len(lead))
    folded = layout_of(lead_axes.lead[..., None, None], (*lead, 1, 1), axes)
    if isinstance(folded, Refusal):
        return folded
    scores = graph.shape(found.query.value)[-2], graph.shape(found.key.value)[-2]
    shape, split, inner = folded.shape[: len(lead)], folded.split, len(folded.split)
    layout = Layout((*shape, *scores), (*split, *scores), folded.batch, folded.heads, (inner,), (inner + 1,))
    return Term(Operand(found.mask, layout), dropped=False if graph.is_boolean(found.mask) else None)
