"""The FX pass: each placement of a plan becomes one module call inside the graph."""

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.errors import InputError
from attnrewrite.passes.base import Edit, Precision, place, tell_of_gelus
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.relu_for_gelu import relu_for_gelu
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Plan, check_fits
from attnrewrite.site import AttentionSite, Scan


@dataclass(frozen=True)
class FxRewrite:
    """Apply `plan` to a GraphModule of aten operations (as `frontends.capture` gives it). The input is not changed."""

    plan: Plan

    def __call__(self, module: GraphModule) -> GraphModule:
        return self.apply(module)[0]

    def apply(self, module: GraphModule) -> tuple[GraphModule, tuple[Edit, ...]]:
        """The rewritten module and what was edited.

        Raises:
            InputError: the plan was made for another model, or a variant refuses its site.
        """
        graph = FxGraph(module)
        found = scan(graph, self.plan.model)
        check_fits(self.plan, found)
        sites = {site.id: site for site in found.sites}
        precision = _precision(graph)
        replacements = {p.site: place(graph, sites[p.site], p, precision) for p in self.plan.placements}
        result, edits = rewrite(module, found, replacements, self.plan.parameters)
        calls = {node.target: node for node in result.graph.nodes if node.op == "call_module"}
        modules = {edit.site: edit.module for edit in edits}
        for placement in self.plan.placements:
            if getattr(placement.variant, "relu", False):
                replaced = relu_for_gelu(result, calls[modules[placement.site]])
                tell_of_gelus(placement.site, replaced)
        result.recompile()
        return result, edits


def rewrite(
    module: GraphModule,
    found: Scan,
    replacements: dict[str, SiteModule],
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[GraphModule, tuple[Edit, ...]]:
    """A copy of `module` in which each site of `replacements` is one module call; dead parameters are gone."""
    with quiet_copying():
        result = GraphModule(module, copy.deepcopy(module.graph))
    result.meta.update(module.meta)
    nodes = {node.name: node for node in result.graph.nodes}
    edits = []
    for site in found.sites:
        if site.id in replacements:
            edits.append(_swap(result, nodes, site, replacements[site.id]))
    replaced = {node for site in found.sites if site.id in replacements for node in site.nodes}
    # torch counts SDPA as impure for its dropout: left to itself, it would keep the attention that was replaced
    result.graph.eliminate_dead_code(lambda node: node.is_impure() and node.name not in replaced)
    _allow_any_strides(result)
    _drop_unused(result)
    _own_parameters(result)
    _set_parameters(result, parameters or {})
    result.graph.lint()
    result.recompile()
    return result, tuple(edits)


def _precision(graph: FxGraph) -> Precision:
    """A site is computed in the precision that its result had."""
    return lambda _, site: graph.node(written_value(site)).meta["val"].dtype


def _swap(module: GraphModule, nodes: dict[str, Node], site: AttentionSite, rewritten: SiteModule) -> Edit:
    """Put `rewritten` where the site's value is made; later sites that read that value read the module call."""
    name = f"attention_{site.id}"
    while hasattr(module, name):  # the model was rewritten before
        name += "_again"
    module.add_submodule(name, rewritten)
    value = written_value(site)
    old = nodes[value]
    with module.graph.inserting_before(old):
        dtype = old.meta["val"].dtype
        new = module.graph.call_module(name, tuple(_as_type(nodes[operand], dtype) for operand in rewritten.values))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    nodes[value] = new
    return Edit(site.id, value, name)


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


def _drop_unused(module: GraphModule) -> None:
    """Delete parameters, buffers and submodules that no node of the graph reads any more."""
    used = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    for name, _ in [*module.named_parameters(), *module.named_buffers()]:
        if not any(name == target or name.startswith(f"{target}.") for target in used):
            owner, _, attribute = name.rpartition(".")
            delattr(module.get_submodule(owner), attribute)
    module.delete_all_unused_submodules()


def _own_parameters(module: GraphModule) -> None:
    """Copy the parameters and buffers that the copy of the module still shares with the original."""
    rewritten = {id(t) for m in module.modules() if isinstance(m, SiteModule) for t in m.parameters()}
    copies: dict[int, Tensor] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        owner, _, attribute = str(node.target).rpartition(".")
        holder = module.get_submodule(owner)
        tensor = getattr(holder, attribute)
        if not isinstance(tensor, Tensor) or id(tensor) in rewritten:
            continue
        if id(tensor) not in copies:
            fresh = tensor.detach().clone()
            copies[id(tensor)] = (
                torch.nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fresh
            )
            copies[id(copies[id(tensor)])] = copies[id(tensor)]
        setattr(holder, attribute, copies[id(tensor)])


def _set_parameters(module: GraphModule, parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        try:
            target = operator.attrgetter(name)(module)
        except AttributeError as error:
            raise InputError(
                f"the plan refits {name}, which the model does not have; apply it to the model it was made from"
            ) from error
        if target.shape != tensor.shape:
            raise InputError(
                f"the plan refits {name} of shape {tuple(tensor.shape)}, the model has {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(tensor)
