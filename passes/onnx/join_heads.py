"""Heads that a loop computes one by one, joined into one attention where their results meet, in an ONNX graph."""

from collections.abc import Mapping

import onnx_ir as ir

from attnrewrite.passes.joined_heads import JoinedHeads
from attnrewrite.passes.onnx.splice import put_in
from attnrewrite.patterns.groups import named_as_before
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.prepare import inlined
from attnrewrite.patterns.onnx.sizes import Size


def with_joined_heads(
    model: ir.Model,
    scanned: Scanned[OnnxGraph],
    wanted: Mapping[str, tuple[str, ...]],
    input_sizes: Mapping[str, Size] | None = None,
) -> tuple[ir.Model, Scanned[OnnxGraph]]:
    """`model`, and its attention, after each group that is `wanted`, members by group id, is one site.

    Sites keep their ids; a joined one has its group's. The model given is not changed.
    """
    found = scanned.scan
    groups = [g for g in found.groups if wanted.get(g.id) == g.members and g.apart is None]
    if not groups:
        return model, scanned
    sites = {site.id: site for site in found.sites}
    joined = [JoinedHeads([sites[member] for member in group.members], group) for group in groups]
    result = inlined(model) if model.functions else model.clone()
    fragments = put_in(result, scanned.graph, [(each, each.output.value) for each in joined])
    made = {
        str(value.name): group
        for group, fragment in zip(groups, fragments, strict=True)
        for node in fragment.nodes
        for value in node.outputs
    }
    graph = OnnxGraph(result, input_sizes)
    return result, Scanned(graph, named_as_before(scan_onnx(graph, found.model), found, made))
