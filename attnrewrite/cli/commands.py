"""The commands. Heavy imports are inside them, so that help and usage errors come at once."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnrewrite.cli.app import app, command
from attnrewrite.cli.explain import explain
from attnrewrite.cli.options import (
    BoardOptions,
    CpuBuildOptions,
    CpuOptions,
    ModelOptions,
    NeuralEngineOptions,
    Original,
    OutputOptions,
    PhoneOptions,
    RunOptions,
    SkipBad,
    SourceName,
    VariantOptions,
)
from attnrewrite.cli.output import Outcome, bars, conversion_table, evaluation_table, made_lines, schedule_table, table
from attnrewrite.errors import InputError
from attnrewrite.files import as_path
from attnrewrite.outputs import check_apart, check_free, staged
from attnrewrite.request import Budget, Calibration
from attnrewrite.site import Scan

if TYPE_CHECKING:  # what these need takes seconds to import: help and usage errors do without
    from attnrewrite.frontends.sources import Source
    from attnrewrite.selection.problem import Auto
    from attnrewrite.targets.base import Availability
    from attnrewrite.variants.base import Variant


@command("attnrewrite convert model.py:vit --checkpoint vit.pth --calibrate images/ --variant l1 --out out/vit")
def convert(
    source: SourceName,
    output: OutputOptions,
    model: ModelOptions,
    chosen: VariantOptions,
    calibration: Calibration,
    budget: Budget,
    run: RunOptions,
) -> Outcome:
    """Replace a model's attention, carry its weights over and, with --calibrate, repair the accuracy without labels.

    Writes model.pt2, weights.safetensors, plan.json and report.json to the output folder. Interrupted, the same command
    goes on with the distillation (--steps) where it was: what that needs waits in a hidden folder beside the output.

    With --variant auto, each site gets the variant that the budget allows: --max-drop 0.5 bounds what is lost, and
    --max-latency 0.7 --for host the time. What was measured is in report.json and, as a picture, in report.html.
    """
    from attnrewrite import api
    from attnrewrite.calibration.processes import first_process
    from attnrewrite.conversion.convert import calibration_images, convert_source
    from attnrewrite.images.dataset import load_images
    from attnrewrite.selection.problem import requested

    out = output.out
    check_free(out, force=output.force)
    check_apart(out, _paths(source, calibration.images, model.checkpoint))
    options, keep = _key_values(chosen.option or []), chosen.keep or ()
    variant = requested(chosen.variant, options, budget, calibrated=calibration.images is not None)
    if calibration.images is not None and not calibration.images.endswith(".npz"):  # which may hold several inputs
        calibration = replace(calibration, images=load_images(calibration.images, calibration.skip_bad))
    loaded = _load(source, model, run)
    if run.dry_run:
        calibration_images(loaded, calibration, run.execution.seed)
        return _planned(api.explain(loaded), variant, keep, out)
    state = out.with_name(f".{out.name}.calibration")
    with bars() as progress:
        execution = replace(run.execution, progress=progress, state=state)
        conversion = convert_source(loaded, variant, calibration, execution, keep, chosen.keep_bad)
    conversion.save(out, force=output.force)
    if first_process():  # the one that writes there
        shutil.rmtree(state, ignore_errors=True)
    return Outcome({**conversion.report, "out": str(out)}, conversion_table(conversion.report, out))


@command("attnrewrite evaluate out/vit --data test.npz")
def evaluate(
    source: SourceName,
    data: Annotated[
        str,
        typer.Option(
            help="Images: a folder of class folders, or an .npz with x and y; of a model that takes more than a "
            "picture an .npz with an array for each input.",
            show_default=False,
        ),
    ],
    model: ModelOptions,
    run: RunOptions,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of images to use, drawn at random.", show_default="all")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images in one forward pass.", show_default="128")
    ] = None,
    skip_bad: SkipBad = False,
    original: Original = None,
) -> Outcome:
    """Measure top-1 accuracy and, for a converted model, how often it agrees with the original.

    A model that gives no logits is held against its original by all that it gives for an image: the squared difference
    over the energy around its mean.

    The original is found by the folder's report if you wrote the folder on this machine and the original's file has not
    changed since; else name it with --original.
    """
    from attnrewrite import api
    from attnrewrite.frontends.data import load_data

    loaded = _load(source, model if original is None else replace(model, checkpoint=None), run)
    images = load_data(loaded, data, skip_bad)
    images = images.sample(samples, run.execution.seed) if samples else images
    held = None if original is None else loaded.original(original, model.checkpoint)
    if run.dry_run:
        return _would(f"evaluate {source} on {len(images)} images", source=source, n=len(images))
    with bars() as progress:
        found = api.evaluate(loaded, images, original=held, batch_size=batch_size, progress=progress)
    asked = asdict(list(found.values())[-1])
    beside = asdict(next(iter(found.values()))) if len(found) > 1 else None
    return Outcome({**asked, "original": beside}, evaluation_table(found))


@command("attnrewrite lower out/vit --target arm-cpu --out out/arm")
def lower(
    source: SourceName,
    target: Annotated[str, typer.Option(help="Target to lower for (see attnrewrite targets).", show_default=False)],
    output: OutputOptions,
    model: ModelOptions,
    cpu: CpuBuildOptions,
    engine: NeuralEngineOptions,
    run: RunOptions,
    why: Annotated[
        bool, typer.Option("--explain", help="Say which schedule took which operators, and why others were left.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="Images to measure the artifact on; --precision int8 needs some.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of those images to use, drawn at random.")] = 256,
    skip_bad: SkipBad = False,
) -> Outcome:
    """Lower a model for a target and check the artifact against the model.

    Beside the artifact, artifact.json says what a program that loads it must know: inputs and how pictures become them,
    outputs, processor and runtime; and how it was checked, and what became of every operator.

    SOURCE may also be a .mlpackage: it is laid out anew for coreml-npu, and compared with itself as it was.
    """
    from attnrewrite import api
    from attnrewrite.frontends.data import load_data
    from attnrewrite.targets.base import get_target
    from attnrewrite.targets.pictures import require_picture
    from attnrewrite.targets.record import as_data, is_package

    out = output.out
    check_free(out, force=output.force)
    check_apart(out, _paths(source, model.checkpoint, engine.labels, data))
    options: dict[str, Any] = {**asdict(cpu), **asdict(engine), "image_input": engine.image_input or None}
    chosen = get_target(target).configured(**options)
    chosen.require_build()
    packaged = is_package(source)
    if not packaged:
        chosen.require_answers(data)
    elif any(value is not None for value in asdict(model).values()):
        raise InputError("options of models say nothing of a package, which is laid out as it is: leave them out")
    loaded: Any = source if packaged else _load(source, model, run)
    images: Any = data  # which a package is refused with
    if data is not None and not packaged:
        images = load_data(loaded, data, skip_bad).sample(samples, run.execution.seed)
    if run.dry_run:
        if chosen.takes_pictures and not packaged:
            require_picture(loaded.name, tuple(each[:1] for each in loaded.example_inputs), loaded.preprocessing)
        return _would(f"lower {source} for {target} to {out}", source=source, target=target, out=str(out))
    with bars() as progress:
        artifact = api.lower(
            loaded, target, out, force=output.force, threads=run.execution.threads, data=images,
            progress=progress, **options,
        )  # fmt: skip
    told = {**as_data(artifact), "path": str(artifact.path)}
    made = made_lines(artifact)
    if not why:
        return Outcome({key: value for key, value in told.items() if key != "operators"}, made)
    return Outcome(told, schedule_table(artifact), note=made)


@command("attnrewrite compare out/vit --target host --target arm-cpu --data test.npz --out out/compared")
def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]SOURCE...",
            help="The models, the original first; NAME is what its rows say.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option(help="Target to compare on (see attnrewrite targets); may be repeated.", show_default=False),
    ],
    output: OutputOptions,
    model: ModelOptions,
    cpu: CpuOptions,
    board: BoardOptions,
    phone: PhoneOptions,
    run: RunOptions,
    data: Annotated[str | None, typer.Option(help="Images to compare the accuracy on as well.")] = None,
    skip_bad: SkipBad = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep what report.json in the output folder has measured; measure the rest."),
    ] = False,
) -> Outcome:
    """Compare models on targets: latency where this machine or a device can measure it, size, error and accuracy.

    Writes report.json and report.html to the output folder.
    """
    from attnrewrite import api
    from attnrewrite.evaluation.records import load_comparison
    from attnrewrite.frontends.data import image_size_of, load_data
    from attnrewrite.targets.base import get_target

    out = output.out
    check_free(out, force=output.force or resume)
    earlier = load_comparison(out / "report.json") if resume and out.exists() else None
    check_apart(out, _paths(*_named(sources).values(), data, model.checkpoint))
    for name in target:
        get_target(name)
    named = _named(sources)
    models = {
        name: _load(source, _only_if_built(source, model, list(named.values())), run) for name, source in named.items()
    }
    images = load_data(next(iter(models.values())), data, skip_bad) if data else None
    if images is not None:
        for loaded in models.values():
            images.check(loaded.preprocessing, image_size_of(loaded))
    if run.dry_run:
        return _would(f"compare {', '.join(models)} on {', '.join(target)}", models=list(models), targets=target)
    with bars() as progress:
        found = api.compare(
            models, targets=target, data=images, threads=run.execution.threads, earlier=earlier, progress=progress,
            **asdict(cpu), **asdict(board), **asdict(phone),
        )  # fmt: skip
    with staged(out, force=output.force or resume) as folder:
        found.to_json(folder / "report.json")
        found.to_html(folder / "report.html")
    return Outcome(found.to_dict(), found.to_table(), note=f"written: {out / 'report.html'}")


@command("attnrewrite variants --json")
def variants(run: RunOptions) -> Outcome:
    """List the attention variants and their options, those of other packages among them."""
    from attnrewrite.variants.registry import option_values, unusable
    from attnrewrite.variants.registry import variants as known

    listed: list[dict[str, Any]] = [
        {"name": name, "summary": kind.summary, "source": kind.source, "options": option_values(kind())}
        for name, kind in known().items()
    ]
    rows = [
        [each["name"], each["summary"], ", ".join(f"{k}={v}" for k, v in each["options"].items()), each["source"]]
        for each in listed
    ]
    columns = dict.fromkeys(("variant", "what it is", "options and their defaults", "source"), "left")
    return Outcome({"variants": listed, "unusable": unusable()}, table(None, columns, rows))


@command("attnrewrite targets --json")
def targets(run: RunOptions) -> Outcome:
    """List the targets, those of other packages among them, and whether this machine can build and measure for each."""
    from attnrewrite.targets.base import targets as known
    from attnrewrite.targets.base import unusable

    listed: list[dict[str, Any]] = [
        {"name": name, "summary": target.summary, **_able(target.availability())} for name, target in known().items()
    ]
    rows = [
        [each["name"], each["summary"], *("yes" if each[k] is True else f"no: {each[k]}" for k in ("build", "measure"))]
        for each in listed
    ]
    columns = dict.fromkeys(("target", "what it is", "builds here", "is measured here"), "left")
    return Outcome({"targets": listed, "unusable": unusable()}, table(None, columns, rows))


def _able(availability: "Availability") -> dict[str, bool | str]:
    refusals = {"build": availability.build, "measure": availability.measure}
    return {key: True if refusal is None else refusal.sentence for key, refusal in refusals.items()}


def _load(source: str, model: ModelOptions, run: RunOptions) -> "Source":
    """The model. Torch is seeded first, as a factory may draw its weights at random."""
    from attnrewrite.frontends.sources import load_source

    run.execution.apply()
    return load_source(source, **asdict(model))


def _only_if_built(source: str, model: ModelOptions, beside: Sequence[str]) -> ModelOptions:
    """`model` for a source compared `beside` others: a saved one has its weights and size inside."""
    saved = {each: Path(each).is_dir() or each.endswith(".pt2") for each in beside}
    return replace(model, checkpoint=None, input_size=None) if saved[source] and not all(saved.values()) else model


def _planned(scan: Scan, variant: "Variant | Auto", keep: Sequence[str], out: Path) -> Outcome:
    """What convert would do at each site."""
    from attnrewrite.conversion.sites import fates_of, kept_sites, require_grid
    from attnrewrite.selection.problem import Auto

    variant = variant.among(scan.sites) if isinstance(variant, Auto) else variant
    require_grid(scan, variant)
    refusals = fates_of(scan, variant, kept_sites(scan, keep))
    done = {site: variant.name if why is None else f"softmax: {why}" for site, why in refusals.items()}
    matched = None in refusals.values()
    return Outcome(
        {"dry_run": True, "out": str(out), "sites": done},
        table(
            f"{scan.model}: nothing was written",
            dict.fromkeys(("id", "name", "would be"), "left"),
            [[site.id, site.name, done[site.id]] for site in scan],
        ),
        exit_code=0 if matched else 3,
        note=None if matched else f"attnrewrite: nothing matched: {variant.name} would stand nowhere in {scan.model}",
    )


def _would(what: str, **data: Any) -> Outcome:
    return Outcome({"dry_run": True, **data}, f"would {what}; nothing was done")


def _key_values(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if not re.match(r"\w[\w-]*=", pair):
            raise InputError(f"--option {pair!r} is not KEY=VALUE, such as centred=false")
    split = [(key.replace("-", "_"), value) for key, _, value in (pair.partition("=") for pair in pairs)]
    for key, value in split:
        if value != dict(split)[key]:
            raise InputError(f"--option {key} is given as {value!r} and as {dict(split)[key]!r}: leave one of them out")
    return dict(split)


def _paths(*given: str | None) -> list[Path]:
    """The files and folders among sources (without the factory or library they name), data and checkpoints."""
    return [as_path(re.sub(r"^hf:|(?<=\.py):\w*$", "", each)) for each in given if each]


def _named(sources: Sequence[str]) -> dict[str, str]:
    """Models by name: the one before an = sign, or what the source is called."""
    named: dict[str, str] = {}
    for source in sources:
        match = None if Path(source).exists() else re.match(r"([\w.+-]+)=(.+)", source)
        name, spec = match.groups() if match else (re.split(r"[/:]", source.rstrip("/"))[-1], source)
        if name in named:
            raise InputError(f"two models are called {name!r}: name them, as in other={spec}")
        named[name] = spec
    return named


__all__ = ["app", "explain"]
