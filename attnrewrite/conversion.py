"""Convert a model: find its attention, prove the extraction, rewrite, calibrate, check the result."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.calibrate import calibrate
from attnrewrite.capture import Captured, capture, export
from attnrewrite.checks import export_error, float64_errors, identity_errors, rewritten_sites
from attnrewrite.data import Images
from attnrewrite.errors import InputError, NothingMatchedError, unknown_name
from attnrewrite.files import staged
from attnrewrite.passes.fx import FxRewrite
from attnrewrite.patterns.attention import scan
from attnrewrite.patterns.fx import FxGraph
from attnrewrite.patterns.weights import named_after
from attnrewrite.plan import Placement, Plan
from attnrewrite.preprocessing import Preprocessing
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.sources import Origin, Source
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, option_values

MODEL_FILE = "model.pt2"
REPORT_FILE = "report.json"
ONNX_FILE = "model.onnx"
Progress = Callable[[str, int, int], None]


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
        """The converted model as an exported program, checked against the module.

        Raises:
            CheckFailedError: the exported program does not agree with the module.
        """
        program, _ = export(deployed(self.module), self.example_inputs)
        exported = program.module()
        export_error(exported, self.module, _batched(self.example_inputs, self.report["fixed_batch"]))
        return program

    def save(self, out: str | Path, force: bool = False) -> Path:
        """Write model.pt2, weights.safetensors, plan.json and report.json into the new folder `out`.

        A model that was read from ONNX is written as model.onnx too.

        Raises:
            InputError: the folder exists (without `force`) or cannot be written.
            CheckFailedError: the exported program does not agree with the module; nothing is left behind.
        """
        program = self.export()
        with staged(Path(out), force=force) as folder:
            torch.export.save(program, folder / MODEL_FILE)
            self.plan.save(folder)
            (folder / REPORT_FILE).write_text(json.dumps(dict(self.report), indent=1) + "\n")
            if self.origin is not None and self.origin.spec.endswith(".onnx"):
                self._write_onnx(Path(self.origin.spec), folder)
        return Path(out)

    def _write_onnx(self, source: Path, folder: Path) -> None:
        """Write model.onnx: the file that the model was read from, with only the sites changed."""
        from attnrewrite.onnx_convert import write_file

        assert self.origin is not None
        inputs = _batched(self.example_inputs, self.report["fixed_batch"])
        write_file(source, self.plan, deployed(self.module), inputs, self.origin.input_size, folder / ONNX_FILE)


def convert_source(
    source: Source,
    variant: Variant,
    *,
    images: Images | None,
    keep: Sequence[str] = (),
    steps: int = 0,
    seed: int = 0,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Rewrite every site of `source` that `variant` supports and that is not kept.

    Raises:
        NothingMatchedError: the model has no attention, or none that the variant supports.
        CheckFailedError: an extraction or a rewritten site does not agree with its reference.
        InputError: the model cannot be captured, or a kept site is not known.
    """
    captured = capture(source.name, source.model or _require(source.program), source.example_inputs)
    if not captured.exact:
        raise InputError(f"{captured.note}; it can be explained, but not converted")
    found = named_after(scan(FxGraph(captured.module), source.name), source.own)
    kept = _kept_sites(found, keep)
    fates = {site.id: _fate(site, variant, kept) for site in found.sites}
    chosen = [site for site in found.sites if fates[site.id] is None]
    _require_some(found, chosen, variant, fates)
    inputs = _batched(source.example_inputs, captured.fixed_batch)
    teacher = FxRewrite(_plan(found, chosen, get_variant("softmax")))(captured.module)
    identity = identity_errors(captured.module, teacher, found, inputs)
    student = FxRewrite(_plan(found, chosen, variant))(captured.module)
    stages: list[dict[str, Any]] = []
    if images is not None:
        stages = _calibrated(captured, teacher, student, source, images, steps, seed, state, progress)
    arithmetic = float64_errors(student, inputs)
    plan = _final_plan(found, chosen, variant, student, captured.module)
    sites = [
        _site_report(site, fates[site.id], variant, identity.get(site.id), arithmetic.get(site.id))
        for site in found.sites
    ]
    report = {
        "model": source.name,
        "source": asdict(source.origin) if source.origin else None,
        "variant": variant.name,
        "options": option_values(variant),
        "seed": seed,
        "fixed_batch": captured.fixed_batch,
        "sites": sites,
        "near_misses": [
            {"anchor": m.anchor, "name": m.name, "reason": m.reason, "detail": m.detail} for m in found.near_misses
        ],
        "calibration": {"images": 0 if images is None else len(images), "stages": stages},
    }
    return Conversion(
        student, plan, found, report, captured.module, source.example_inputs, source.preprocessing, source.origin
    )


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
    """A copy in which every form is the one that stands in a lowered model."""
    result = copy.deepcopy(module).eval()
    for site in rewritten_sites(result).values():
        site.form = site.form.deploy()
    return result


