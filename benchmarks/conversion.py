"""What each attention form costs in accuracy after each stage of calibration: points of top-1 lost, mean and spread.

    python benchmarks/conversion.py SOURCE --checkpoint FILE --input-size 3x32x32 --mean ... --std ... \\
        --calibrate train.npz --test test.npz [--rows "l1;masked"] [--closed-form "polynomial;masked:heads=1"] \\
        [--seeds 0,1,2] [--steps 200] [--floor] [--auto "published;all" --max-drop 0.5]

Every form stands on every site that it does not refuse, and rows say on how many; calibration sees no labels.
Multiply-adds are those of attention there, of softmax's. `--rows` go through all stages, `--closed-form` stop after the
fit, which does not train the network. `--floor` adds the same model from weights drawn anew, distilled for as many
steps. A seed draws the calibration images; the spread is the standard deviation over seeds. Rows of --auto are
selections within --max-drop, fitted in closed form: how many sites were replaced, the whole model's multiply-adds as
part of the original's, what was promised, what was lost.
Prints a markdown table, a row as soon as it is known, and the machine it was made on: a GPU, where there is one.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from forms import named
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.calibration.distill import Distillation
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.processes import Processes, joined_processes, placed
from attnrewrite.calibration.reconstruct import Reconstruction
from attnrewrite.calibration.stage import Stage, StageInput
from attnrewrite.calibration.stages import Copy, split
from attnrewrite.conversion.convert import convert_source
from attnrewrite.conversion.record import Conversion, deployed
from attnrewrite.evaluation.accuracy import evaluate_modules
from attnrewrite.evaluation.latency import environment
from attnrewrite.evaluation.records import Evaluation
from attnrewrite.frontends.capture import Captured, capture
from attnrewrite.frontends.sources import Source, load_source
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.images.pool import Pool
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.request import Budget, Calibration, Execution
from attnrewrite.selection.problem import Auto, requested
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

ROWS = "masked;l1;l1:local=true;mobile;mobile:local=true;separable;separable:local=true;additive;additive:local=true"
CLOSED_FORM = (
    "masked:heads=1;polynomial:rank=8,degree=6;polynomial:rank=8;polynomial:rank=6;polynomial;"
    "polynomial:max_features=15,local=true;polynomial:max_features=15;relu-linear:local=true"
)
STAGES = ("copy", "fit", "blocks", "distil")
SCRATCH_RATE = 1e-3


@dataclass(frozen=True)
class Bench:
    source: Source
    captured: Captured
    calibration: Images
    test: Images
    samples: int
    steps: int
    processes: Processes

    @cached_property
    def found(self) -> Sequence[AttentionSite]:
        return scan(FxGraph(self.captured.module), self.source.name).sites

    def sites(self, variant: Variant) -> list[AttentionSite]:
        """Those that `variant` does not refuse."""
        return [site for site in self.found if variant.refuse(site) is None]

    def with_variant(self, variant: Variant, sites: Sequence[AttentionSite]) -> GraphModule:
        """The model with `variant` at `sites`."""
        placements = tuple(Placement.at(site, variant) for site in sites)
        return FxRewrite(Plan(self.source.name, placements))(self.captured.module)

    def multiplies(self, variant: Variant) -> float:
        """The multiply-adds of attention, of softmax's, over the sites that `variant` does not refuse."""
        sites = self.sites(variant)
        return sum(map(variant.multiplies, sites)) / sum(map(get_variant("softmax").multiplies, sites))

    def given(self, variant: Variant, seed: int) -> StageInput:
        images = self.calibration.sample(self.samples, seed)
        pool = Pool(images, self.source.preprocessing, self.source.input_size, self.captured.fixed_batch or 64)
        sites = self.sites(variant)
        teacher, student = (self.with_variant(each, sites) for each in (get_variant("softmax"), variant))
        modules = self.captured.module, teacher, student
        return StageInput(*modules, *split(pool), Execution(seed), processes=self.processes)

    @cached_property
    def wanted(self) -> Tensor:
        """The original's logits on the test images."""
        return self.answers(self.captured.module)

    def answers(self, model: GraphModule) -> Tensor:
        size = self.captured.fixed_batch or 128
        pool = Pool(self.test, self.source.preprocessing, self.source.input_size, size)
        return pool.outputs(model, self.processes.device).cpu()

    def run(self, variant: Variant, seed: int, stages: Sequence[Stage]) -> Iterator[tuple[float, float, float]]:
        """After each stage: points lost, agreement in percent, and the stage's seconds."""
        given = self.given(variant, seed)
        with self.placed(given):
            for stage in stages:
                started = time.perf_counter()
                stage.run(given)
                yield self.figures(given, time.perf_counter() - started)

    def placed(self, given: StageInput) -> AbstractContextManager[None]:
        """Where the stages compute."""
        return placed(self.processes.device, given.original, given.teacher, given.student)

    def floor(self, seed: int) -> tuple[float, float, float]:
        """The same after distillation alone, from weights of the same mean and spread drawn anew."""
        given = self.given(get_variant("softmax"), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in given.student.parameters():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor.mean() + noise * tensor.std(correction=0))
        with self.placed(given):
            started = time.perf_counter()
            Distillation(self.steps, rate=SCRATCH_RATE).run(given)
            return self.figures(given, time.perf_counter() - started)

    def auto(self, asked: Variant | Auto, seed: int) -> tuple[Conversion, Evaluation, float, float]:
        """What `asked` makes: the conversion, what it does on the test images, points lost and seconds."""
        started = time.perf_counter()
        done = convert_source(self.source, asked, Calibration(self.calibration, self.samples), Execution(seed))
        seconds = time.perf_counter() - started
        found = evaluate_modules(
            {"original": done.original, "auto": deployed(done.module)}, self.test, self.source.preprocessing,
            input_size=self.source.input_size, reference="original", batch_size=self.captured.fixed_batch,
        )  # fmt: skip
        assert found["original"].top1 is not None, "the test images need labels"
        assert found["auto"].top1 is not None
        return done, found["auto"], found["original"].top1 - found["auto"].top1, seconds

    def figures(self, given: StageInput, seconds: float) -> tuple[float, float, float]:
        assert self.test.y is not None, "the test images need labels"
        labels = torch.as_tensor(self.test.y)
        found = self.answers(given.student)
        right = [float((logits.argmax(1) == labels).double().mean()) for logits in (self.wanted, found)]
        agreement = float((found.argmax(1) == self.wanted.argmax(1)).double().mean())
        return 100 * (right[0] - right[1]), 100 * agreement, seconds


