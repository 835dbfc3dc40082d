"""torch's exports and decompositions, without what torch notes of where each node came from.

Nothing here reads it, and it would go into the files that are written (what a program that is given says of its nodes
stays). A node's history holds that of the node it was made from, copied whole: after a few traces, hundreds of objects
a node; finding the lines of code that made it is a tenth to a fifth of DeiT-Tiny's export (benchmarks/README.md). What
torch notes of its own functions (`custom`) it may hold against nodes of the same names in a later trace.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.config
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.passes.copying import quiet_copying


def export_program(module: nn.Module, arguments: tuple[Any, ...], keywords: Any = None, **how: Any) -> ExportedProgram:
    """`torch.export.export`, with whatever else that takes. Raises what it raises, which is of many kinds."""
    with _without_stack_traces():
        return _forgetful(torch.export.export(module, arguments, keywords, **how))


def decompose_program(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """`program` with the operators of `table` written out as its functions say."""
    with _without_stack_traces(), quiet_copying():
        return _forgetful(program.run_decompositions(dict(table)))


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)
    torch.fx.config.do_not_emit_stack_traces = True  # older releases of torch know no such thing, and heed none
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _forgetful(program: ExportedProgram) -> ExportedProgram:
    """`program` itself, whose nodes know no longer what they were made from."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for told in ("from_node", "custom"):
                node.meta.pop(told, None)
    return program
