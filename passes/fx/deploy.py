"""Rewritten sites as they stand in a lowered model."""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.verify import rewritten_sites


@dataclass(frozen=True)
class DeploySites(Pass[GraphModule]):
    """Every site becomes what stands in a lowered model, its outer maps in the projections; tensors lie in order."""

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        sites = rewritten_sites(graph)
        for site in sites.values():
            site.deploy()
        for tensor in (*graph.parameters(), *graph.buffers()):
            tensor.data = tensor.data.contiguous()  # a fitted one may be a transpose: torch warns of it as it saves
        return PassResult(graph, tuple(Edit(name, name) for name in sites))
