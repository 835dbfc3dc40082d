"""The FX pass: each placement of a plan becomes one module call inside the graph."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.by_plan import PlanPass, Precision, SiteEdit, place, tell_of_nothing_found
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.cleanup import CleanUp
from attnrewrite.passes.fx.join_heads import with_joined_heads
from attnrewrite.passes.fx.relu_for_gelu import ReluForGelu
from attnrewrite.passes.refitted import located
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned, scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import FollowUp, Variant

# What carries out what a variant asks for around its site, given the name of the node that stands there now.
FOLLOW_UPS: dict[FollowUp, Callable[[str], Pass[GraphModule]]] = {"relu-for-gelu": ReluForGelu}


@dataclass(frozen=True)
class FxRewrite(PlanPass[GraphModule, FxGraph]):
    """Apply `plan` to a GraphModule of aten operations (as `frontends.capture` gives it). The input is not changed.

    `held` makes what the result holds of each weight outside the sites: a copy, or the same memory (Tensor.detach) in a
    model that is only read. `apply` raises InputError where the plan was made for another model or a variant refuses
    its site.
    """

    held: Callable[[Tensor], Tensor] = Tensor.clone

    def scan(self, graph: GraphModule) -> Scanned[FxGraph]:
        return scan_graph(graph, self.plan.model)

    def joined(self, graph: GraphModule) -> tuple[GraphModule, Scanned[FxGraph]]:
        scanned = with_joined_heads(self.scan(graph), self.plan.groups)
        return scanned.graph.module, scanned

    def requires(self, graph: GraphModule) -> Refusal | None:
        """That torch.export made the graph, that it is the one that was scanned, and that the plan fits it."""
        inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
        unknown = next((node for node in inputs if "val" not in node.meta), None)
        if unknown is not None:
            return Refusal("not-exported", f"does not tell the shape of {unknown.name}: make it with torch.export")
        if self.scanned is not None and self.scanned.graph.module is not graph:
            return Refusal("other-graph", "is not the one that was scanned")
        return super().requires(graph)

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        known = self.known(graph)
        placements = {placement.site: placement for placement in self.plan.placements}
        precision = _precision(known.graph)
        replacements = [
            (site, place(known.graph, site, placements[site.id], precision))
            for site in known.scan.sites
            if site.id in placements
        ]
        result, edits = swapped(graph, replacements, self.held)
        changed = _set_parameters(result, self.plan)
        return PassResult(result, (*edits, *changed, *self._followed_up(result, edits)))

    def ensures(self, before: GraphModule, result: PassResult[GraphModule]) -> Refusal | None:
        """The same inputs, and one module call for each placement."""
        inputs, left = _inputs(before), _inputs(result.graph)
        if inputs != left:
            return Refusal("other-inputs", f"takes {', '.join(left)}, not {', '.join(inputs)}")
        calls = [node.target for node in result.graph.graph.nodes if node.op == "call_module"]
        made = {edit.site: edit.module for edit in result.edits if isinstance(edit, SiteEdit)}
        missing = next((p.site for p in self.plan.placements if calls.count(made.get(p.site)) != 1), None)
        return None if missing is None else Refusal("site-not-called", f"does not call the module of {missing} once")

    def _followed_up(self, module: GraphModule, edits: tuple[SiteEdit, ...]) -> tuple[Edit, ...]:
        """What the variants asked for around their sites, done in place."""
        calls = {node.target: node.name for node in module.graph.nodes if node.op == "call_module"}
        modules = {edit.site: edit.module for edit in edits}
        done: list[Edit] = []
        for placement in self.plan.placements:
            for asked in placement.variant.follow_ups():
                followed = FOLLOW_UPS[asked](calls[modules[placement.site]]).apply(module)
                tell_of_nothing_found(placement.site, asked, followed.edits)
                done += followed.edits
        return tuple(done)


def scan_graph(module: GraphModule, model: str) -> Scanned[FxGraph]:
    """A graph of aten operations and its attention, for every pass that will be applied to it."""
    graph = FxGraph(module)
    return Scanned(graph, scan(graph, model))


def with_variants(
    scanned: Scanned[FxGraph], standing: Mapping[str, Variant], held: Callable[[Tensor], Tensor] = Tensor.clone
) -> GraphModule:
    """The scanned graph with these variants at their sites, by id, and other weights `held` as FxRewrite says."""
    sites = [site for site in scanned.scan.sites if site.id in standing]
    plan = Plan(scanned.scan.model, tuple(Placement.at(site, standing[site.id]) for site in sites))
    return FxRewrite(plan, scanned, held)(scanned.graph.module)


def swapped(
    module: GraphModule, replacements: list[tuple[AttentionSite, SiteModule]], held: Callable[[Tensor], Tensor]
) -> tuple[GraphModule, tuple[SiteEdit, ...]]:
    """A copy of `module` in which each site is one call of its module; what only the sites' operations read is gone."""
    with quiet_copying():
        result = GraphModule(module, copy.deepcopy(module.graph))
    result.meta.update(module.meta)
    nodes = {node.name: node for node in result.graph.nodes}
    edits = tuple(_swap(result, nodes, site, rewritten) for site, rewritten in replacements)
    _allow_any_strides(result)
    CleanUp(pure=frozenset(node for site, _ in replacements for node in site.nodes)).apply(result)
    _hold_parameters(result, held)
    result.graph.lint()
    return result, edits


