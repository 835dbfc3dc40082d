"""Which models become a Core ML package that the interpreter confirms, and why the others do not.

    python benchmarks/coreml_zoo.py [--models NAME ...] [--zoo FOLDER] [--layouts as-is engine] [--results FILE]

Every model of the detection benchmark, or of `FOLDER/zoo.py` (a dictionary REG and build(name)), is lowered as it is
and with its attention converted. A row goes to the results file as soon as it is known, and what is in the file is not
done again; progress goes to standard error. A model that crashes or hangs costs its own row alone. With the layouts
as-is and engine, the table shows what the layout gains by the rules of the Neural Engine.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forms import converted
from torch import Tensor, nn
from zoo.runs import SHARED, builder, chosen, in_own_process

from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, NothingMatchedError, Refusal, first_line
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.coreml.lowering import lower
from attnrewrite.targets.coreml.package import Wanted
from attnrewrite.targets.coreml.pipeline import LAYOUTS
from attnrewrite.targets.prepare import reference, specialise

VARIANT = "l1:approximate=true"  # the published form, also where it must leave out a mask or a bias
FORMS = ("original", "converted")
OURS = ("confirmed", "refused", "wrong", "failed")  # what a lowering can come to


@dataclass(frozen=True)
class Task:
    """What a row is of."""

    model: str
    form: str
    layout: str


@dataclass(frozen=True)
class Row:
    """One model in one form and layout. Errors are the largest differences to the module, over the most allowed.

    `status`: confirmed; refused (an operator is not supported, and named); wrong (the package disagrees); failed (it
    crashed or took too long); and what is no fault of the lowering: not exported (torch.export fails), not converted
    (no attention that the variant takes). `multiply_adds` and `operators` are the shares that the rules leave on the
    Neural Engine.
    """

    model: str
    form: str
    layout: str
    status: str
    reason: str = ""
    float32: float | None = None
    float16: float | None = None
    multiply_adds: float | None = None
    operators: float | None = None
    transposes: int | None = None
    seconds: float = 0.0

    @property
    def task(self) -> Task:
        return Task(self.model, self.form, self.layout)


def measure(task: Task, variant: str, folder: Path | None) -> Row:
    """Build, convert where asked, lower and check one model."""
    row = partial(Row, **asdict(task))
    try:
        module, inputs = subject(builder(folder)[1], task.model, task.form, variant)
    except (NothingMatchedError, CheckFailedError, InputError) as error:
        return row(status="not converted", reason=first_line(error))
    try:
        program = specialise(module, inputs)
    except InputError as error:
        return row(status="not exported", reason=first_line(error))
    with tempfile.TemporaryDirectory() as out:
        try:
            made = lower(task.model, program, inputs, reference(module, inputs), Path(out), Wanted(task.layout))
        except CheckFailedError as error:
            return row(status="wrong", reason=str(error))
        except AttnRewriteError as error:
            return row(status="refused", reason=str(error))
    multiply_adds, operators = made.engine.staying()
    return row(
        status="confirmed",
        float32=made.float32.max_abs_error / made.float32.tolerance,
        float16=made.float16.max_abs_error / made.float16.tolerance,
        multiply_adds=multiply_adds, operators=operators, transposes=len(made.engine.breaking("transpose")),
    )  # fmt: skip


def subject(build: Callable[[str], Any], name: str, form: str, variant: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module of one form, and a single image for it."""
    model, inputs = build(name)
    if form == "converted":
        model = converted(model, inputs, variant)
    return model, tuple(tensor[:1] for tensor in inputs)


def timed(task: Task, variant: str, folder: Path | None, seconds: float) -> Row:
    """What `measure` gives in a process of its own, or the row that says how that ended."""
    started = time.perf_counter()
    row = in_own_process(partial(measure, task, variant, folder), seconds)
    if isinstance(row, Refusal):
        row = Row(**asdict(task), status="failed", reason=str(row))
    return Row(**{**asdict(row), "seconds": round(time.perf_counter() - started, 1)})


def table(rows: Sequence[Row]) -> str:
    """The rows as a markdown table, and below it how many of each status there are."""
    columns = [
        "model",
        "form",
        "layout",
        "status",
        "float32",
        "float16",
        "multiply-adds",
        "operators",
        "transposes",
        "why",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'-|' * len(columns)}"]
    for row in rows:
        errors = ("" if error is None else f"{error:.3f}" for error in (row.float32, row.float16))
        shares = ("" if share is None else f"{share:.1%}" for share in (row.multiply_adds, row.operators))
        transposes = "" if row.transposes is None else str(row.transposes)
        cells = (row.model, row.form, row.layout, row.status, *errors, *shares, transposes, row.reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *totals(rows)])


def totals(rows: Iterable[Row]) -> list[str]:
    """A line for each form and layout. Shares are means over the confirmed."""
    lines = []
    for form, layout in itertools.product(FORMS, LAYOUTS):
        mine = [row for row in rows if (row.form, row.layout) == (form, layout)]
        counts = Counter(row.status for row in mine)
        due = sum(counts[status] for status in OURS)
        right = [row for row in mine if row.status == "confirmed"]
        if not due:
            continue
        told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        adds, operators = (
            sum(getattr(row, share) or 0 for row in right) / max(len(right), 1)
            for share in ("multiply_adds", "operators")
        )
        lines.append(
            f"{form}, {layout}: {len(right)} of {due} confirmed ({len(right) / due:.1%}); {told}; on the engine "
            f"{adds:.1%} of multiply-adds, {operators:.1%} of operators; "
            f"{sum(row.transposes or 0 for row in right)} transposes"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("out/coreml_zoo.jsonl"), help="rows so far; added to")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["engine"])
    parser.add_argument("--variant", default=VARIANT, help="of the converted form, with its options")
    parser.add_argument("--zoo", type=Path, help="a folder with another zoo.py")
    parser.add_argument("--seconds", type=float, default=400, help="of the processor that one row may take")
    parser.add_argument("--again", action="store_true", help="do what is in the results but was not confirmed again")
    asked = parser.parse_args()
    try:
        models = chosen("model", asked.models, builder(asked.zoo)[0])
    except InputError as error:
        parser.exit(2, f"{error}\n")
    import_torchvision()
    for library in SHARED:  # imported once, and not by each model's process
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    done: dict[Task, Row] = {}
    if asked.results.exists():
        rows = [Row(**json.loads(line)) for line in asked.results.read_text().splitlines()]
        done = {row.task: row for row in rows}
    wanted = [Task(*each) for each in itertools.product(models, asked.forms, asked.layouts)]
    settled = (
        ("confirmed", "not converted", "not exported") if asked.again else (*OURS, "not converted", "not exported")
    )
    left = [task for task in wanted if task not in done or done[task].status not in settled]
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    for count, task in enumerate(left, start=1):
        row = done[task] = timed(task, asked.variant, asked.zoo, asked.seconds)
        with asked.results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        told = f"{row.model} {row.form} {row.layout}: {row.status} {row.reason}"
        print(f"[{count}/{len(left)}] {told} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
    print(table([done[task] for task in wanted if task in done]))


if __name__ == "__main__":
    main()
