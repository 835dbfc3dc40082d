"""The verbs, as Python functions: explain, convert, evaluate, lower, compare."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from torch import Tensor, nn
from torch.utils.data import Dataset

from attnrewrite.conversion.convert import convert_source
from attnrewrite.conversion.loading import Model, examine, known_keywords_only, load, load_beside
from attnrewrite.conversion.record import Conversion
from attnrewrite.conversion.sites import planned_sites, site_facts
from attnrewrite.errors import InputError, Refusal, refuse_given, required, told, whole_number
from attnrewrite.evaluation import records
from attnrewrite.evaluation.accuracy import evaluate_modules, gives_logits
from attnrewrite.evaluation.compare import CompareModel, compare_models
from attnrewrite.evaluation.outputs import evaluate_outputs
from attnrewrite.files import as_path
from attnrewrite.frontends.answers import says_classes
from attnrewrite.frontends.batches import any_batch, fixed_batch, runnable
from attnrewrite.frontends.data import image_size_of, load_data
from attnrewrite.frontends.examples import one_image
from attnrewrite.frontends.sources import Source
from attnrewrite.images.dataset import Images, Inputs
from attnrewrite.images.preprocessing import Preprocessing
from attnrewrite.outputs import staged, write_file
from attnrewrite.pages.comparison import comparison_page, comparison_table
from attnrewrite.passes.original import require_numbers
from attnrewrite.request import MOST_IMAGES, Budget, Calibration, Execution, Progress, names, thread_count
from attnrewrite.selection.problem import requested
from attnrewrite.site import Scan
from attnrewrite.targets.base import Artifact, Target, get_target, recorded
from attnrewrite.targets.pictures import of_pictures
from attnrewrite.targets.record import is_package
from attnrewrite.variants.base import Variant, refusal_of
from attnrewrite.variants.registry import get_variant, variants

Data = str | Path | Images | Iterable[Tensor] | Dataset[Any]


@known_keywords_only
def explain(source: Model, example_inputs: tuple[Tensor, ...] | None = None, **how: Any) -> Scan:
    """Every attention of a model, as a site or as a near miss with its reason.

    `how` is what `load_source` takes: checkpoint, input_size, mean, std.

    Raises:
        InputError: the model cannot be loaded or captured.
    """
    return examine(source, example_inputs, **how)[1]


def supported(found: Scan) -> dict[str, dict[str, Refusal | None]]:
    """For each site id, what each variant says of it: None where it can stand there, else its refusal."""
    required("what is asked about", found, Scan)
    known: dict[str, Variant] = {name: get_variant(name) for name in variants()}
    return {site.id: {name: refusal_of(v, site) for name, v in known.items()} for site in found.sites}


@known_keywords_only
def convert(
    source: Model,
    example_inputs: tuple[Tensor, ...] | None = None,
    *,
    variant: str = "l1",
    options: Mapping[str, Any] | None = None,
    max_drop: float | None = None,
    max_latency: float | None = None,
    target: str | None = None,
    candidates: str | Sequence[str] | None = None,
    calibration: Data | None = None,
    samples: int = 1000,
    steps: int = 0,
    keep: Sequence[str] = (),
    keep_bad: bool = False,
    seed: int = 0,
    threads: int | None = None,
    memory: str | int | None = None,
    state: str | Path | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Conversion:
    """Replace a model's attention by `variant`, weights carried over, and repair the accuracy without labels.

    With `variant="auto"`, each site gets the variant that a budget allows: `max_drop` points of top-1 (of agreement
    with the original, where the images have no labels), or `max_latency` of the original's time on `target`.

    Args:
        options: of the variant, by name; see `attnrewrite variants`.
        candidates: what auto chooses from: "published", "all" (the default) or variants, such as "masked:heads=1".
        calibration: images of the kind the model was trained on, as `load_images` takes them (labels are not fitted to;
            auto measures by them); None: weights are copied only.
        samples: how many of them to use.
        steps: of gradient descent after the closed-form fit: for every two blocks, then for the whole model.
        keep: ids or names of sites that stay as they are, or patterns of them ("decoder.*").
        keep_bad: leave a site whose check fails as it is, and say so in the report, instead of stopping.
        memory: bytes, or text such as "4GiB", that calibration stays within (default: what is held now and half of what
            is free). The result is the same to rounding.
        state: a folder for what an interrupted distillation needs to go on from where it was, to the same weights.
        how: checkpoint, input_size, mean, std, as `load_source` takes them.

    Raises:
        NothingMatchedError: no attention, or none that the variant supports.
        CheckFailedError: a result does not agree with its reference.
        InputError: anything given cannot be used.
    """
    required("the variant", variant, str)
    budget = Budget(max_drop, max_latency, target, candidates or ())  # type: ignore[arg-type]
    request = Calibration(calibration, samples, steps)
    execution = Execution(seed, threads, progress, state, memory)  # type: ignore[arg-type]
    chosen = requested(variant, options, budget, calibrated=calibration is not None)
    return convert_source(load(source, example_inputs, **how), chosen, request, execution, keep, keep_bad)


@known_keywords_only
def evaluate(
    source: Model,
    data: Data,
    *,
    original: Model | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> dict[str, records.Evaluation]:
    """Top-1 of a model and, where there is an original, its agreement with it, by the models' names: the one asked for
    comes last. A model that gives no logits is held against its original by all that it gives for an image.

    The original of a converted folder is loaded again from where it came, if this user wrote the folder on this
    machine from code that has not changed since; else give `original`.

    Args:
        data: images as `load_images` takes them; of a model that takes more than a picture a tensor for each input, as
            for calibration.

    Raises:
        InputError: a model or the data cannot be used.
    """
    loaded = _sound(load(source, None, **how))
    reference = _original(source, loaded, original)
    modules = {loaded.name: any_batch(loaded)}
    images = load_data(loaded, data)
    most = None if batch_size is None else min(whole_number("--batch-size", batch_size, 1, MOST_IMAGES), len(images))
    if reference is not None:
        modules = {f"{reference.name} (original)": any_batch(_sound(reference)), **modules}
    first = next(iter(modules)) if reference is not None else None
    how_run: dict[str, Any] = {"input_size": image_size_of(loaded), "batch_size": most, "progress": progress}
    return _evaluated(loaded, modules, images, loaded.preprocessing, first, **how_run)


@known_keywords_only
def lower(
    source: Model,
    target: str,
    out: str | Path,
    *,
    example_inputs: tuple[Tensor, ...] | None = None,
    force: bool = False,
    threads: int | None = None,
    layout: str | None = None,
    cpu: str | None = None,
    system: str | None = None,
    minimum_target: str | None = None,
    image_input: bool | None = None,
    labels: str | Path | Sequence[str] | None = None,
    compress: str | None = None,
    precision: str | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Artifact:
    """Compile a model for a target into the new folder `out`, checked against the model on the same input.

    A .mlpackage that coremltools wrote is laid out anew for coreml-npu, and held to itself on drawn inputs.

    Args:
        out: the folder, which must not exist unless `force`.
        threads: how many the check may use, where it runs on this machine.
        layout: coreml-npu: "engine" (default) lays tensors out as the Neural Engine holds them, "as-is" does not.
        minimum_target: coreml-npu: the oldest system that runs the package, "iOS17" (default) or "iOS18".
        image_input: coreml-npu: the input is an image, and the preprocessing inside the package.
        labels: coreml-npu: names of the classes, or a file of one a line, that it answers with; by default those of a
            transformers model, where the input is an image.
        compress: coreml-npu: how to make the weights smaller, "int8", "palette6", "palette4" or "prune".
        cpu: arm-cpu: the core to build for, of targets/profiles.toml ("cortex-a76").
        system: arm-cpu: "linux", "android" or "ios".
        precision: arm-cpu and host: what products are computed in, "fp32", "fp16" or "int8".
        data: images to measure the accuracy of the model and of the artifact on, and how often they agree, of the kinds
            that `evaluate` takes; "int8" needs some.
        how: checkpoint, input_size, mean, std, as `load_source` takes them.

    Raises:
        InputError: unknown target or option, or a target that cannot build here; the folder exists.
        CheckFailedError: the artifact does not agree with the model; nothing is left behind.
    """
    chosen = get_target(target).configured(
        layout=layout, cpu=cpu, system=system, minimum_target=minimum_target, image_input=image_input or None,
        compress=compress, precision=precision,
        labels=labels if labels is None or isinstance(labels, str | Path) else tuple(labels),
    )  # fmt: skip
    count = 1 if threads is None else thread_count(threads)
    if is_package(source):
        refuse_given("a package is laid out as it is", example_inputs=example_inputs, **how)
        return _laid_out(Path(source), chosen, out, force, data)
    chosen.require_answers(data)
    loaded = _sound(load(source, example_inputs, **how))
    images, module = None if data is None else load_data(loaded, data), runnable(loaded)
    inputs, preprocessing = _one_call(loaded, module), loaded.preprocessing
    if chosen.takes_pictures:
        module, inputs, preprocessing = of_pictures(loaded.name, module, inputs, preprocessing)
        chosen = chosen if labels is not None else chosen.configured(labels=loaded.labels)
    if images is not None and chosen.takes_pictures and isinstance(images.x, Inputs):
        raise InputError("the data are what the model takes, and the artifact takes pictures: give pictures, or bytes")
    with staged(as_path(out), force=force) as folder:
        try:
            made = chosen.lower(loaded.name, module, inputs, folder, threads=count)
            made = replace(made, preprocessing=preprocessing)
            measured = {} if images is None else _measured(
                loaded, module, chosen.answers(made, module, inputs), made, images, len(inputs[0]), progress
            )  # fmt: skip
            notes = (*made.notes, *filter(None, [chosen.answers_note if measured else ""]))
            artifact = recorded(replace(made, measured=measured, notes=notes), folder)
        except Exception as error:
            raise told(f"target {target!r}", error) from error
    return replace(artifact, path=Path(out))


def _laid_out(package: Path, target: Target, out: str | Path, force: bool, data: Data | None) -> Artifact:
    if data is not None:
        raise InputError("a package that is laid out anew has no model to be measured beside: leave --data out")
    if not package.is_dir():
        raise InputError(f"there is no package {package}: give a .mlpackage folder that coremltools or lower wrote")
    with staged(as_path(out), force=force) as folder:
        try:
            artifact = target.lay_out(package, folder)
        except Exception as error:
            raise told(f"target {target.name!r}", error) from error
    return replace(artifact, path=Path(out))


def _measured(
    loaded: Source,
    module: nn.Module,
    answers: Callable[..., tuple[Tensor, ...]],
    artifact: Artifact,
    images: Images,
    batch: int,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """How the model and the artifact made of it do on images, `batch` at a time, and how often they agree."""
    modules: dict[str, Callable[..., Any]] = {"model": module, "artifact": answers}
    how_run: dict[str, Any] = {"input_size": image_size_of(loaded), "batch_size": batch, "progress": progress}
    found = _evaluated(loaded, modules, images, artifact.preprocessing, "model", **how_run)
    return {name: asdict(each) for name, each in found.items()}


def _evaluated(
    source: Source,
    modules: Mapping[str, Callable[..., Any]],
    images: Images,
    preprocessing: Preprocessing | None,
    reference: str | None,
    **how_run: Any,
) -> dict[str, records.Evaluation]:
    """How modules do, that answer as `source` does: by classes where it gives some, else by all that they give."""
    if reference is None:
        return evaluate_modules(modules, images, preprocessing, **how_run)
    measure = evaluate_modules if _classifies(source, images) else evaluate_outputs
    return measure(modules, images, preprocessing, reference=reference, **how_run)


def _classifies(source: Source, images: Images) -> bool:
    """Whether the largest element of a model's first output for `images` is a class."""
    return gives_logits(runnable(source), source.example_inputs) and says_classes(source, images)