def _inputs(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]


def _precision(graph: FxGraph) -> Precision:
    """A site is computed in the precision that its result had."""
    return lambda _, site: graph.node(written_value(site)).meta["val"].dtype


def _swap(module: GraphModule, nodes: dict[str, Node], site: AttentionSite, rewritten: SiteModule) -> SiteEdit:
    """Put `rewritten` where the site's value is made; later sites that read that value read the module call."""
    name = f"attention_{site.id}"
    while hasattr(module, name):  # the model was rewritten before
        name += "_again"
    module.add_submodule(name, rewritten)
    value = written_value(site)
    old = nodes[value]
    with module.graph.inserting_before(old):
        dtype, read = old.meta["val"].dtype, set(rewritten.roles.values())
        given = (_as_type(nodes[each], dtype) if each in read else nodes[each] for each in rewritten.values)
        new = module.graph.call_module(name, tuple(given))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    nodes[value] = new
    return SiteEdit(value, name, site.id)


def _as_type(operand: Node, dtype: torch.dtype) -> Node:
    """`operand`, cast where it is of another floating-point type: models mix them, a module does not."""
    value = operand.meta["val"]
    if value.dtype == dtype or not value.is_floating_point():
        return operand
    cast = operand.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    cast.meta = {**operand.meta, "val": value.to(dtype)}
    return cast


def _allow_any_strides(module: GraphModule) -> None:
    """Let reshape stand for view: a rewritten site's output may lie otherwise in memory than the original's."""
    for node in module.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default


def _hold_parameters(module: GraphModule, held: Callable[[Tensor], Tensor]) -> None:
    """Have the copy of a module hold what is `held` of the parameters and buffers that it got from the original."""
    rewritten = {id(t) for m in module.modules() if isinstance(m, SiteModule) for t in m.parameters()}
    own: dict[int, Tensor] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        owner, _, attribute = str(node.target).rpartition(".")
        holder = module.get_submodule(owner)
        tensor = getattr(holder, attribute)
        if not isinstance(tensor, Tensor) or id(tensor) in rewritten:
            continue
        if id(tensor) not in own:
            fresh = held(tensor.detach())
            own[id(tensor)] = (
                torch.nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fresh
            )
            own[id(own[id(tensor)])] = own[id(tensor)]
        setattr(holder, attribute, own[id(tensor)])


def _set_parameters(module: GraphModule, plan: Plan) -> tuple[Edit, ...]:
    """Store what the plan refitted outside the sites."""
    parameters, buffers = (each(remove_duplicate=False) for each in (module.named_parameters, module.named_buffers))
    stored = dict((*parameters, *buffers))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    done: list[Edit] = []
    with torch.no_grad():
        for _, own, tensor in located(plan, shapes, lambda each: stored[each].detach().float().cpu().numpy()):
            stored[own].copy_(tensor)
            done.append(Edit(own, own))
    return tuple(done)
