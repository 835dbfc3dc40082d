"""Where each node came from, which torch notes at every trace; nothing here reads it, and it costs more than the trace.

A node's history holds that of the node it was made from, copied whole: after a few traces, hundreds of objects a node.
"""

from torch.export import ExportedProgram
from torch.fx import GraphModule


def forget_history(program: ExportedProgram) -> ExportedProgram:
    """`program` itself, whose nodes know no longer what they were made from."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("from_node", None)
    return program
