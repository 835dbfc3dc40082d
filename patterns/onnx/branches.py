"""An If whose condition is known before any image is seen: the branch that is taken, in its place."""

import numpy as np
import onnx_ir as ir

from attnrewrite.patterns.onnx.sizes import Sizes


def take_branch(graph: ir.Graph, node: ir.Node, sizes: Sizes) -> bool:
    """Replace an If by the branch that its condition always takes; False where the condition depends on the data."""
    condition = node.inputs[0] if node.op_type == "If" and node.inputs else None
    known = None if condition is None else sizes.known.get(str(condition.name))
    if known is None or known.size != 1:
        return False
    branch = node.attributes["then_branch" if bool(np.ravel(known)[0]) else "else_branch"].as_graph()
    body = branch.clone(allow_outer_scope_values=True)
    stem = str(node.outputs[0].name)
    results = list(body.outputs)
    moved = list(body)
    body.outputs.clear()
    body.remove(moved)
    for initialiser in list(body.initializers.values()):
        constant = ir.node("Constant", [], {"value": initialiser.const_value})  # type: ignore[dict-item]
        constant.outputs[0].name = initialiser.name
        initialiser.replace_all_uses_with(constant.outputs[0])
        results = [constant.outputs[0] if value is initialiser else value for value in results]
        moved.insert(0, constant)
    for inner in moved:
        for value in inner.outputs:
            value.name = f"{stem}/{value.name}" if value.name else value.name
    results = [_own(value, moved) for value in results]
    bodies = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    ir.convenience.replace_nodes_and_values(graph, node, [node], moved, list(node.outputs), results)
    for left in bodies:  # its nodes read no more
        left.outputs.clear()
        left.remove(list(left), safe=True)
    return True


def _own(result: ir.Value, moved: list[ir.Node]) -> ir.Value:
    """A result that the branch takes from outside, as a value of its own."""
    if result.producer() in moved:
        return result
    identity = ir.node("Identity", [result])
    moved.append(identity)
    return identity.outputs[0]
