"""What nothing reads any more, taken out of an ONNX graph, and its values by name."""

import onnx_ir as ir


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Inputs, initialisers and what nodes make."""
    made = (value for node in graph for value in node.outputs)
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *made)}


def drop_unread(graph: ir.Graph, last: ir.Node) -> None:
    """Remove a node that nobody reads, then what only it read, and so on, with their initialisers."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node.graph is not graph or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        operands = {operand for operand in node.inputs if operand is not None}
        graph.remove(node, safe=True)
        for operand in operands:
            producer = operand.producer()
            if producer is not None:
                pending.append(producer)
            elif operand.is_initializer() and not operand.uses() and not operand.is_graph_input():
                del graph.initializers[str(operand.name)]
