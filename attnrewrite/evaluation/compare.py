"""Models against each other on every target: quality once per model, then one row per (model, target, runtime).

Whatever can run on this machine is timed in turns in one run, so that a machine that slows down slows all of them; the
rest is built and checked where that can be done, and says why it was not measured.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnrewrite.errors import InputError, Refusal, told
from attnrewrite.evaluation.accuracy import evaluate_modules
from attnrewrite.evaluation.latency import Latency, environment, measure, quantiles
from attnrewrite.evaluation.outputs import evaluate_outputs
from attnrewrite.evaluation.records import Comparison, Evaluation, Quantiles, Row, Status
from attnrewrite.evaluation.resume import Key, described, fingerprint, key_of, measured_before
from attnrewrite.images.dataset import Images
from attnrewrite.images.preprocessing import Preprocessing, Size
from attnrewrite.request import Progress
from attnrewrite.targets.base import Artifact, Estimate, Run, Target, get_target


@dataclass(frozen=True)
class CompareModel:
    """A model to compare, in evaluation mode. The batch of `example_inputs` is what one call is timed with.

    Each of `sites` has id, name, variant, heads, head_dim, n_queries, n_keys and note. `any_batch` is the same model
    for any number of images, where `module` takes one batch size only. `classifies`: the first output is logits.
    Image files are read at `input_size`.
    """

    name: str
    module: nn.Module
    example_inputs: tuple[Tensor, ...]
    preprocessing: Preprocessing | None = None
    sites: tuple[dict[str, Any], ...] = ()
    any_batch: nn.Module | None = None
    classifies: bool = True
    input_size: Size | None = None


def compare_models(
    models: Mapping[str, CompareModel],
    targets: Sequence[str],
    images: Images | None = None,
    *,
    threads: int = 1,
    repeats: int = 30,
    budget_s: float | None = 120.0,
    options: Mapping[str, Any] | None = None,
    earlier: Comparison | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare `models` on `targets`; the first is what the others are held against.

    `images` gives top-1 (where they are labelled) and agreement with the first model, or how far outputs are from its
    own where those are no logits; `budget_s` ends the timing early
    where calls are slow. `options` are for those of the targets that have them. A model that a target cannot take is a
    row that says so, not an error. What `earlier` has measured, of the same models on the same machine, stands: only
    the rest is built and timed.

    Raises:
        InputError: no model, an unknown target, an option that none of the targets has, or models that cannot be given
            the same images.
    """
    if not models:
        raise InputError("there is nothing to compare: give a model, or several")
    chosen = _configured([get_target(name) for name in dict.fromkeys(targets)], options or {})
    where = environment(threads)
    where |= {"targets": described(chosen), "models": {name: _hash(model) for name, model in models.items()}}
    before = measured_before(earlier, where)
    order: list[Key] = []
    qualities = {} if images is None else evaluated(models, images, progress)
    pairs = [(name, target) for name in models for target in chosen]
    runs: list[tuple[str, Target, Run]] = []
    for done, (name, target) in enumerate(pairs, 1):
        own = _standing(earlier, before, name, target)
        if not own:
            made = prepared(models[name], target, threads)
            own = [(name, target.name, run.runtime) for run in made]
            runs += [(name, target, run) for key, run in zip(own, made, strict=True) if key not in before]
        order += own
        if progress is not None:
            progress("build", done, len(pairs))
    by_name = {target.name: target for target in chosen}
    latencies = timed([run for _, _, run in runs], repeats, budget_s, progress)
    costs = {name: cost(model) for name, model in models.items()}
    rows = [
        _row(
            models[name],
            target,
            run,
            latency,
            _quality(qualities.get(name), target, run.runtime),
            costs[name],
            _estimate_in_words(run, target, runs),
        )
        for (name, target, run), latency in zip(runs, latencies, strict=True)
    ]
    rows += [
        _judged(before[key], _quality(qualities.get(key[0]), by_name[key[1]], key[2])) for key in order if key in before
    ]
    return Comparison(where, tuple(sorted(rows, key=lambda row: order.index(key_of(row)))))


def _hash(model: CompareModel) -> str:
    return fingerprint(model.module, model.example_inputs, model.sites)


