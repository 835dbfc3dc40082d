"""The ONNX pass: each placement of a plan becomes the nodes of its torch module, where the site's nodes were."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from attnrewrite.errors import InputError, Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.by_plan import PlanPass, Precision, SiteEdit, place, tell_of_nothing_found
from attnrewrite.passes.onnx.cleanup import values_by_name
from attnrewrite.passes.onnx.downgrade import refuse_opset
from attnrewrite.passes.onnx.ir_pass import IrPass
from attnrewrite.passes.onnx.join_heads import with_joined_heads
from attnrewrite.passes.onnx.relu_for_gelu import ReluForGelu
from attnrewrite.passes.onnx.splice import put_in
from attnrewrite.passes.refitted import located
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.onnx.prepare import inlined, opset_versions
from attnrewrite.patterns.onnx.quantised import without, write_as_pairs
from attnrewrite.patterns.onnx.recognise import attribute_name
from attnrewrite.patterns.onnx.sizes import Size
from attnrewrite.patterns.weights import pick
from attnrewrite.plan import Plan
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.variants.base import FollowUp

_FLOAT_TYPES = {
    int(ir.DataType.FLOAT16): torch.float16,
    int(ir.DataType.FLOAT): torch.float32,
    int(ir.DataType.DOUBLE): torch.float64,
}


# What carries out what a variant asks for around its site, given the name of the value that is made there.
FOLLOW_UPS: dict[FollowUp, Callable[[str], Pass[ir.Model]]] = {"relu-for-gelu": ReluForGelu}


@dataclass(frozen=True)
class ModelRewrite(PlanPass[ir.Model, OnnxGraph]):
    """Apply `plan` to an ONNX model. The input is not changed; a model with functions comes back inlined.

    `input_sizes` gives what the model's inputs leave open beyond the batch. `apply` raises InputError where the plan
    was made for another model, a variant refuses its site, or the model's opset lacks what the variant needs.
    """

    input_sizes: Mapping[str, Size] | None = None

    def scan(self, graph: ir.Model) -> Scanned[OnnxGraph]:
        view = OnnxGraph(graph, self.input_sizes)
        return Scanned(view, scan_onnx(view, self.plan.model))

    def joined(self, graph: ir.Model) -> tuple[ir.Model, Scanned[OnnxGraph]]:
        return with_joined_heads(graph, self.scan(graph), self.plan.groups, self.input_sizes)

    def fitted(self, found: Scan) -> Plan:
        """The plan with its placements at the sites of the same weights: frontends may number the sites differently."""
        free = list(found.sites)
        placements = []
        for placement in self.plan.placements:
            chosen = pick(placement.site, placement.fingerprint, free)
            if chosen is not None:
                free.remove(chosen)
                placement = replace(placement, site=chosen.id)
            placements.append(placement)
        return replace(self.plan, placements=tuple(placements))

    def requires(self, graph: ir.Model) -> Refusal | None:
        """That the plan fits, and that the sites can be written in the model's opset."""
        opset = refuse_opset(opset_versions(graph).get("", 1)) if self.plan.placements else None
        return opset or super().requires(graph)

    def rewrite(self, graph: ir.Model) -> PassResult[ir.Model]:
        known = self.known(graph)
        plan, sites = self.fitted(known.scan), {site.id: site for site in known.scan.sites}
        precision = _precision(known.graph)
        modules = [place(known.graph, sites[each.site], each, precision) for each in plan.placements]
        for module in modules:
            module.deploy()
        result = _without_roundings(graph, known.graph, [sites[module.site_id] for module in modules])
        edits = spliced(result, known.graph, [(sites[module.site_id], module) for module in modules])
        changed = _set_parameters(result, plan)
        return PassResult(result, (*edits, *changed, *_followed_up(result, plan, edits)))

    def ensures(self, before: ir.Model, result: PassResult[ir.Model]) -> Refusal | None:
        """The same inputs and outputs by name, and every rewritten value under its own."""
        for what in ("inputs", "outputs"):
            was, now = ([value.name for value in getattr(model.graph, what)] for model in (before, result.graph))
            if was != now:
                return Refusal(f"other-{what}", f"has the {what} {now}, not {was}")
        values = values_by_name(result.graph.graph)
        made = (edit.replaced for edit in result.edits if isinstance(edit, SiteEdit))
        missing = next((name for name in made if name not in values), None)
        return None if missing is None else Refusal("site-not-made", f"does not make {missing}")


class OnnxRewrite(IrPass):
    """`ModelRewrite` inside an onnx_ir PassManager."""

    def __init__(self, plan: Plan, input_sizes: Mapping[str, Size] | None = None) -> None:
        super().__init__(ModelRewrite(plan, input_sizes=input_sizes))


def _without_roundings(model: ir.Model, graph: OnnxGraph, sites: Sequence[AttentionSite]) -> ir.Model:
    """A copy of `model`, without functions; of pairs, without those inside `sites`, as the view shows them."""
    nodes = {node for site in sites for node in site.nodes}
    inside = [each for anchor, own in graph.rounded.items() if anchor in nodes for each in own]
    result = inlined(model) if model.functions else model.clone()
    if graph.quantised is not model:  # the file has products of integers, before which no pair stands
        made = values_by_name(result.graph)
        for reader in dict.fromkeys(each.reader for each in inside):
            product = made[reader].producer()
            assert product is not None
            write_as_pairs(result.graph, product)
    return without(result, inside) if inside else result


def spliced(
    model: ir.Model, graph: OnnxGraph, replacements: Sequence[tuple[AttentionSite, SiteModule]]
) -> tuple[SiteEdit, ...]:
    """Put each module where its site's value is made, in place; what only the site needed is gone."""
    made = [(module, written_value(site)) for site, module in replacements]
    put_in(model, graph, made)
    return tuple(SiteEdit(written, f"attention_{module.site_id}", module.site_id) for module, written in made)


def _followed_up(model: ir.Model, plan: Plan, edits: Sequence[SiteEdit]) -> tuple[Edit, ...]:
    """What the variants asked for around their sites, done in place."""
    done: list[Edit] = []
    for placement, edit in zip(plan.placements, edits, strict=True):
        for asked in placement.variant.follow_ups():
            followed = FOLLOW_UPS[asked](edit.replaced).apply(model)
            tell_of_nothing_found(placement.site, asked, followed.edits)
            done += followed.edits
    return tuple(done)


def _precision(graph: OnnxGraph) -> Precision:
    """A site is computed in the precision of what it reads."""

    def of(module: SiteModule, _: AttentionSite) -> torch.dtype:
        kinds = map(graph.dtype, module.values)
        return next((_FLOAT_TYPES[kind] for kind in kinds if kind in _FLOAT_TYPES), torch.float32)

    return of


def _set_parameters(model: ir.Model, plan: Plan) -> tuple[Edit, ...]:
    """Store what the plan refitted outside the sites."""
    known = model.graph.initializers.items()
    stored = {name: value.const_value for name, value in known if value.const_value is not None}
    imported = {attribute_name(name): name for name in stored}
    shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in stored.items()}
    done: list[Edit] = []
    for name, own, tensor in located(plan, shapes, lambda each: stored[each].numpy(), imported):
        value = model.graph.initializers[own]
        if name not in imported and len(value.uses()) > 1:
            raise InputError(
                f"the plan refits {name}, and the file stores {own} once for several readers; convert the file itself"
            )
        value.const_value = ir.tensor(tensor.detach().cpu().contiguous().numpy(), name=own)
        done.append(Edit(own, own))
    return tuple(done)
