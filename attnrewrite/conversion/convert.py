"""Convert a model: find its attention, prove the extraction, rewrite, calibrate, check the result."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.calibration.processes import Processes, joined_processes
from attnrewrite.calibration.room import power_of_two, require_room
from attnrewrite.calibration.stages import HELD_OUT_SHARE
from attnrewrite.conversion.proof import Proof, prove
from attnrewrite.conversion.record import Conversion
from attnrewrite.conversion.replacing import Replaced, Replacement
from attnrewrite.conversion.sites import (
    as_in_file,
    fates_of,
    groups_without,
    kept_sites,
    require_grid,
    require_some,
    site_report,
)
from attnrewrite.errors import InputError, Refusal
from attnrewrite.frontends.batches import fed_apart, opened, tell_fixed
from attnrewrite.frontends.capture import Captured, capture
from attnrewrite.frontends.data import image_size_of, input_names, load_data, takes_pictures
from attnrewrite.frontends.sources import Source
from attnrewrite.images.dataset import Images
from attnrewrite.images.model_inputs import listed
from attnrewrite.images.pool import Pool
from attnrewrite.passes.draws import arithmetic_inputs
from attnrewrite.passes.fx.join_heads import with_joined_heads
from attnrewrite.passes.fx.rewrite import scan_graph
from attnrewrite.passes.original import require_numbers
from attnrewrite.passes.site_module import written_value
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.fx.operators import UNQUANTISED_PROGRAM, computes_on_integers
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.patterns.weights import sketch
from attnrewrite.plan import Placement, Plan
from attnrewrite.request import Calibration, Execution
from attnrewrite.selection.problem import Auto
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import option_values

MOST_IN_BATCH = 64  # calibration images in one pass, where the model leaves the batch open and memory has room


def convert_source(
    source: Source,
    variant: Variant | Auto,
    calibration: Calibration | None = None,
    execution: Execution | None = None,
    keep: Sequence[str] = (),
    keep_bad: bool = False,
) -> Conversion:
    """Rewrite every site of `source` that `variant` supports and that is not kept, or those that `auto` chooses.

    With `keep_bad`, a site that fails a check, of its extraction, its fit or its arithmetic, stays as it is, and the
    report says so.

    Raises:
        NothingMatchedError: the model has no attention, none that the variant supports, or none within the budget.
        CheckFailedError: an extraction or a rewritten site does not agree with its reference, or a budget on latency
            cannot be met.
        InputError: the model cannot be captured, a kept site is not known, or the images cannot be used.
    """
    calibration, execution = calibration or Calibration(), execution or Execution()
    images = calibration_images(source, calibration, execution.seed)
    execution.apply()
    require_numbers(source.name, source.tensors, source.example_inputs)
    captured = _captured(source) if images is None else fed_apart(_captured(source))
    tell_fixed(captured)
    scanned, kept = _with_heads_joined(source, captured, keep)
    captured, found = replace(captured, module=scanned.graph.module), scanned.scan
    asked = variant = variant.among(found.sites) if isinstance(variant, Auto) else variant
    if images is None and isinstance(variant, Variant):
        variant = variant.uncalibrated()
    fates = fates_of(found, variant, kept)
    possible = [site for site in found.sites if fates[site.id] is None]
    require_grid(found, variant)
    require_some(found, possible, variant, fates)
    pool, processes = None, Processes()
    if images is not None:
        _require_float32(captured, possible)
        pool, processes = _pool(images, source, captured), joined_processes()
        require_room(execution, processes.device)
    proof = prove(source, captured, scanned, possible, keep_bad, execution.report)
    replacement = Replacement(captured, scanned, proof, variant, pool, calibration.steps, execution, processes)
    proven = [site for site in possible if site.id not in proof.faults]
    if keep_bad:
        replaced, failed = replacement.at_those_that_pass(proven, proof.teacher)
    else:
        replaced, failed = replacement.at(proven, proof.teacher), {}
    faults = {**proof.faults, **failed}
    fates |= {site: Refusal("check-failed", f"its check failed: {fault}") for site, fault in faults.items()}
    fates |= replaced.selection.reasons
    report = {
        **_asked(source, asked, captured, execution.seed),
        **_found(found, fates, proof, replaced),
        "calibration": {"images": len(images or ()), "stages": [asdict(stage) for stage in replaced.stages]},
    }
    report |= {} if replaced.selection.report is None else {"selection": replaced.selection.report}
    report |= {} if source.left_out is None else {"left_out": dict(source.left_out)}
    return Conversion(
        replaced.student,
        final_plan(found, replaced.selection.standing, replaced.student, captured.module),
        found,
        report,
        captured.module,
        source.example_inputs,
        arithmetic_inputs(proof.draws),
        source.preprocessing,
        source.origin,
        source.code,
    )


def _asked(source: Source, variant: Variant | Auto, captured: Captured, seed: int) -> dict[str, Any]:
    """What report.json says of the model and of what was asked."""
    return {
        "model": source.name,
        "source": asdict(source.origin) if source.origin else None,
        "variant": variant.name,
        "options": {} if isinstance(variant, Auto) else option_values(variant),
        "seed": seed,
        "fixed_batch": captured.fixed_batch,
        "fixed_batch_reason": None if captured.fixed_batch is None else captured.note,
    }


def _found(found: Scan, fates: Mapping[str, Refusal | None], proof: Proof, replaced: Replaced) -> dict[str, Any]:
    """What report.json says of the sites, of what is none, and of the checks."""
    standing = replaced.selection.standing
    return {
        "sites": [
            site_report(s, fates[s.id], standing.get(s.id), proof.errors.get(s.id), replaced.errors.get(s.id))
            for s in found.sites
        ],
        "near_misses": [
            {"anchor": m.anchor, "name": m.name, "reason": m.code, "detail": m.sentence} for m in found.near_misses
        ],
        "checks": dict(proof.report),
    }


def calibration_images(source: Source, request: Calibration, seed: int) -> Images | None:
    """The images that `source` is calibrated with, drawn by the seed and seen to be whole; None: none were asked for.

    Raises:
        InputError: they cannot be read, do not fit the model, or are too few.
    """
    if request.images is None:
        return None
    if not takes_pictures(source) and request.steps:
        raise InputError(
            f"{source.name} takes {listed(input_names(source), source.example_inputs)}, and distillation moves and "
            "mixes pictures alone: leave out --steps"
        )
    images, size = load_data(source, request.images, request.skip_bad), image_size_of(source)
    drawn = images.sample(request.samples, seed).whole(source.preprocessing, size)
    if len(drawn) < HELD_OUT_SHARE:
        raise InputError(
            f"calibration has {len(drawn)} of the {HELD_OUT_SHARE} images that it needs at least, as one in "
            f"{HELD_OUT_SHARE} is held out to see what helps: give more (--calibrate, --samples), better some hundreds"
        )
    return drawn.decoded(source.preprocessing, size)


def _pool(images: Images, source: Source, captured: Captured) -> Pool:
    """The images in batches that the graph takes."""
    size = captured.fixed_batch or min(MOST_IN_BATCH, power_of_two(len(images)))
    return Pool(images, source.preprocessing, image_size_of(source), size, filled=captured.fixed_batch is not None)


def _captured(source: Source) -> Captured:
    """The model's graph, for any batch where it can be. Raises InputError where it stands for the example alone."""
    model: torch.nn.Module | ExportedProgram | None = source.model if source.program is None else source.program
    if model is None:
        raise InputError("the source holds neither a module nor a program")
    captured = capture(source.name, model, source.example_inputs)
    if not captured.exact:
        raise InputError(f"{captured.note}; it can be explained, but not converted")
    if on_integers := next(filter(computes_on_integers, captured.module.graph.nodes), None):
        raise InputError(f"{source.name} computes on integers (at {on_integers.name}); {UNQUANTISED_PROGRAM}")
    return opened(captured, model)