class Comparison(records.Comparison):
    """What `compare` gives: the record, and how to look at it."""

    def to_table(self) -> Group:
        """A table for the terminal, its notes numbered below it."""
        return comparison_table(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the page, self-contained, to `path`. Raises InputError where it cannot be written."""
        write_file(as_path(path), comparison_page(self), force=True)
        return Path(path)


@known_keywords_only
def compare(
    models: Mapping[str, Model],
    example_inputs: tuple[Tensor, ...] | None = None,
    *,
    targets: Sequence[str] = ("host",),
    data: Data | None = None,
    threads: int | None = None,
    cpu: str | None = None,
    precision: str | None = None,
    rpc: str | None = None,
    rpc_timeout: float | None = None,
    device: str | None = None,
    development_team: str | None = None,
    device_timeout: float | None = None,
    earlier: records.Comparison | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Comparison:
    """One row for each (model, target, runtime): measured, estimated, or unavailable with the reason.

    Args:
        models: by the names that their rows bear; the others' agreement is taken against the first.
        data: images, labelled or not, to compare the accuracy on as well, or how far outputs are from the first
            model's where those are no logits; for models of several inputs a tensor for each, as for calibration.
        cpu, precision: see `lower`; `precision` holds for host as TVM compiles it, and for arm-cpu.
        rpc: "host:port" of a device where `python -m tvm.exec.rpc_server` runs: host and arm-cpu are measured there,
            too, within `rpc_timeout` seconds for each model.
        device: the name of an iPhone connected to this Mac: coreml-npu is measured there, by an app that
            `development_team` signs, within `device_timeout` seconds for each model.
        earlier: what it has measured (`evaluation.records.load_comparison`) is not measured again.
        how: checkpoint, input_size, mean, std, as `load_source` takes them, of all models.

    Raises:
        InputError: a model, a target or the data cannot be used.
    """
    count = 1 if threads is None else thread_count(threads)
    sources = {
        name: _sound(load_beside(model, models.values(), example_inputs, **how))
        for name, model in required("models", models, Mapping).items()
    }
    first = next(iter(sources.values()), None)
    images = None if data is None or first is None else load_data(first, data)
    # of one model alone nothing else can be told; the others answer the same question as the first
    classes = first is None or images is None or len(sources) == 1 or _classifies(first, images)
    compared = {}
    for name, loaded in sources.items():
        module, free = runnable(loaded), None if data is None else any_batch(loaded)
        inputs, sites = _one_call(loaded, module), sites_of(models[name], loaded)
        compared[name] = CompareModel(
            name, module, inputs, loaded.preprocessing, sites, free, classes, image_size_of(loaded)
        )
    options = {"cpu": cpu, "precision": precision, "rpc": rpc, "rpc_timeout": rpc_timeout, "device": device}
    options |= {"development_team": development_team, "device_timeout": device_timeout}
    found = compare_models(
        compared, names("targets", targets), images, threads=count, options=options, earlier=earlier, progress=progress
    )
    return Comparison(found.environment, found.rows)


def sites_of(model: Model, loaded: Source) -> tuple[dict[str, Any], ...]:
    """What stands at each site of a model: by the plan of its conversion where it is one, else softmax as found."""
    if isinstance(model, Conversion):
        return tuple(model.report["sites"])
    found = tuple(site_facts(site, site.id, "softmax") for site in explain(loaded).sites)
    return found if loaded.folder is None else planned_sites(loaded.folder, found)


def _sound(source: Source) -> Source:
    """The source. Raises InputError where its weights or its example hold no numbers."""
    require_numbers(source.name, source.tensors, source.example_inputs)
    return source


def _original(source: Model, loaded: Source, original: Model | None) -> Source | None:
    """What a model is held against: what is given, or what it was converted from."""
    if original is not None:
        return load(original)
    if isinstance(source, Conversion):
        return Source(str(source.report["model"]), source.original, None, source.example_inputs, source.preprocessing)
    if loaded.folder is None or loaded.origin is None:
        return None
    try:
        return loaded.original()
    except InputError as error:
        logging.getLogger("attnrewrite").warning("no agreement: the original is not loaded (%s)", error)
        return None


def _one_call(loaded: Source, module: nn.Module) -> tuple[Tensor, ...]:
    """Inputs of one image, or of the only batch that the model takes."""
    return loaded.example_inputs if fixed_batch(loaded) is not None else one_image(module, loaded.example_inputs)


__all__ = ["Comparison", "Conversion", "compare", "convert", "evaluate", "explain", "lower", "supported"]
