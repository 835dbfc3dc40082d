"""One ONNX node being translated: its operands, attributes and sizes, and the torch calls that it becomes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch
from torch.fx import Graph, Node

from attnrewrite.errors import InputError
from attnrewrite.patterns.onnx.graph import OnnxGraph

# What an operator becomes: a node, or a list of them where it has several outputs, with None for one it cannot give.
Translation = Callable[["Call"], Any]


class Importer(Protocol):
    """What a translation needs of the import that it is part of."""

    view: OnnxGraph
    graph: Graph

    def operand(self, name: str, call: "Call | None") -> Node:
        """The FX node of an ONNX value."""

    def is_constant(self, name: str) -> bool:
        """Whether an ONNX value is a constant in the module, too."""

    def size(self, name: str) -> list[Any]:
        """The size of an ONNX value as arguments: numbers, and what follows the batch as a multiple of it."""

    def buffer(self, array: np.ndarray, name: str) -> Node:
        """Numbers that a translation needs, as a buffer of the module."""


def torch_dtype(number: int) -> torch.dtype:
    """The torch type of an ONNX element type.

    Raises:
        InputError: torch has none.
    """
    name = ir.DataType(number).name.lower()
    aliases = {"float": "float32", "double": "float64"}
    found = getattr(torch, aliases.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no type for ONNX's {name}")
    return found


@dataclass(frozen=True)
class Call:
    """One ONNX node being translated."""

    importer: Importer
    node: ir.Node

    def emit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Node:
        return self.importer.graph.call_function(function, arguments, named)

    def has(self, place: int) -> bool:
        return place < len(self.node.inputs) and self.node.inputs[place] is not None

    def name(self, place: int) -> str:
        operand = self.node.inputs[place]
        assert operand is not None
        return str(operand.name)

    def operand(self, place: int) -> Any:
        """The FX node of an operand; None where it is left out."""
        return self.importer.operand(self.name(place), self) if self.has(place) else None

    def operands(self) -> list[Any]:
        return [self.operand(place) for place in range(len(self.node.inputs)) if self.has(place)]

    def is_settled(self, place: int) -> bool:
        """Whether an operand is a constant, of as many and the same elements for any batch."""
        name, view = self.name(place), self.importer.view
        return self.importer.is_constant(name) and not view.batch_axes(name) and name not in view.prepared.varying

    def numbers(self, place: int) -> np.ndarray:
        """The elements of a constant operand."""
        if not self.importer.is_constant(self.name(place)):
            raise self.unsupported(f"its operand {self.name(place)!r} is not constant")
        return self.importer.view.constant(self.name(place))

    def whole_numbers(self, place: int) -> list[int]:
        return [int(number) for number in self.numbers(place).reshape(-1)]

    def shape(self, place: int) -> tuple[int, ...]:
        return self.importer.view.shape(self.name(place))

    def size(self, place: int = 0) -> list[Any]:
        """The size of an output as an argument: numbers, and what follows the batch as a multiple of it."""
        return self.importer.size(str(self.node.outputs[place].name))

    def result(self, place: int = 0) -> tuple[int, ...]:
        return self.importer.view.shape(str(self.node.outputs[place].name))

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def axis(self, default: int) -> int:
        """The attribute `axis` of the first operand, counted from its first axis. InputError where it has none such."""
        axis, rank = self.attribute("axis", default), len(self.shape(0))
        if not -rank <= axis < rank:
            raise self.unsupported(f"its operand of {rank} axes has no axis {axis}")
        return axis % rank

    @property
    def opset(self) -> int:
        return self.importer.view.prepared.opsets.get("", 1)

    def unsupported(self, why: str) -> InputError:
        where = f"{self.node.op_type} (node {self.node.name!r}, opset {self.opset})"
        return InputError(f"{where} cannot be imported into torch: {why}")
