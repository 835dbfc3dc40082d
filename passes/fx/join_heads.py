"""Heads that a loop computes one by one, joined into one attention where their results meet."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.cleanup import CleanUp
from attnrewrite.passes.fx.pieces import put, traced
from attnrewrite.passes.joined_heads import JoinedHeads
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.groups import named_as_before
from attnrewrite.patterns.matcher import Scanned, scan
from attnrewrite.site import Group


@dataclass(frozen=True)
class JoinHeads(Pass[GraphModule]):
    """Make one attention of several heads of each of `groups`, which were found in the graph. It is not changed."""

    scanned: Scanned[FxGraph]
    groups: tuple[Group, ...]

    def requires(self, graph: GraphModule) -> Refusal | None:
        """That the graph is the one that was scanned, and each group one whose heads can be joined."""
        if self.scanned.graph.module is not graph:
            return Refusal("other-graph", "is not the one that was scanned")
        unlike = next((group for group in self.groups if group.apart is not None), None)
        return None if unlike is None else Refusal("apart", f"keeps {', '.join(unlike.members)} apart: {unlike.apart}")

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        with quiet_copying():
            result = GraphModule(graph, copy.deepcopy(graph.graph))
        result.meta.update(graph.meta)
        nodes = {node.name: node for node in result.graph.nodes}
        sites = {site.id: site for site in self.scanned.scan.sites}
        joined = [JoinedHeads([sites[member] for member in group.members], group) for group in self.groups]
        edits = tuple(_put(nodes, each) for each in joined)
        gone = frozenset(node for group in self.groups for member in group.members for node in sites[member].nodes)
        CleanUp(pure=gone).apply(result)
        result.graph.lint()
        return PassResult(result, edits)


def with_joined_heads(scanned: Scanned[FxGraph], wanted: Mapping[str, tuple[str, ...]]) -> Scanned[FxGraph]:
    """The graph and its attention after each group that is `wanted`, members by group id, is one site.

    Sites keep their ids; a joined one has its group's. What is wanted and is no group of the graph stays apart.
    """
    found = scanned.scan
    groups = tuple(g for g in found.groups if wanted.get(g.id) == g.members and g.apart is None)
    if not groups:
        return scanned
    module, edits = JoinHeads(scanned, groups).apply(scanned.graph.module)
    graph = FxGraph(module)
    made = {str(edit.by): group for edit, group in zip(edits, groups, strict=True)}
    return replace(scanned, graph=graph, scan=named_as_before(scan(graph, found.model), found, made))


def _put(nodes: dict[str, Node], joined: JoinedHeads) -> Edit:
    """Put one attention where the heads' results are joined; the edit names the attention itself."""
    old, operands = nodes[joined.output.value], [nodes[value] for value in joined.values]
    piece = traced(joined, operands)
    standing = put(piece, operands, old, nodes[joined.core.output.value].meta)
    made = standing[piece.output_node().args[0]]  # type: ignore[index]
    old.replace_all_uses_with(made)
    attention = next(standing[node] for node in piece.nodes if "scaled_dot_product" in str(node.target))
    return Edit(old.name, attention.name)