def _configured(targets: Sequence[Target], options: Mapping[str, Any]) -> list[Target]:
    """The targets, each with those of the options that it has."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if not any(name in target.options() for target in targets):
            known = ", ".join(target.name for target in targets)
            raise InputError(f"--{name.replace('_', '-')} is for none of the targets {known}: leave it out")
    return [target.configured(**{k: v for k, v in given.items() if k in target.options()}) for target in targets]


def _standing(earlier: Comparison | None, before: Mapping[Key, Row], name: str, target: Target) -> list[Key]:
    """What an earlier comparison told of a model on a target, where all of that was measured; else nothing."""
    keys = [key_of(row) for row in (earlier.rows if earlier else ())]
    own = [key for key in keys if key[:2] == (name, target.name)]
    return own if all(key in before for key in own) else []


def _quality(quality: Evaluation | None, target: Target, runtime: str) -> Evaluation | None:
    """What a model is worth in a runtime of a target: not known where that loses more than rounding."""
    return quality if target.loses(runtime) is None else None


def _judged(row: Row, quality: Evaluation | None) -> Row:
    """A row, maybe of an earlier run, with what its model is worth on the images of this one."""
    if quality is None:
        return row
    return replace(row, top1=quality.top1, agreement=quality.agreement, output_error=quality.error)


def evaluated(
    models: Mapping[str, CompareModel], images: Images, progress: Progress | None = None
) -> dict[str, Evaluation]:
    """Top-1 and agreement with the first model, or the distance from its outputs, over the same batches."""
    first, *others = models.values()
    for model in others:
        if model.preprocessing != first.preprocessing:
            raise InputError(
                f"{first.name} and {model.name} prepare their images differently: give --mean and --std, for both"
            )
        taken = [[list(each.shape[1:]) for each in one.example_inputs] for one in (first, model)]
        if taken[0] != taken[1]:
            raise InputError(
                f"{first.name} takes inputs of {taken[0]} for an image and {model.name} of {taken[1]}, and cannot be "
                "given the same data: give models of the same inputs, or leave --data out"
            )
    modules = {name: model.any_batch or model.module for name, model in models.items()}
    how: dict[str, Any] = {"input_size": first.input_size, "progress": progress}
    if first.classifies or not others:
        return evaluate_modules(modules, images, first.preprocessing, reference=first.name if others else None, **how)
    return evaluate_outputs(modules, images, first.preprocessing, reference=first.name, **how)


def prepared(model: CompareModel, target: Target, threads: int) -> tuple[Run, ...]:
    """The model in every runtime of `target`.

    What this machine cannot run but can build is built and checked: its size and error are known, its time is not.
    """
    try:
        runs = target.runs(model.name, model.module, model.example_inputs, threads=threads)
        if target.availability().measure is None:
            return runs
        built, estimate = _built(model, target, threads)
    except Exception as error:  # a target of another package raises what it likes
        return (Run.refused("–", Refusal("failed", str(told(f"target {target.name!r}", error)))),)
    note = "; ".join((f"checked: {built.check}", f"schedule: {built.schedule}", *built.notes))
    return tuple(
        replace(
            run,
            max_abs_error=built.max_abs_error,
            size_bytes=built.size_bytes,
            note=note,
            estimate=estimate,
            instructions=built.instructions,
            cycles=built.cycles,
        )
        for run in runs
    )


def _built(model: CompareModel, target: Target, threads: int) -> tuple[Artifact, Estimate | None]:
    with tempfile.TemporaryDirectory() as folder:
        made = target.lower(model.name, model.module, model.example_inputs, Path(folder), threads=threads)
        return made, target.estimate(made)


def timed(
    runs: Sequence[Run], repeats: int, budget_s: float | None, progress: Progress | None = None
) -> list[Latency | None]:
    """The latency of every run that has a call, all in one interleaved measurement, and of those that a device has
    timed; None for the others.
    """
    calls = {str(index): run.call for index, run in enumerate(runs) if run.call is not None}
    rounds = None if progress is None else lambda done, total: progress("measure", done, total)
    latencies = measure(calls, repeats=repeats, budget_s=budget_s, progress=rounds) if calls else {}
    return [quantiles(run.seconds) if run.seconds else latencies.get(str(index)) for index, run in enumerate(runs)]


@torch.no_grad()
def cost(model: CompareModel) -> tuple[int, int]:
    """Parameters, and multiply-adds for one image: what torch counts of its matrix products and convolutions."""
    # Written out as products, attention is counted whatever kernel this machine would take.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.module(*model.example_inputs)
    params = sum(parameter.numel() for parameter in model.module.parameters())
    images = next((len(tensor) for tensor in model.example_inputs if tensor.dim()), 1)
    return params, counter.get_total_flops() // 2 // images


def _row(
    model: CompareModel,
    target: Target,
    run: Run,
    latency: Latency | None,
    quality: Evaluation | None,
    cost: tuple[int, int],
    estimated: str,
) -> Row:
    params, macs = cost
    time = None if latency is None else Quantiles(latency.p50_ms, latency.p90_ms)
    told = latency is None and run.estimate is not None and run.estimate.trusted
    if told and run.estimate is not None:
        time = Quantiles(run.estimate.ms, run.estimate.high)
    row = Row(
        model=model.name,
        target=target.name,
        runtime=run.runtime,
        status=_status(latency is not None, told or run.instructions is not None),
        latency_ms=time,
        instructions=run.instructions,
        cycles=run.cycles,
        top1=None,
        agreement=None,
        size_bytes=run.size_bytes,
        params=params,
        macs=macs,
        max_abs_error=run.max_abs_error,
        sites=model.sites,
        note="; ".join(filter(None, (str(run.reason or ""), estimated, run.note))),
    )
    return _judged(row, quality)


def _status(timed: bool, known: bool) -> Status:
    """`known`: there is no time of a clock, but an estimate, or what an emulator counted."""
    return "measured" if timed else "estimated" if known else "unavailable"


def _estimate_in_words(run: Run, target: Target, runs: Sequence[tuple[str, Target, Run]]) -> str:
    """The estimate with its interval; or, where it is too far off to be told, the run's place among those of the target
    in the same runtime.
    """
    found = run.estimate
    if found is None:
        return ""
    fit = (
        f"on model families that it was not fitted to, the estimate's rank correlation is {found.ranking:.2f} and its "
        f"median error {found.error:.0%}"
    )
    if found.trusted:
        return f"estimated for {found.device}: {found.ms:.2f} ms, {found.low:.2f} to {found.high:.2f}; {fit}"
    others = [
        other.estimate.ms
        for _, its, other in runs
        if its is target and other.runtime == run.runtime and other.estimate is not None
    ]
    place = 1 + sum(ms < found.ms for ms in others)
    return f"number {place} of {len(others)} in the estimated order for {found.device}, fastest first; no time: {fit}"
