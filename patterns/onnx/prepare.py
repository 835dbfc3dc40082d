"""From an ONNX model to what the view reads: functions inlined, fused operators written out, every size known."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from attnrewrite.errors import InputError, Refusal
from attnrewrite.patterns.onnx.branches import take_branch
from attnrewrite.patterns.onnx.fused import write_out
from attnrewrite.patterns.onnx.operators import UNQUANTISED_FILE, unreadable
from attnrewrite.patterns.onnx.sizes import PRIVATE, Size, Sizes, advance, input_sizes, reading, start
from attnrewrite.site import NearMiss

HINT = 2  # the batch that an open model is read with
_QUANTISED = ("QLinear", "QAttention", "QOrdered", "Quantized", "DynamicQuantize")
_NO_ATTENTION = frozenset({"LogSoftmax", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "HardSoftmax"})


@dataclass
class Prepared:
    """A private copy of a model and what is known of its values.

    `batch_axes` names the axes that follow the batch size; a value that is absent has none. `unread` are attentions
    that the view does not show: in the body of a loop, quantised, or with a cache. `batch` is the
    batch it was read with; `varying` are the small values whose elements change with it.
    """

    model: ir.Model
    opsets: Mapping[str, int]
    sizes: Sizes
    batch_axes: Mapping[str, frozenset[int]]
    batch: int
    unread: list[NearMiss] = field(default_factory=list)
    varying: frozenset[str] = frozenset()

    @property
    def open_batch(self) -> bool:
        return any(self.batch_axes.values())


def prepare(model: ir.Model, given: Mapping[str, Size] | None = None) -> Prepared:
    """Read a model with a batch of two, and once more with three where its first axes are open, to tell what follows.

    Raises:
        InputError: the graph is cyclic, a node does not take its operands, or an open axis is not given.
    """
    copy = inlined(model)
    opsets = opset_versions(copy)
    if not _is_open(copy):
        return _read(copy, opsets, HINT, given)
    try:
        found = _read(copy, opsets, HINT, given)
    except InputError as error:
        try:
            return _read(copy, opsets, 1, given)  # open by name, but its nodes hold a batch of one
        except InputError:
            raise error from None
    try:
        wider = _read(inlined(model), opsets, HINT + 1, given)
    except InputError:
        return found  # its nodes hold a batch of two
    if found.sizes.size.keys() != wider.sizes.size.keys():
        return found  # what is written out with two is not with three: they hold positions of two images
    found.batch_axes = {name: _differing(size, wider.sizes.size[name]) for name, size in found.sizes.size.items()}
    elements = wider.sizes.known
    found.varying = frozenset(
        name for name, array in found.sizes.known.items() if not np.array_equal(array, elements.get(name, array))
    )
    return found


def opset_versions(model: ir.Model) -> dict[str, int]:
    """The version of each domain that the model's operators are of, ONNX's own under its short name ""."""
    return {("" if domain == "ai.onnx" else domain): version for domain, version in model.opset_imports.items()}


def inlined(model: ir.Model) -> ir.Model:
    """A copy that shares the tensors, in topological order, without functions. `model` is put in that order, too, which
    nothing can be copied without: converters to float16 put their casts last.

    Raises:
        InputError: the graph or a function calls itself.
    """
    try:
        model.graph.sort()
        copy = model.clone()
        if copy.functions:
            InlinePass()(copy)
        copy.graph.sort()
    except Exception as error:  # onnx_ir raises ValueError, or RuntimeError around it
        why = "its nodes or functions read what follows from themselves"
        raise InputError(f"the graph cannot be put in order: {why}; export it again") from error
    return copy


def _is_open(model: ir.Model) -> bool:
    return any(value.shape is not None and not value.shape.is_static() for value in model.graph.inputs)


def _differing(size: Size, wider: Size) -> frozenset[int]:
    return frozenset(axis for axis, (mine, theirs) in enumerate(zip(size, wider, strict=True)) if mine != theirs)


def _read(model: ir.Model, opsets: Mapping[str, int], batch: int, given: Mapping[str, Size] | None) -> Prepared:
    """Find the sizes; on the way, write out what is fused and take the branches that are always taken."""
    graph = model.graph
    sizes = start(graph, input_sizes(graph, batch, given))
    unread: list[NearMiss] = []
    for node in graph:
        with reading(node):
            refusal = write_out(graph, node, sizes, opsets)
            if node.graph is None or take_branch(graph, node, sizes):  # replaced: its nodes come next
                continue
            advance(sizes, node, opsets)
            unread += _unread(node, sizes, refusal)
    return Prepared(model, opsets, sizes, {}, batch, unread)


def _unread(node: ir.Node, sizes: Sizes, refusal: Refusal | None) -> Iterator[NearMiss]:
    """What attends in `node` but cannot be shown to the matcher; `refusal` says why it was not written out."""
    if refusal is not None and attends(node):
        yield _miss(node, Refusal("unsupported-operator", refusal.sentence))
    elif attends(node) and not _is_anchor(node):
        quantised = any(node.op_type.startswith(prefix) for prefix in _QUANTISED)
        if quantised:
            yield _miss(node, Refusal("quantized", f"it computes on integers; {UNQUANTISED_FILE}"))
        else:
            yield _miss(node, Refusal("unsupported-operator", "no rule writes it out in plain operators"))
    elif attends(node) and node.outputs[0].name not in sizes.size:
        yield _miss(node, _unsized(node, sizes))
    for body in _bodies(node):
        for inner in ir.traversal.RecursiveGraphIterator(body):
            if attends(inner):
                why = f"it stands in the body of {node.op_type} {node.name!r}, which may run many times or never"
                yield _miss(inner, Refusal("control-flow", why))


def _unsized(node: ir.Node, sizes: Sizes) -> Refusal:
    """Why the sizes of what `node` reads are not known: the first node behind it that makes what has none."""
    maker = node
    while behind := next((each for each in maker.predecessors() if each.outputs[0].name not in sizes.size), None):
        maker = behind
    known = unreadable(maker.domain, maker.op_type) or Refusal("unknown-size", "its result depends on the data")
    return replace(known, sentence=f"its operands have no known size, from {maker.op_type} {maker.name!r} on: {known}")


def attends(node: ir.Node) -> bool:
    """Whether an operator is a softmax or an attention, by whatever name."""
    return ("Softmax" in node.op_type or "Attention" in node.op_type) and node.op_type not in _NO_ATTENTION


def _is_anchor(node: ir.Node) -> bool:
    return (node.op_type == "Softmax" and node.domain in ("", "ai.onnx")) or node.domain == PRIVATE


def _miss(node: ir.Node, why: Refusal) -> NearMiss:
    anchor = "softmax" if "Softmax" in node.op_type else "attention-op"
    name = node.outputs[0].name or node.name or ""
    return NearMiss(why.code, f"{node.op_type} {node.name!r}: {why}", anchor, name, (name,))


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()
