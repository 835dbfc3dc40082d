"""ReLU for GELU in the MLP behind a rewritten site: SimA's last exponential (section 4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.patterns.fx.operators import operator_name

_BETWEEN = frozenset(
    [
        "mul",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "linear",
        "addmm",
        "conv2d",
        "convolution",
        "view",
        "reshape",
        "_unsafe_view",
        "transpose",
        "permute",
        "clone",
    ]
)


@dataclass(frozen=True)
class ReluForGelu(Pass[GraphModule]):
    """Replace the GELUs of the MLP that reads what the node called `behind` adds to the residual stream.

    The walk goes through norms, linear maps, data movement and one sum; a second sum is the next block's.
    """

    behind: str
    in_place: ClassVar[bool] = True

    def requires(self, graph: GraphModule) -> Refusal | None:
        """That there is such a node."""
        known = any(node.name == self.behind for node in graph.graph.nodes)
        return None if known else Refusal("no-such-node", f"has no node {self.behind!r}")

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        start = next(node for node in graph.graph.nodes if node.name == self.behind)
        pending, seen, edits = [(start, 0)], {start}, []
        while pending:
            node, sums = pending.pop()
            for user in list(node.users):
                if user in seen or user.op != "call_function":
                    continue
                seen.add(user)
                name = operator_name(user)
                if user.target is torch.ops.aten.gelu.default:
                    user.target, user.kwargs = torch.ops.aten.relu.default, {}
                    edits.append(Edit(user.name, user.name))
                elif name in _BETWEEN or (name == "add" and sums == 0):
                    pending.append((user, sums + (name == "add")))
        graph.recompile()
        return PassResult(graph, tuple(edits))
