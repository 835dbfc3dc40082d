"""A model in an earlier opset than torch's exporter writes."""

from dataclasses import dataclass
from typing import ClassVar

import onnx
import onnx_ir as ir

from attnrewrite.errors import InputError, Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.patterns.onnx.prepare import opset_versions

LOWEST = 11
EXPORTED = 18  # the version that torch's exporter writes natively
_AXES_AS_INPUT = {"ReduceSum": 13, "Squeeze": 13, "Unsqueeze": 13}  # from which version on; other reductions from 18
_ZERO_ALLOWED = 14  # from here on, Reshape says what a zero means
_PLAIN = ("", "ai.onnx")
_SHAPE_IN_PART = 15  # from here on, Shape may give part of the shape


@dataclass(frozen=True)
class Downgrade(Pass[ir.Model]):
    """Respell what torch exported in opset `version`, from 11 on; a model of that version or an earlier one stays.

    `apply` raises InputError where the earlier version has no such operator, attribute or operand.
    """

    version: int
    in_place: ClassVar[bool] = True

    def requires(self, graph: ir.Model) -> Refusal | None:
        """That the model is of the version that is known here, where it is to change, and the other can be written."""
        stands = opset_versions(graph).get("", 1)
        if stands <= self.version:
            return None
        if stands != EXPORTED:
            return Refusal("opset", f"has opset {stands}, and is respelled from {EXPORTED}: export it with that")
        return refuse_opset(self.version)

    def rewrite(self, graph: ir.Model) -> PassResult[ir.Model]:
        if opset_versions(graph).get("", 1) <= self.version:
            return PassResult(graph)
        edits = [
            Edit(str(node.name), f"{node.op_type} of opset {self.version}")
            for node in list(graph.graph)
            if node.domain in _PLAIN and _respelled(graph.graph, node, self.version)
        ]
        graph.opset_imports["ai.onnx" if "ai.onnx" in graph.opset_imports else ""] = self.version
        return PassResult(graph, (*edits, Edit(f"opset {EXPORTED}", f"opset {self.version}")))


def refuse_opset(version: int) -> Refusal | None:
    """Why nothing is written in a version; None where it is."""
    if version >= LOWEST:
        return None
    why = f"has opset {version}, and rewriting needs {LOWEST} or later: convert it with onnx.version_converter"
    return Refusal("opset", why)


def _respelled(graph: ir.Graph, node: ir.Node, version: int) -> bool:
    """Respell a node in place; whether it was to be.

    Raises:
        InputError: the version has no such operator, attribute or operand.
    """
    takes_axes = node.op_type in _AXES_AS_INPUT or node.op_type.startswith("Reduce")
    as_attribute = takes_axes and version < _AXES_AS_INPUT.get(node.op_type, EXPORTED) and len(node.inputs) > 1
    in_part = node.op_type == "Shape" and version < _SHAPE_IN_PART and not {"start", "end"}.isdisjoint(node.attributes)
    zeros = node.op_type == "Reshape" and version < _ZERO_ALLOWED and "allowzero" in node.attributes
    if as_attribute:
        _axes_as_attribute(node)
    if in_part:
        _whole_shape(graph, node)
    if zeros:
        del node.attributes["allowzero"]  # no site has an axis of length zero
    _require_known(node, version)
    return as_attribute or in_part or zeros


def _require_known(node: ir.Node, version: int) -> None:
    if node.op_type == "Split" and "num_outputs" in node.attributes and len(node.inputs) < 2:
        raise InputError(
            f"Split into equal parts needs opset {EXPORTED}: convert the model with onnx.version_converter"
        )
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
        unknown = [name for name in node.attributes if name not in schema.attributes]
        fits = not unknown and len(node.inputs) <= schema.max_input
    except onnx.defs.SchemaError:
        fits = False
    if not fits:
        raise InputError(
            f"the rewritten attention needs {node.op_type} of opset {EXPORTED}, the model uses {version}: "
            "convert it with onnx.version_converter, or choose another variant"
        )


def _whole_shape(graph: ir.Graph, node: ir.Node) -> None:
    """Shape of some axes as Shape and Slice."""
    bounds = [node.attributes.pop(name, None) for name in ("start", "end")]
    first, last = (default if a is None else a.as_int() for a, default in zip(bounds, (0, 1 << 31), strict=True))
    operands = []
    for name, number in (("start", first), ("end", last)):
        constant = ir.node("Constant", [], {"value": ir.tensor([number])}, name=f"{node.name}_{name}")
        constant.outputs[0].name = f"{node.outputs[0].name}_{name}"
        graph.insert_before(node, constant)
        operands.append(constant.outputs[0])
    part = ir.node("Slice", [], name=f"{node.name}_part")
    part.outputs[0].name = f"{node.outputs[0].name}_part"
    ir.convenience.replace_all_uses_with(node.outputs[0], part.outputs[0])
    part.resize_inputs(3)
    for place, value in enumerate([node.outputs[0], *operands]):
        part.replace_input_with(place, value)
    part.outputs[0].dtype = ir.DataType.INT64
    node.outputs[0].shape = None
    graph.insert_after(node, part)


def _axes_as_attribute(node: ir.Node) -> None:
    axes = node.inputs[1]
    node.attributes.pop("noop_with_empty_axes", None)
    if axes is not None:
        tensor = axes.const_value or ir.convenience.get_const_tensor(axes)
        assert tensor is not None
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in tensor.numpy().reshape(-1)])
    node.resize_inputs(1)
