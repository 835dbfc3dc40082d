"""Which models our CPU schedules lower for the host, whether they are right, and how fast beside other runtimes.

    python benchmarks/lowering_zoo.py [--models NAME ...] [--zoo FOLDER] [--batch 1] [--rounds 20] [--results FILE]
                                      [--peers onnxruntime openvino ...]

Every model of the detection benchmark, or of `FOLDER/zoo.py` (a dictionary REG and build(name)), in a process of its
own with limits of time and memory. The output is compared with torch's as `lower` does. Times are CPU time of one
thread, ours and the others' in turns; a ratio is ours over the fastest other's, below 1 where ours is faster. A row
goes to the results file as soon as it is known, and what is in the file is not done again; progress goes to standard
error.
"""

import argparse
import contextlib
import importlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from runtimes import OURS, PEERS, RUNTIMES, measured
from torch import Tensor, nn
from zoo.runs import SHARED, builder, chosen, in_own_process

from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, Refusal, first_line
from attnrewrite.targets.prepare import arrays, in_float32, specialise
from attnrewrite.targets.record import Decision
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

DUE = ("right", "refused", "wrong", "failed")  # what a lowering can come to; torch.export failing is no fault of it


@dataclass(frozen=True)
class Row:
    """One model. `error` is the largest difference to torch's output over the most allowed.

    `status`: right; refused (an operator is not supported, and named); wrong (the output disagrees); failed (it
    crashed, or took too long or too much memory); not exported (torch.export fails). `scheduled` is the share of
    multiply-adds that our rules took, `left` are the operators that they left to TVM's default. Compiling in seconds, a
    call in milliseconds of CPU time: `ours`, and of `peers`, the others that run it and are right.
    """

    model: str
    status: str
    reason: str = ""
    error: float | None = None
    scheduled: float | None = None
    left: tuple[str, ...] = ()
    compiling: float | None = None
    ours: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The fastest of the others."""
        return min(self.peers, key=lambda name: self.peers[name], default=None)

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.best is None else self.ours / self.peers[self.best]


def measure(model: str, folder: Path | None, batch: int, rounds: int, peers: Sequence[str]) -> Row:
    """Build, lower, check and time one model."""
    built, given = builder(folder)[1](model)
    inputs = tuple(tensor[:batch] for tensor in given)
    try:
        specialise(built, inputs)
    except InputError as error:
        return Row(model, "not exported", str(error))
    try:
        return lowered(model, built, inputs, rounds, peers)
    except CheckFailedError as error:
        return Row(model, "wrong", str(error))
    except AttnRewriteError as error:
        return Row(model, "refused", str(error))
    except MemoryError:
        return Row(model, "failed", "took more memory than allowed")


def lowered(model: str, built: nn.Module, inputs: tuple[Tensor, ...], rounds: int, peers: Sequence[str]) -> Row:
    wide = in_float32(built, inputs)
    started = time.perf_counter()
    made = tvm_compat.build_for_cpu(import_program(specialise(wide.module, wide.inputs)), "host")
    compiling = time.perf_counter() - started
    ours = tvm_compat.bind(made.executable, wide.inputs, 1)
    agreement = wide.agree(model, ours())
    row = Row(
        model,
        "right",
        error=agreement.max_abs_error / agreement.tolerance,
        scheduled=math.fsum(each.share for each in made.operators if each.reason is None),
        left=tuple(f"{name} x{count}" for name, count in left(made.operators)),
        compiling=compiling,
    )
    if not rounds:
        return row
    calls: dict[str, Callable[[], object]] = {OURS: ours}
    failed = []
    for name in peers:
        try:
            call = RUNTIMES[name](wide.module, wide.inputs)(1)
            wide.agree(f"{model} in {name}", arrays(call()))
            calls[name] = call
        except Exception as error:  # a peer that fails is no failure of ours
            failed.append(f"{name}: {first_line(error)}")
    times = {name: statistics.median(each) for name, each in measured(calls, time.process_time, rounds).items()}
    return replace(row, ours=times.pop(OURS), peers=times, reason="; ".join(failed))


def left(decisions: Iterable[Decision]) -> list[tuple[str, int]]:
    """The operators that no rule took, the most frequent first."""
    return Counter(each.operators[0] for each in decisions if each.reason is not None).most_common()


def table(rows: Sequence[Row]) -> str:
    """The rows as a markdown table, and below it how many of each status there are."""
    columns = ("model", "status", "error", "by rules", "compiled", "ours", "best other", "ratio", "left to TVM", "why")
    lines = [f"| {' | '.join(columns)} |", f"|{'-|' * len(columns)}"]
    for row in rows:
        cells = (
            row.model,
            row.status,
            told(row.error, "{:.3f}"),
            told(row.scheduled, "{:.1%}"),
            told(row.compiling, "{:.1f} s"),
            told(row.ours, "{:.2f} ms"),
            f"{row.peers[row.best]:.2f} ms ({row.best})" if row.best else "",
            told(row.ratio, "{:.2f}"),
            ", ".join(row.left),
            row.reason.replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *totals(rows)])


def told(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def totals(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row.status for row in rows)
    due = sum(counts[status] for status in DUE)
    lines = [
        f"{counts['right']} of {due} right; {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
    ]
    ratios = {row.model: row.ratio for row in rows if row.ratio is not None}
    if ratios:
        lines.append(f"ours over the fastest other's CPU time, {summary(ratios)}")
    for peer in PEERS:
        beside = {row.model: row.ours / row.peers[peer] for row in rows if row.ours is not None and peer in row.peers}
        if beside:
            lines.append(f"ours over {peer}'s CPU time, {summary(beside)}")
    return lines


def summary(ratios: Mapping[str, float]) -> str:
    worst = max(ratios, key=lambda model: ratios[model])
    mean = np.exp(np.mean(np.log(list(ratios.values()))))
    return f"{len(ratios)} models: geometric mean {mean:.2f}, worst {ratios[worst]:.2f} ({worst})"


def read(results: Path) -> dict[str, Row]:
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [Row(**{**(found := json.loads(line)), "left": tuple(found["left"])}) for line in lines]
    return {row.model: row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("out/lowering_zoo.jsonl"), help="rows so far; added to")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--zoo", type=Path, help="a folder with another zoo.py")
    parser.add_argument("--batch", type=int, default=1, help="images at a time")
    parser.add_argument("--rounds", type=int, default=20, help="calls that are timed; 0: only whether it is right")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=["onnxruntime"], help="by default onnxruntime", metavar="NAME"
    )
    parser.add_argument("--seconds", type=float, default=300, help="that one model may take")
    parser.add_argument("--gigabytes", type=float, default=16, help="of address space that one model may take")
    parser.add_argument("--again", action="store_true", help="do what is in the results but was not right again")
    asked = parser.parse_args()
    try:
        wanted = chosen("model", asked.models, builder(asked.zoo)[0])
    except InputError as error:
        parser.exit(2, f"{error}\n")
    for library in SHARED:  # imported once, and not by each model's process
        with contextlib.suppress(ImportError, RuntimeError):
            importlib.import_module(library)
    done = read(asked.results)
    settled = ("right", "not exported") if asked.again else (*DUE, "not exported")
    todo = [model for model in wanted if model not in done or done[model].status not in settled]
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    for count, model in enumerate(todo, start=1):
        work = partial(measure, model, asked.zoo, asked.batch, asked.rounds, asked.peers)
        found = in_own_process(work, asked.seconds, asked.gigabytes)
        row = done[model] = Row(model, "failed", str(found)) if isinstance(found, Refusal) else found
        with asked.results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        ratio = told(row.ratio, f", {{:.2f}} of {row.best}'s time")
        print(f"[{count}/{len(todo)}] {model}: {row.status}{ratio} {row.reason}", file=sys.stderr, flush=True)
    print(table([done[model] for model in wanted if model in done]))


if __name__ == "__main__":
    main()
