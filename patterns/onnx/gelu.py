"""GELU as exporters decompose it: recognised by what the nodes compute, not by their order."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import InputError
from attnrewrite.patterns.onnx.sizes import evaluate

Approximate = Literal["none", "tanh"]

_PARTS = frozenset({"Mul", "Div", "Add", "Sub", "Erf", "Tanh", "Pow", "Identity"})
MOST_NODES = 12  # nodes of the longest decomposition, by a tanh with its cube written out
_GRID = np.linspace(-4.0, 4.0, 33, dtype=np.float32)
_ROUNDING = 2e-3  # constants may be stored in half precision


def gelu_argument(node: ir.Node, opsets: Mapping[str, int]) -> tuple[ir.Value, Approximate] | None:
    """x and its kind where `node` makes GELU(x), else None."""
    if node.op_type in ("Gelu", "FastGelu") and len(node.inputs) == 1 and node.inputs[0] is not None:
        named = node.attributes["approximate"].as_string() if "approximate" in node.attributes else "none"
        return node.inputs[0], "tanh" if node.op_type == "FastGelu" or named == "tanh" else "none"
    if node.op_type != "Mul":
        return None
    parts = _parts(node)
    kinds = {part.op_type for part in parts} & {"Erf", "Tanh"}
    if len(kinds) != 1:
        return None
    kind: Approximate = "none" if kinds == {"Erf"} else "tanh"
    for value in dict.fromkeys(operand for part in parts for operand in _live(part)):
        made = _computed(node, value, set(parts), opsets)
        if made is not None and np.allclose(made, gelu(_GRID, kind), rtol=0, atol=_ROUNDING):
            return value, kind
    return None


def gelu(x: np.ndarray, kind: Approximate) -> np.ndarray:
    """Hendrycks & Gimpel 2016, and its approximation by a tanh."""
    if kind == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * (1 + np.array([math.erf(number / math.sqrt(2)) for number in x]))


def _parts(last: ir.Node) -> list[ir.Node]:
    """`last` and the elementwise nodes right before it, nearest first."""
    found = [last]
    for node in found:
        for operand in _live(node):
            producer = operand.producer()
            if producer is None or producer.op_type not in _PARTS or producer in found or len(found) == MOST_NODES:
                continue
            found.append(producer)
    return found


def _live(node: ir.Node) -> Iterator[ir.Value]:
    return (operand for operand in node.inputs if operand is not None and _number(operand) is None)


def _number(value: ir.Value) -> np.ndarray | None:
    """The element of a constant of one element."""
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size != 1 else tensor.numpy().astype(np.float32).reshape(())


def _computed(last: ir.Node, argument: ir.Value, parts: set[ir.Node], opsets: Mapping[str, int]) -> np.ndarray | None:
    """What `last` makes of the grid in the place of `argument`, or None where it reads something else."""
    known: dict[ir.Value, np.ndarray] = {argument: _GRID}

    def value_of(value: ir.Value) -> np.ndarray | None:
        if value not in known:
            number, node = _number(value), value.producer()
            made = number if number is not None else None if node is None or node not in parts else result_of(node)
            if made is None:
                return None
            known[value] = made
        return known[value]

    def result_of(node: ir.Node) -> np.ndarray | None:
        arrays = [None if operand is None else value_of(operand) for operand in node.inputs]
        if any(array is None for array in arrays):
            return None
        try:
            return evaluate(node, arrays, opsets)[0].astype(np.float32)
        except InputError:
            return None

    return result_of(last)
