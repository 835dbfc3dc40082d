"""Writes a fused operator out as the plain ONNX nodes that it stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from attnrewrite.patterns.onnx.sizes import PRIVATE, Size, Sizes


class Writer:
    """Builds the nodes that stand in for `node`; their values are named after its first output."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.nodes: list[ir.Node] = []

    def one(
        self, op_type: str, operands: Sequence[ir.Value | None], name: str, domain: str = "", **attributes: object
    ) -> ir.Value:
        """The output of a new node."""
        stem, scope = f"{self.node.outputs[0].name}/{name}", dict(self.node.metadata_props)
        given: dict[str, Any] = {key: value for key, value in attributes.items() if value is not None}
        made = ir.node(op_type, operands, given, domain=domain, name=stem, metadata_props=scope)
        made.outputs[0].name = stem
        self.nodes.append(made)
        return made.outputs[0]

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        return self.one("Constant", [], name, value=ir.tensor(array))

    def reshape(self, value: ir.Value, shape: Sequence[int], name: str) -> ir.Value:
        """Reshape; 0 keeps the operand's length at that place."""
        return self.one("Reshape", [value, self.constant(np.array(shape, np.int64), f"{name}_shape")], name)

    def transpose(self, value: ir.Value, order: Sequence[int], name: str) -> ir.Value:
        return value if list(order) == sorted(order) else self.one("Transpose", [value], name, perm=list(order))

    def split_heads(self, value: ir.Value, heads: int, name: str) -> ir.Value:
        """[batch, tokens, heads * channels] as [batch, heads, tokens, channels]."""
        return self.transpose(self.reshape(value, (0, 0, heads, -1), f"{name}_split"), (0, 2, 1, 3), name)

    def join_heads(self, value: ir.Value) -> ir.Value:
        """[batch, heads, tokens, channels] as [batch, tokens, heads * channels]."""
        return self.reshape(self.transpose(value, (0, 2, 1, 3), "heads_last"), (0, 0, -1), "joined")

    def attend(self, split: Sequence[ir.Value], mask: ir.Value | None, causal: str) -> ir.Value:
        """The private Attention of query, key and value; scale and the attribute `causal` are the node's own."""
        operands = [*split, mask] if mask is not None else list(split)
        scale, is_causal = number(self.node, "scale"), integer(self.node, causal)
        return self.one("Attention", operands, "attention", PRIVATE, scale=scale or None, causal=is_causal)


@dataclass(frozen=True)
class Setting:
    """What a rule may ask beside the node: sizes, and the version of each domain's operators."""

    sizes: Sizes
    opsets: Mapping[str, int]

    @property
    def version(self) -> int:
        """Of the standard operators."""
        return self.opsets.get("", 1)

    def size(self, value: ir.Value) -> Size:
        return self.sizes.size[str(value.name)]

    def dtype(self, value: ir.Value | None) -> ir.DataType:
        assert value is not None
        return ir.DataType(self.sizes.dtype[str(value.name)])


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def number(node: ir.Node, name: str) -> float | None:
    return node.attributes[name].as_float() if name in node.attributes else None