def told(lost: list[float]) -> str:
    """Points lost: the mean, and the spread where there are several seeds."""
    spread = f" ± {statistics.stdev(lost):.1f}" if len(lost) > 1 else ""
    return f"{statistics.mean(lost):.1f}{spread}"


def auto_rows(bench: Bench, row: str, asked: Variant | Auto, seeds: list[int]) -> None:
    """A table of its own: a line for each seed, as promises are kept one by one."""
    print(f"\n| {row} | sites | cost | promised | lost | agreement | seconds |\n|{'-|' * 7}")
    for seed in seeds:
        done, found, lost, seconds = bench.auto(asked, seed)
        promise = done.report["selection"]["promise"]
        sites = f"{promise['replaced']} of {len(done.report['sites'])} | {promise['cost_ratio']:.3f}"
        bound = f"{promise['points']:.2f}, at most {promise['bound']:.2f}"
        print(f"| seed {seed} | {sites} | {bound} | {lost:.2f} | {found.agreement:.1f} | {seconds:.0f} |", flush=True)


def stage_rows(bench: Bench, rows: Mapping[str, Variant], stages: Sequence[Stage], seeds: list[int]) -> None:
    """A line for each form of `rows`; empty where a stage is not asked for."""
    blank = [""] * (len(STAGES) - len(stages))
    for row, variant in rows.items():
        found = list(zip(*(list(bench.run(variant, seed, stages)) for seed in seeds), strict=True))
        lost = [told([figures[0] for figures in stage]) for stage in found]
        agreement = statistics.mean(figures[1] for figures in found[-1])
        seconds = " + ".join(f"{statistics.mean(figures[2] for figures in stage):.0f}" for stage in found[1:])
        sites = f"{len(bench.sites(variant))} of {len(bench.found)}"
        cells = [row, sites, f"{bench.multiplies(variant):.2f}", *lost, *blank, f"{agreement:.1f}", seconds]
        print(f"| {' | '.join(cells)} |", flush=True)