def _with_heads_joined(
    source: Source, captured: Captured, keep: Sequence[str]
) -> tuple[Scanned[FxGraph], frozenset[str]]:
    """The graph with its attention, where heads that a loop computes are one site unless one of them is kept; and the
    ids of the sites to keep.
    """
    scanned = scan_graph(captured.module, source.name)
    apart = as_in_file(scanned.scan, source.onnx_scan)
    kept = kept_sites(apart, keep)
    return with_joined_heads(replace(scanned, scan=apart), groups_without(apart, kept)), kept


def _require_float32(captured: Captured, possible: list[AttentionSite]) -> None:
    """Raise InputError where the model cannot be calibrated: images come as float32, and fits are measured in it."""
    made = {written_value(site) for site in possible}
    for node in captured.module.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" or node.name in made else None
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
            raise InputError(
                f"{captured.name} computes in {str(value.dtype).removeprefix('torch.')} (at {node.name}), and "
                "calibration works in float32: convert model.float() and cast the result, or convert without images"
            )


def final_plan(found: Scan, standing: Mapping[str, Variant], student: GraphModule, original: GraphModule) -> Plan:
    """The plan that gives `student` again: resolved options, the sites' tensors, and what was refitted around them."""
    modules = rewritten_sites(student)
    placements = tuple(
        Placement.at(
            site, replace(standing[site.id], **modules[site.id].form.resolved()), dict(modules[site.id].state_dict())
        )
        for site in found.sites
        if site.id in standing
    )
    before = dict(original.state_dict())
    inside = tuple(f"{name}." for name, module in student.named_modules() if module in modules.values())
    changed = {
        name: tensor
        for name, tensor in student.state_dict().items()
        if not name.startswith(inside) and name in before and not torch.equal(tensor, before[name])
    }
    replaced = {name: sketch(before[name].numpy()) for name, tensor in changed.items() if tensor.dim()}
    return Plan(found.model, placements, changed, replaced)
