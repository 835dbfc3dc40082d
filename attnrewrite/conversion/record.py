"""The record of a conversion: the rewritten model with its plan and report, how it is exported and saved."""

import copy
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attnrewrite.calibration.processes import first_process
from attnrewrite.errors import InputError, first_line
from attnrewrite.files import as_path, read_json
from attnrewrite.frontends.capture import export
from attnrewrite.frontends.sources import Origin
from attnrewrite.frontends.trust import remember
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.outputs import staged
from attnrewrite.pages.selection import page
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.fx.deploy import DeploySites
from attnrewrite.passes.verify import export_error, float64_errors
from attnrewrite.plan import Plan
from attnrewrite.site import Scan

MODEL_FILE = "model.pt2"
REPORT_FILE = "report.json"
ONNX_FILE = "model.onnx"
PAGE_FILE = "report.html"


@dataclass(frozen=True, repr=False)
class Conversion:
    """A converted model, and `original`, the captured graph that it came from.

    `report` is what report.json holds: the source, what became of each site, the checks and the calibration stages.
    `drawn` are inputs that the original took as it was checked: what is made of the conversion is held to it on them.
    `code` is the digest of the file whose code made the original (see `Source.code`).
    """

    module: GraphModule
    plan: Plan
    scan: Scan
    report: Mapping[str, Any]
    original: GraphModule
    example_inputs: tuple[Tensor, ...]
    drawn: tuple[Tensor, ...]
    preprocessing: Preprocessing | None
    origin: Origin | None
    code: str | None = None

    def __repr__(self) -> str:
        """One line, as its parts are whole models."""
        forms = Counter(placement.variant.name for placement in self.plan.placements)
        told = ", ".join(f"{form} at {count}" for form, count in forms.items()) or "no form at any"
        return f"<Conversion of {self.plan.model}: {told} of {len(self.report['sites'])} sites>"

    def deployed(self) -> GraphModule:
        """The converted model as it stands in a lowered one, each site checked against its form in float64.

        Raises:
            CheckFailedError: a site is off by more than rounding.
        """
        ready = deployed(self.module)
        float64_errors(ready, self.drawn)
        return ready

    def export(self) -> ExportedProgram:
        """The converted model as it is deployed, as an exported program that was checked against it.

        Raises:
            CheckFailedError: the exported program does not agree with the module, or a site as it is deployed not with
                its form in float64.
        """
        ready = self.deployed()
        program, _ = export(ready, self.example_inputs)
        exported = program.module(check_guards=False)
        assert isinstance(exported, GraphModule)
        export_error(exported, ready, self.drawn)
        return program

    def save(self, out: str | Path, force: bool = False) -> Path:
        """Write model.pt2, weights.safetensors, plan.json and report.json into the new folder `out`.

        What auto selected has a page beside it, report.html; a model that was read from ONNX is written as model.onnx
        too. The folder is remembered as this user's own, where its original was. Of the processes that torchrun
        started, which all hold the same model, the first one writes.

        Raises:
            InputError: the folder exists (without `force`) or cannot be written.
            CheckFailedError: the exported program does not agree with the module; nothing is left behind.
        """
        if not first_process():
            return Path(out)
        program = self.export()
        with staged(as_path(out), force=force) as folder:
            _save_program(program, folder / MODEL_FILE)
            self.plan.save(folder)
            (folder / REPORT_FILE).write_text(json.dumps(dict(self.report), indent=1) + "\n")
            if "selection" in self.report:
                self._write_page(folder)
            if self.origin is not None and self.origin.spec.endswith(".onnx"):
                self._write_onnx(Path(self.origin.spec), folder)
            if self.code is not None:
                remember(folder, self.code)
        return Path(out)

    def _write_page(self, folder: Path) -> None:
        """Write report.html, where its template engine is installed."""
        try:
            (folder / PAGE_FILE).write_text(page(self.report), encoding="utf-8")
        except InputError as missing:
            logging.getLogger("attnrewrite").warning("no %s: %s", PAGE_FILE, missing)

    def _write_onnx(self, source: Path, folder: Path) -> None:
        """Write model.onnx: the file that the model was read from, with only its sites and fitted maps changed."""
        from attnrewrite.conversion.onnx_out import write_file

        assert self.origin is not None
        write_file(source, self.plan, deployed(self.module), self.drawn, self.origin.input_size, folder / ONNX_FILE)


def site_notes(folder: Path) -> dict[str, str | None]:
    """What the report of a converted folder remarks on each site, by id.

    Raises:
        InputError: the report is missing or damaged.
    """
    try:
        sites = read_json(folder / REPORT_FILE)["sites"]
        noted = {str(site["id"]): site["note"] for site in sites}
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / REPORT_FILE} is damaged: it does not say what became of each site") from error
    return {site: None if note is None else str(note) for site, note in noted.items()}


def _save_program(program: ExportedProgram, path: Path) -> None:
    try:
        torch.export.save(program, path)
    except (NotImplementedError, TypeError, AttributeError) as error:  # as for an output in a class of the model's own
        raise InputError(f"torch.export cannot save the converted model: {first_line(error)}") from error


def deployed(module: GraphModule) -> GraphModule:
    """A copy in which every site is what stands in a lowered model, and every tensor lies in order."""
    with quiet_copying():
        result = copy.deepcopy(module).eval()
    return DeploySites()(result)