def _fate(site: AttentionSite, variant: Variant, kept: frozenset[str]) -> str | None:
    """Why a site stays as it is, or None when it is converted."""
    return "kept on request" if site.id in kept else variant.refuse(site)


def _kept_sites(found: Scan, keep: Sequence[str]) -> frozenset[str]:
    by_name = {site.id: site.id for site in found.sites} | {site.name: site.id for site in found.sites}
    for name in keep:
        if name not in by_name:
            raise unknown_name("site to keep", name, by_name)
    return frozenset(by_name[name] for name in keep)


def _require_some(found: Scan, chosen: list[AttentionSite], variant: Variant, fates: Mapping[str, str | None]) -> None:
    if chosen:
        return
    if not found.sites:
        misses = (
            "; ".join(f"{m.name}: {m.detail}" for m in found.near_misses[:5]) or "no softmax and no attention operator"
        )
        raise NothingMatchedError(f"{found.model} has no attention to rewrite ({misses}); see attnrewrite explain")
    reasons = "; ".join(f"{site}: {reason}" for site, reason in list(fates.items())[:3])
    raise NothingMatchedError(
        f"{variant.name} can stand at none of the {len(found)} sites of {found.model} ({reasons}); "
        "choose another variant"
    )


def _require(program: ExportedProgram | None) -> ExportedProgram:
    if program is None:
        raise InputError("the source holds neither a module nor a program")
    return program


def _plan(found: Scan, chosen: list[AttentionSite], variant: Variant) -> Plan:
    return Plan(found.model, tuple(Placement.at(site, variant) for site in chosen))


def _final_plan(
    found: Scan, chosen: list[AttentionSite], variant: Variant, student: GraphModule, original: GraphModule
) -> Plan:
    """The plan that gives `student` again: resolved options, the sites' tensors, and what was refitted around them."""
    modules = rewritten_sites(student)
    placements = tuple(
        Placement.at(site, modules[site.id].form.resolve(variant), dict(modules[site.id].state_dict()))
        for site in chosen
    )
    before = dict(original.state_dict())
    inside = tuple(name for name, module in student.named_modules() if module in modules.values())
    changed = {
        name: tensor
        for name, tensor in student.state_dict().items()
        if not name.startswith(inside) and name in before and not torch.equal(tensor, before[name])
    }
    return Plan(found.model, placements, changed)


def _site_report(
    site: AttentionSite, fate: str | None, variant: Variant, identity: float | None, arithmetic: float | None
) -> dict[str, Any]:
    return {
        "id": site.id,
        "name": site.name,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "n_queries": site.n_queries,
        "n_keys": site.n_keys,
        "variant": variant.name if fate is None else "softmax",
        "note": variant.note(site) if fate is None else f"stays as it is: {fate}",
        "multiplies": variant.multiplies(site) if fate is None else get_variant("softmax").multiplies(site),
        "multiplies_softmax": get_variant("softmax").multiplies(site),
        "identity_error": identity,
        "float64_error": arithmetic,
    }


def _batched(inputs: tuple[Tensor, ...], fixed: int | None) -> tuple[Tensor, ...]:
    """Example inputs with the batch that the graph takes: its only one, or two unlike images where it is open."""
    size = fixed or 2
    return tuple(
        t
        if t.shape[0] == size
        else torch.cat([t, t.flip(-1)])
        if t.shape[0] == 1 and size == 2
        else t.expand(size, *t.shape[1:])
        for t in inputs
    )
