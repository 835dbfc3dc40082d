"""Convert a model: find its attention, prove the extraction, rewrite, calibrate, check the result."""

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.calibration.processes import first_process
from attnrewrite.calibration.resume import State
from attnrewrite.calibration.stages import calibrate
from attnrewrite.conversion.sites import fates_of, kept_sites, require_some, site_report
from attnrewrite.errors import InputError, Refusal
from attnrewrite.files import staged
from attnrewrite.frontends.capture import Captured, capture, export
from attnrewrite.frontends.sources import Origin, Source
from attnrewrite.images.dataset import Images
from attnrewrite.images.pool import Pool
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.pages.selection import page
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.deploy import DeploySites
from attnrewrite.passes.fx.rewrite import FxRewrite, scan_graph
from attnrewrite.passes.site_module import written_value
from attnrewrite.passes.verify import export_error, float64_errors, identity_errors, rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.patterns.weights import named_after
from attnrewrite.plan import Placement, Plan
from attnrewrite.progress import Progress
from attnrewrite.selection.budget import Auto
from attnrewrite.selection.select import Selection, select
from attnrewrite.selection.workbench import Subject
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, option_values

MODEL_FILE = "model.pt2"
REPORT_FILE = "report.json"
ONNX_FILE = "model.onnx"
PAGE_FILE = "report.html"


@dataclass(frozen=True)
class Conversion:
    """A converted model. `original` is the captured graph it came from, `teacher` the same with softmax at the sites.

    `report` is what report.json holds: the source, what became of each site, the checks and the calibration stages.
    """

    module: GraphModule
    plan: Plan
    scan: Scan
    report: Mapping[str, Any]
    original: GraphModule
    example_inputs: tuple[Tensor, ...]
    preprocessing: Preprocessing | None
    origin: Origin | None

    def export(self) -> ExportedProgram:
        """The converted model as it is deployed, as an exported program that was checked against it.

        Raises:
            CheckFailedError: the exported program does not agree with the module.
        """
        ready = deployed(self.module)
        program, _ = export(ready, self.example_inputs)
        exported = program.module(check_guards=False)
        assert isinstance(exported, GraphModule)
        export_error(exported, ready, _batched(self.example_inputs, self.report["fixed_batch"]))
        return program

    def save(self, out: str | Path, force: bool = False) -> Path:
        """Write model.pt2, weights.safetensors, plan.json and report.json into the new folder `out`.

        What auto selected has a page beside it, report.html; a model that was read from ONNX is written as model.onnx
        too. Of the processes that torchrun started, which all hold the same model, the first one writes.

        Raises:
            InputError: the folder exists (without `force`) or cannot be written.
            CheckFailedError: the exported program does not agree with the module; nothing is left behind.
        """
        if not first_process():
            return Path(out)
        program = self.export()
        with staged(Path(out), force=force) as folder:
            torch.export.save(program, folder / MODEL_FILE)
            self.plan.save(folder)
            (folder / REPORT_FILE).write_text(json.dumps(dict(self.report), indent=1) + "\n")
            if "selection" in self.report:
                self._write_page(folder)
            if self.origin is not None and self.origin.spec.endswith(".onnx"):
                self._write_onnx(Path(self.origin.spec), folder)
        return Path(out)

    def _write_page(self, folder: Path) -> None:
        """Write report.html, where its template engine is installed."""
        try:
            (folder / PAGE_FILE).write_text(page(self.report), encoding="utf-8")
        except InputError as missing:
            logging.getLogger("attnrewrite").warning("no %s: %s", PAGE_FILE, missing)

    def _write_onnx(self, source: Path, folder: Path) -> None:
        """Write model.onnx: the file that the model was read from, with only the sites changed."""
        from attnrewrite.conversion.onnx_out import write_file

        assert self.origin is not None
        inputs = _batched(self.example_inputs, self.report["fixed_batch"])
        write_file(source, self.plan, deployed(self.module), inputs, self.origin.input_size, folder / ONNX_FILE)


