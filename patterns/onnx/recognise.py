"""What is several ONNX nodes and one operation to the matcher: a product and its bias, a LayerNorm."""

import ast
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from attnrewrite.patterns.graph import Operation

_SCOPES = "pkg.torch.onnx.name_scopes"  # written by torch's exporter: the module path, outermost first, and the node


@dataclass(frozen=True)
class BiasedProduct:
    """total = reshape(tokens weight) + bias, read as the linear map `linear`.

    `linear` is `total` where the channels stay the last axis. Where they were split into heads before the bias was
    added, it is a value of the view alone, and `total` a reshape of it. `hidden` are the values in between.
    """

    total: str
    product: str
    linear: str
    tokens: str
    weight: str
    bias: str
    hidden: tuple[str, ...]


class Known(Protocol):
    """What is known of the values of a graph."""

    def operation(self, value: str) -> Operation: ...

    def shape(self, value: str) -> tuple[int, ...]: ...

    def is_constant(self, value: str) -> bool: ...

    def is_sized(self, value: str) -> bool: ...


def biased_product(node: ir.Node, known: Known) -> BiasedProduct | None:
    """The linear map that ends in the addition `node`, or None."""
    if node.op_type != "Add" or node.domain not in ("", "ai.onnx"):
        return None
    for value, bias in (node.inputs, reversed(node.inputs)):
        if value is None or bias is None or not known.is_constant(str(bias.name)):
            continue
        passed, producer = [str(value.name)], value.producer()
        while producer is not None and producer.op_type == "Reshape" and _read_once(producer.outputs[0]):
            before = producer.inputs[0]
            passed.append(str(before.name if before is not None else ""))
            producer = before.producer() if before is not None else None
        if producer is not None and producer.op_type == "MatMul" and _read_once(producer.outputs[0]):
            found = _as_linear(node, producer, str(bias.name), tuple(passed), known)
            if found is not None:
                return found
    return None


def _as_linear(
    node: ir.Node, product: ir.Node, bias: str, passed: tuple[str, ...], known: Known
) -> BiasedProduct | None:
    total = str(node.outputs[0].name)
    operation = known.operation(str(product.outputs[0].name))
    if operation.kind != "linear" or not known.is_sized(total):
        return None
    tokens, weight = operation.inputs
    width, full, tail = known.shape(weight)[-1], known.shape(total), list(known.shape(bias))
    while tail and tail[0] == 1:
        del tail[0]
    if math.prod(full) != math.prod(known.shape(passed[-1])):
        return None
    if width == 1 or math.prod(tail) != width or list(full[-len(tail) :]) != tail:
        return None
    linear = total if full[-1] == width else f"{total}/linear"
    return BiasedProduct(total, str(product.outputs[0].name), linear, tokens, weight, bias, passed)


def _read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def normalised_by_hand(division: ir.Node) -> str | None:
    """The value that (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) normalises, when `division` ends that."""
    centred, deviation = (operand.producer() if operand is not None else None for operand in division.inputs)
    if centred is None or deviation is None or centred.op_type != "Sub" or deviation.op_type != "Sqrt":
        return None
    source, mean = centred.inputs
    if source is None or mean is None or not _is_mean_of(mean, source):
        return None
    shifted = deviation.inputs[0].producer() if deviation.inputs[0] is not None else None
    if shifted is None or shifted.op_type != "Add":
        return None
    for operand in shifted.inputs:
        reduced = operand.producer() if operand is not None else None
        if reduced is not None and reduced.op_type == "ReduceMean" and reduced.inputs[0] is not None:
            squared = reduced.inputs[0].producer()
            if squared is not None and squared.op_type in ("Pow", "Mul") and _same(squared.inputs[0], centred, source):
                return source.name
    return None


def _is_mean_of(value: ir.Value, source: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "ReduceMean" and node.inputs[0] is source


def _same(value: ir.Value | None, centred: ir.Node, source: ir.Value) -> bool:
    """Whether a value is x - mean(x), through casts, also when it is written out a second time."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and (node is centred or (node.op_type == "Sub" and node.inputs[0] is source))


def attribute_name(value: str) -> str:
    """The name under which a module holds a constant of the graph: an identifier, unlike for unlike values."""
    plain = re.sub(r"\W", "_", value)
    if plain == value and not plain[:1].isdigit():
        return plain
    return f"c_{plain}_{hashlib.blake2b(value.encode(), digest_size=3).hexdigest()}"


def scope_of(node: ir.Node) -> str:
    """The module path that a node was exported from, dotted; else the path in its name."""
    written = node.metadata_props.get(_SCOPES)
    if written:
        try:
            scopes = ast.literal_eval(written)
        except (ValueError, SyntaxError):
            scopes = None
        if isinstance(scopes, list) and len(scopes) > 1:
            return str(scopes[-2])
    parts = (node.name or "").strip("/").split("/")[:-1]
    kept: list[str] = []
    for part in parts:  # torch's older exporter repeats the list before the item: /blocks/blocks.0/attn
        if kept and part.startswith(kept[-1] + "."):
            kept.pop()
        kept.append(part)
    return ".".join(kept)
