"""A plan carried out in an exported program: one goes in and one comes out, for whoever compiles it next."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_unflatten

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Pass, PassResult, Pipeline
from attnrewrite.passes.fx.deploy import DeploySites
from attnrewrite.passes.fx.functionalise import functional_graph
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.fx.signature import other_signature
from attnrewrite.passes.tracing import export_program
from attnrewrite.patterns.fx.operators import is_open
from attnrewrite.plan import Plan


def rewrite(exported: ExportedProgram, plan: Plan) -> ExportedProgram:
    """`exported` with the forms of `plan` at its sites, as they are deployed; it is not changed itself.

    The result has the same input names and output structure, and its shapes are open where they were; what stands at
    the sites keeps its weights in the state dict, under `attention_SITE`.

    Raises:
        InputError: the plan was made for another model, a variant refuses its site, or the program has no example.
        CheckFailedError: the result has other inputs, outputs or open shapes than the program.
    """
    return ExportedRewrite(plan)(exported)


@dataclass(frozen=True)
class ExportedRewrite(Pass[ExportedProgram]):
    """`rewrite` as a pass, for pipelines over exported programs."""

    plan: Plan

    def requires(self, graph: ExportedProgram) -> Refusal | None:
        """That there is an example to export the result with. Whether the plan fits, the rewrite inside says."""
        if graph.example_inputs is None:
            return Refusal("no-example", "has no example inputs: export it again with torch.export.export")
        return None

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        inside: Pipeline[GraphModule] = Pipeline((FxRewrite(self.plan), DeploySites()), name="exported-rewrite")
        result = inside.apply(functional_graph(graph))
        if not result.modified:
            return PassResult(graph)
        return PassResult(_exported_like(graph, result.graph), result.edits)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs, of the same shapes, open along the same axes."""
        return other_signature(before, result.graph) or _other_shapes(before, result.graph)


def _exported_like(program: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """`module` exported with the example of `program`, its shapes open where those of `program` are."""
    assert program.example_inputs is not None
    arguments, keywords = program.example_inputs
    shapes = tree_unflatten([_open_axes(program, node) for node in _inputs(program)], program.call_spec.in_spec)
    by_name = inspect.signature(module.forward).bind(*shapes[0], **shapes[1]).arguments
    with torch.no_grad():
        return export_program(module, tuple(arguments), dict(keywords), dynamic_shapes=by_name)


def _inputs(program: ExportedProgram) -> list[Node]:
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def _open_axes(program: ExportedProgram, node: Node) -> dict[int, Any] | None:
    """The axes of an input whose length is open, and how short and long they may be; None for what is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    lengths = {axis: _bounds(program, size) for axis, size in enumerate(value.shape) if is_open(size)}
    return {axis: Dim.AUTO(min=shortest, max=longest) for axis, (shortest, longest) in lengths.items()}


def _bounds(program: ExportedProgram, size: torch.SymInt) -> tuple[int, int | None]:
    """The shortest and the longest that an open axis may be; torch writes 2 for the shortest where it takes 1 too."""
    allowed = program.range_constraints.get(size.node.expr)
    if allowed is None:
        return 2, None
    return max(int(allowed.lower), 2), int(allowed.upper) if allowed.upper.is_Integer else None


def _other_shapes(before: ExportedProgram, after: ExportedProgram) -> Refusal | None:
    for old, new in zip(_inputs(before), _inputs(after), strict=True):
        was, now = _lengths(before, old), _lengths(after, new)
        if was != now:
            told = f"takes {old.name} as [{', '.join(now)}], not [{', '.join(was)}]"
            return Refusal("other-shapes", f"{told}: choose another variant, or export the model with those lengths")
    return None


def _lengths(program: ExportedProgram, node: Node) -> list[str]:
    """Each axis of an input as text: its length, or its bounds."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return []
    return [_told(*_bounds(program, size)) if is_open(size) else str(size) for size in value.shape]


def _told(shortest: int, longest: int | None) -> str:
    return f"{shortest} to {'any' if longest is None else longest}"
