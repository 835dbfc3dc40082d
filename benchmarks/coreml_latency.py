"""Fits the estimate of Core ML latencies to published times, and says how far off it is on families held out.

    python benchmarks/coreml_latency.py --rows ROWS.json [--check OTHER.json] [--write]

ROWS.json is a list of published times: {"timm_name_if_any", "device", "backend", "latency_ms", "image_size", "note"}.
Each timm model is converted as torch exports it, which is how those who published had it done, and its operators are
counted; counts are kept in `--counts` and not made again. Rows of other models, of CPUs, without a time, or noted to
have left the engine are left out and counted. A model family (what stands before the first underscore of a timm name)
is predicted by what was fitted to all others. `--write` stores the coefficients in targets/coreml/latency.toml;
`--check` holds them against other rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.stats import spearmanr

from attnrewrite.errors import AttnRewriteError, first_line
from attnrewrite.evaluation.latency import environment
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.misread import WRITTEN_OUT
from attnrewrite.targets.coreml import latency, package, spelling
from attnrewrite.targets.prepare import specialise

ROUNDS = 200  # of reweighting: what counts is the sum of relative errors, not of their squares


@dataclass(frozen=True)
class Published:
    """A published time of one timm model."""

    name: str
    size: int
    device: str
    ms: float

    @property
    def family(self) -> str:
        return self.name.split("_")[0]

    @property
    def key(self) -> str:
        return f"{self.name}@{self.size}"


def read(path: Path) -> tuple[list[Published], int]:
    """The rows that can be built and were run on the Neural Engine, once each, and how many there are of all kinds.

    What is noted as having left the engine ("ANE fallback suspected") is no time of the engine.
    """
    told = json.loads(path.read_text())
    rows = {
        Published(row["timm_name_if_any"], row["image_size"], row["device"], row["latency_ms"])
        for row in told
        if row["timm_name_if_any"]
        and row["latency_ms"]
        and "CPU" not in row["backend"].split()
        and "fallback" not in (row["note"] or "")
    }
    return sorted(rows, key=lambda row: (row.device, row.key, row.ms)), len(told)


def counted(rows: Sequence[Published], file: Path) -> dict[str, dict[str, float]]:
    """The quantities of every model, from `file` where they are there."""
    known: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    for key in sorted({row.key for row in rows} - set(known), key=lambda key: "swin" in key):
        started = time.perf_counter()
        name, size = key.split("@")
        try:
            known[key] = latency.quantities(program(name, int(size)))
        except (AttnRewriteError, RuntimeError, TypeError) as error:  # timm's: a model of one size alone
            print(f"{key} is left out: {first_line(error)}", file=sys.stderr, flush=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{key}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return known


def program(name: str, size: int) -> Any:
    """A timm model with random weights as a MIL program in the exporter's own layout."""
    import_torchvision()
    import timm

    own = timm.get_pretrained_cfg(name).input_size[-1]
    module = timm.create_model(name, **({} if own == size else {"img_size": size} if _takes_size(name) else {})).eval()
    exported = Decompose(WRITTEN_OUT)(specialise(module, (torch.zeros(1, 3, size, size),)))
    with package.quiet():
        import coremltools as ct

        # Its passes would take most of the time, and change little of what is counted.
        return ct.convert(
            spelling.readable(exported), convert_to="milinternal", minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32, pass_pipeline=ct.PassPipeline.EMPTY,
        )  # fmt: skip


def _takes_size(name: str) -> bool:
    return name.startswith(("deit", "swin", "vit"))


def fit(rows: Sequence[Published], counts: dict[str, dict[str, float]]) -> latency.Fitted:
    """Coefficients of no less than 0 and a scale for each device, for the least sum of relative errors."""
    terms = list(latency.TERMS)
    work = np.array([[counts[row.key][term] for term in terms] for row in rows])
    times = np.array([row.ms for row in rows])
    devices = sorted({row.device for row in rows})
    of = np.array([devices.index(row.device) for row in rows])
    scales, weight = np.ones(len(devices)), np.ones(len(rows))
    for _ in range(ROUNDS):
        coefficients = nnls((weight * scales[of] / times)[:, None] * work, weight)[0]
        predicted = work @ coefficients
        scales = np.array([np.median(times[of == each] / predicted[of == each]) for each in range(len(devices))])
        weight = 1 / np.sqrt(np.maximum(np.abs(predicted * scales[of] / times - 1), 0.03))
    coefficients, scales = coefficients * scales[-1], scales / scales[-1]
    named = {term: float(found) for term, found in zip(terms, coefficients, strict=True) if found > 0}
    return latency.Fitted(named, dict(zip(devices, scales.tolist(), strict=True)), 0, 0, 0, 0)