def convert_source(
    source: Source,
    variant: Variant | Auto,
    *,
    images: Images | None,
    keep: Sequence[str] = (),
    steps: int = 0,
    seed: int = 0,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Rewrite every site of `source` that `variant` supports and that is not kept, or those that `auto` chooses.

    Raises:
        NothingMatchedError: the model has no attention, none that the variant supports, or none within the budget.
        CheckFailedError: an extraction or a rewritten site does not agree with its reference, or a budget on latency
            cannot be met.
        InputError: the model cannot be captured, or a kept site is not known.
    """
    captured = capture(source.name, source.model or _require(source.program), source.example_inputs)
    if not captured.exact:
        raise InputError(f"{captured.note}; it can be explained, but not converted")
    scanned = scan_graph(captured.module, source.name)
    found = named_after(scanned.scan, source.own)
    scanned = replace(scanned, scan=found)
    fates = fates_of(found, variant, kept_sites(found, keep))
    possible = [site for site in found.sites if fates[site.id] is None]
    require_some(found, possible, variant, fates)
    if images is not None:
        _require_float32(captured, possible)
    inputs = _batched(source.example_inputs, captured.fixed_batch)
    teacher = _rewritten(scanned, dict.fromkeys([site.id for site in possible], get_variant("softmax")))
    identity = identity_errors(captured.module, teacher, found, inputs)
    selection = None
    standing: Mapping[str, Variant] = {}
    if isinstance(variant, Auto):
        selection = _selected(variant, source, captured, scanned, teacher, possible, images, seed, state, progress)
        standing = selection.standing
        fates |= {site: Refusal("not-selected", why) for site, why in selection.reasons.items()}
        teacher = _rewritten(scanned, dict.fromkeys(standing, get_variant("softmax")))
    else:
        standing = dict.fromkeys([site.id for site in possible], variant)
    student = _rewritten(scanned, standing)
    stages: list[dict[str, Any]] = []
    if images is not None:
        stages = _calibrated(captured, teacher, student, source, images, steps, seed, state, progress)
    arithmetic = float64_errors(student, inputs)
    plan = _final_plan(found, standing, student, captured.module)
    report = {
        "model": source.name,
        "source": asdict(source.origin) if source.origin else None,
        "variant": variant.name,
        "options": {} if isinstance(variant, Auto) else option_values(variant),
        "seed": seed,
        "fixed_batch": captured.fixed_batch,
        "sites": [
            site_report(s, fates[s.id], standing.get(s.id), identity.get(s.id), arithmetic.get(s.id))
            for s in found.sites
        ],
        "near_misses": [
            {"anchor": m.anchor, "name": m.name, "reason": m.code, "detail": m.sentence} for m in found.near_misses
        ],
        "calibration": {"images": 0 if images is None else len(images), "stages": stages},
    } | ({"selection": selection.report} if selection else {})
    return Conversion(
        student, plan, found, report, captured.module, source.example_inputs, source.preprocessing, source.origin
    )


def _selected(
    auto: Auto,
    source: Source,
    captured: Captured,
    scanned: Scanned[FxGraph],
    teacher: GraphModule,
    possible: list[AttentionSite],
    images: Images | None,
    seed: int,
    state: Path | None,
    progress: Progress | None,
) -> Selection:
    """Which variant stands at which of the possible sites."""
    assert images is not None, "auto was accepted without images"
    images.check(source.preprocessing, source.input_size)
    fixed = captured.fixed_batch
    one = source.example_inputs if fixed else tuple(tensor[:1] for tensor in source.example_inputs)
    subject = Subject(source.name, scanned, teacher, tuple(possible), one, fixed)
    pool = Pool(images, source.preprocessing, source.input_size, fixed or min(64, len(images)))
    return select(auto, subject, pool, seed, State(state), progress)


def _calibrated(
    captured: Captured,
    teacher: GraphModule,
    student: GraphModule,
    source: Source,
    images: Images,
    steps: int,
    seed: int,
    state: Path | None,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """Calibrate `student` in place; what each stage did."""
    size = captured.fixed_batch or min(64, len(images))
    results = calibrate(
        teacher, student, images=images, preprocessing=source.preprocessing, input_size=source.input_size,
        batch_size=size, steps=steps, seed=seed, state=state, progress=progress,
    )  # fmt: skip
    return [asdict(result) for result in results]


def deployed(module: GraphModule) -> GraphModule:
    """A copy in which every site is what stands in a lowered model, and every tensor lies in order."""
    with quiet_copying():
        result = copy.deepcopy(module).eval()
    return DeploySites()(result)


def _require(program: ExportedProgram | None) -> ExportedProgram:
    if program is None:
        raise InputError("the source holds neither a module nor a program")
    return program


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


def _rewritten(scanned: Scanned[FxGraph], standing: Mapping[str, Variant]) -> GraphModule:
    """The captured model with these variants at their sites."""
    sites = [site for site in scanned.scan.sites if site.id in standing]
    plan = Plan(scanned.scan.model, tuple(Placement.at(site, standing[site.id]) for site in sites))
    return FxRewrite(plan, scanned)(scanned.graph.module)


def _final_plan(found: Scan, standing: Mapping[str, Variant], student: GraphModule, original: GraphModule) -> Plan:
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
    inside = tuple(name for name, module in student.named_modules() if module in modules.values())
    changed = {
        name: tensor
        for name, tensor in student.state_dict().items()
        if not name.startswith(inside) and name in before and not torch.equal(tensor, before[name])
    }
    return Plan(found.model, placements, changed)


def _batched(inputs: tuple[Tensor, ...], fixed: int | None) -> tuple[Tensor, ...]:
    """Inputs to check on, with the batch that the graph takes: its only one, or two unlike images where it is open."""
    size = fixed or 2
    return tuple(
        t
        if t.shape[0] == size
        else torch.cat([t, t.flip(-1)])
        if t.shape[0] == 1 and size == 2
        else t.expand(size, *t.shape[1:])
        for t in map(_telling, inputs)
    )


def _telling(images: Tensor) -> Tensor:
    """`images`, or noise in place of blank ones: between tokens that are all the same, any attention is right."""
    blank = images.dim() == 4 and images.is_floating_point() and bool((images == images.flatten()[0]).all())
    if not blank:
        return images
    return torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images)