def floor_row(bench: Bench, seeds: list[int]) -> None:
    floor = [bench.floor(seed) for seed in seeds]
    agreement, seconds = (statistics.mean(figures[part] for figures in floor) for part in (1, 2))
    blank = " | ".join([""] * (len(STAGES) - 1))
    print(
        f"| from scratch | none | 1 | {blank} | {told([f[0] for f in floor])} | {agreement:.1f} | {seconds:.0f} |",
        flush=True,
    )


def parsed(rows: str) -> dict[str, Variant]:
    """The variants that rows divided by semicolons name."""
    return {row: get_variant(*named(row)) for row in rows.split(";") if row}


def selections(sets: str | None, max_drop: float) -> dict[str, Variant | Auto]:
    """What sets of candidates divided by semicolons ask for, by what their rows are called."""
    return {
        f"auto, {each}, at most {max_drop:g}": requested(
            "auto", budget=Budget(max_drop, candidates=tuple(each.split(",")))
        )
        for each in (sets or "").split(";")
        if each
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    for name in ("checkpoint", "input-size", "mean", "std"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--rows", default=ROWS, help="variant:option=value,..., divided by semicolons")
    parser.add_argument("--closed-form", default=CLOSED_FORM, help="rows that stop after the fit")
    parser.add_argument("--floor", action="store_true", help="the last row: distilled from scratch")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200, help="of distillation")
    parser.add_argument("--auto", help="what selections choose from, divided by semicolons: published;all")
    parser.add_argument("--max-drop", type=float, default=0.5, help="points that a selection may lose")
    parser.add_argument("--test-images", type=int, help="how many, drawn once; by default all")
    chosen = parser.parse_args()
    closed_form, rows = parsed(chosen.closed_form), parsed(chosen.rows)  # a wrong name is told now, not after hours
    autos = selections(chosen.auto, chosen.max_drop)
    torch.set_num_threads(1)
    source = load_source(
        chosen.source, checkpoint=chosen.checkpoint, input_size=chosen.input_size, mean=chosen.mean, std=chosen.std
    )
    captured = capture(source.name, source.model or source.program, source.example_inputs)  # type: ignore[arg-type]
    test = load_images(chosen.test)
    test = test.sample(chosen.test_images or len(test), 0)
    processes = joined_processes()
    bench = Bench(source, captured, load_images(chosen.calibrate), test, chosen.samples, chosen.steps, processes)
    for row, variant in {**closed_form, **rows}.items():
        if not bench.sites(variant):
            reasons = sorted({str(variant.refuse(site)) for site in bench.found})
            parser.error(f"{row} takes none of the {len(bench.found)} sites of {source.name}: {'; '.join(reasons)}")
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    print(f"| variant | sites | multiply-adds | {' | '.join(STAGES)} | agreement | seconds |", flush=True)
    print(f"|{'-|' * (len(STAGES) + 5)}", flush=True)
    closed: tuple[Stage, ...] = (Copy(), Fit())
    stage_rows(bench, closed_form, closed, seeds)
    stage_rows(bench, rows, (*closed, Reconstruction(chosen.steps), Distillation(chosen.steps)), seeds)
    if chosen.floor:
        floor_row(bench, seeds)
    for row, asked in autos.items():
        auto_rows(bench, row, asked, seeds)
    print(f"\n{len(test)} test images, {chosen.samples} for calibration, {chosen.steps} steps; {environment(1)}")
    if processes.device != "cpu":
        print(f"on one {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")


if __name__ == "__main__":
    main()