def held_out(rows: Sequence[Published], counts: dict[str, dict[str, float]]) -> list[tuple[Published, float]]:
    """Every row with what a fit to all other families says of it; devices that only its family has are left out."""
    found = []
    for family in sorted({row.family for row in rows}):
        others = [row for row in rows if row.family != family]
        known = fit(others, counts)
        found += [
            (row, known.milliseconds(counts[row.key], row.device))
            for row in rows
            if row.family == family and row.device in known.devices
        ]
    return found


@dataclass(frozen=True)
class Errors:
    """Of predictions: Spearman's correlation, the mean over devices; the median relative error; quantiles of the
    true time over the predicted one, 10 and 90 in a hundred."""

    ranking: float
    error: float
    low: float
    high: float


def errors(predictions: Sequence[tuple[Published, float]]) -> Errors:
    true = np.array([row.ms for row, _ in predictions])
    said = np.array([ms for _, ms in predictions])
    ranks, sizes = [], []
    for device in {row.device for row, _ in predictions}:
        mine = [place for place, (row, _) in enumerate(predictions) if row.device == device]
        if len(mine) > 3:
            ranks.append(float(spearmanr(true[mine], said[mine]).statistic))
            sizes.append(len(mine))
    low, high = np.quantile(true / said, [0.1, 0.9])
    return Errors(
        float(np.average(ranks, weights=sizes)), float(np.median(np.abs(said / true - 1))), float(low), float(high)
    )


def written(known: latency.Fitted, found: Errors, rows: int, families: int) -> str:
    """latency.toml."""
    coefficients = "\n".join(f'"{term}" = {value:.6g}' for term, value in known.coefficients.items())
    devices = "\n".join(f'"{device}" = {scale:.6g}' for device, scale in known.devices.items())
    return f"""\
# Written by benchmarks/coreml_latency.py, fitted to {rows} published times of {families} model families.

# Milliseconds for a million multiply-adds, bytes or operators.
[coefficients]
{coefficients}

[devices]
{devices}

# Of each family by a fit to all others: Spearman's correlation, the median relative error, and what true times were of
# estimated ones at the tenth and the ninetieth of a hundred.
[held_out]
ranking = {found.ranking:.4f}
error = {found.error:.4f}
low = {found.low:.4f}
high = {found.high:.4f}
"""


def table(predictions: Sequence[tuple[Published, float]]) -> str:
    """What each row was and what was said of it, the worst last."""
    lines = ["| model | device | published ms | estimated ms | error |", "|-|-|-|-|-|"]
    for row, ms in sorted(predictions, key=lambda each: abs(np.log(each[1] / each[0].ms))):
        lines.append(f"| {row.key} | {row.device} | {row.ms:.1f} | {ms:.2f} | {ms / row.ms - 1:+.0%} |")
    return "\n".join(lines)


def told(label: str, found: Errors) -> str:
    return (
        f"{label}: rank correlation {found.ranking:.3f}, median error {found.error:.1%}, true times from "
        f"{found.low:.2f} to {found.high:.2f} of the estimated in eight of ten"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="published times")
    parser.add_argument("--check", type=Path, help="other published times, to hold the stored coefficients against")
    parser.add_argument("--counts", type=Path, default=Path("out/coreml_counts.json"), help="of operators so far")
    parser.add_argument("--write", action="store_true", help=f"store the coefficients in {latency.FITTED.name}")
    asked = parser.parse_args()
    rows, total = read(asked.rows)
    counts = counted(rows, asked.counts)
    rows = [row for row in rows if row.key in counts]
    predictions = held_out(rows, counts)
    families = {row.family for row in rows}
    print(environment(1))
    print(f"{len(rows)} rows of {len(families)} families; {total - len(rows)} others left out\n")
    print(table(predictions) + "\n")
    found = errors(predictions)
    print(told("families held out", found))
    known = fit(rows, counts)
    print(told("fitted", errors([(row, known.milliseconds(counts[row.key], row.device)) for row in rows])))
    if asked.write:
        latency.FITTED.write_text(written(known, found, len(rows), len(families)))
    if asked.check is not None:
        others, _ = read(asked.check)
        counts = counted(others, asked.counts)
        stored = latency.fitted()
        others = [row for row in others if row.key in counts and row.device in stored.devices]
        print(told("other rows", errors([(row, stored.milliseconds(counts[row.key], row.device)) for row in others])))


if __name__ == "__main__":
    main()
