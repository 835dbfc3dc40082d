"""Who finds the attention of vision models: recall and false positives of attnrewrite and of its peers on one zoo.

    python benchmarks/detection.py [--models NAME ...] [--peers NAME ...] [--json FILE] [--verbose] [--jobs N]

The truth is recorded while each model runs (detection_truth.py). For each peer, over what it could read:

* recall: of the sites over tokens, how many it found; no more than a model has.
* false positives: what it reports beyond a model's sites over tokens, and attention over channels (XCiT, DaViT,
  EdgeNeXt) that it reports without saying so, as what treats channels as tokens rewrites a model wrongly.
* failed: models that it, or the export that it reads, did not survive. Their sites count as missed in "of all".

Progress goes to standard error. A model that crashes or hangs a worker costs that model alone.
"""

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zoo
from detectors.peers import OPSET, PEERS, version
from zoo.runs import chosen

from attnrewrite.errors import InputError
from attnrewrite.evaluation.latency import environment

HERE = Path(__file__).parent
BATCH = 12  # models that one worker process takes
PACKAGES = ("attnrewrite", "torch", "onnx", "onnxruntime", "onnxscript", "openvino", *zoo.LIBRARIES)


@dataclass(frozen=True)
class Sites:
    """What one model has, by (queries, keys)."""

    tokens: Counter[tuple[int, int]]
    channels: Counter[tuple[int, int]]
    others: int

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]]) -> "Sites":
        sites = [event for event in events if event["reason"] is None]
        tokens, channels = (
            Counter((e["n_queries"], e["n_keys"]) for e in sites if e["axis"] == axis) for axis in ("token", "channel")
        )
        return cls(tokens, channels, len(events) - len(sites))


@dataclass(frozen=True)
class Score:
    """One peer on one model. `channels` is what it found over channels and called so."""

    sites: int
    found: int
    false: int
    channels: int
    right_sizes: bool

    @classmethod
    def of(cls, truth: Sites, reported: Sequence[dict[str, Any]]) -> "Score":
        as_channels = Counter((r["n_queries"], r["n_keys"]) for r in reported if r["axis"] == "channel")
        others = [(r["n_queries"], r["n_keys"]) for r in reported if r["axis"] != "channel"]
        channels = min(as_channels.total(), truth.channels.total())
        mistaken = min((Counter(others) - truth.tokens & truth.channels).total(), truth.channels.total())
        found = min(len(others) - mistaken, truth.tokens.total())
        false = len(others) - found + as_channels.total() - channels
        right = Counter(others) == truth.tokens and as_channels == truth.channels
        return cls(truth.tokens.total(), found, false, channels, right)


@dataclass
class Run:
    """All results: for each model its sites, and for each peer its score or why there is none."""

    truth: dict[str, Sites] = field(default_factory=dict)
    scores: dict[str, dict[str, Score | str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        model, step = line["model"], line["step"]
        if step == "truth" and "failed" in line:
            self.failed[model] = line["failed"]
        elif step == "truth":
            self.truth[model] = Sites.of(line["events"])
        else:
            result = line["failed"] if "failed" in line else Score.of(self.truth[model], line["found"])
            self.scores.setdefault(model, {})[step] = result

    def totals(self, peer: str) -> dict[str, Any]:
        results = {model: scores[peer] for model, scores in self.scores.items() if peer in scores}
        scores = [result for result in results.values() if isinstance(result, Score)]
        sites, found = sum(score.sites for score in scores), sum(score.found for score in scores)
        every = sum(self.truth[model].tokens.total() for model in results)
        return {
            "models": len(scores),
            "failed": len(results) - len(scores),
            "sites": sites,
            "found": found,
            "recall": found / sites if sites else None,
            "recall_of_all": found / every if every else None,
            "false_positives": sum(score.false for score in scores),
            "models_with_false_positives": sum(score.false > 0 for score in scores),
            "channels_found": sum(score.channels for score in scores),
        }


def results(models: Sequence[str], peers: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Every line of a worker that runs the models in turn; a crash or a hang is a failed step, and a new worker."""
    done: set[tuple[str, str]] = set()
    while left := _not_in(done, models, peers):
        under_way: dict[str, Any] | None = None
        before = len(done)
        for line in _worker(left, seconds):
            under_way = line if "begins" in line else None
            if under_way is None:
                done |= _settled(line, peers)
                yield line
        if under_way is not None:
            failure = f"crashed, or took longer than {seconds:.0f} s"
            line = {"model": under_way["model"], "step": under_way["begins"], "failed": failure}
            done |= _settled(line, peers)
            yield line
        elif len(done) == before:
            raise RuntimeError("the worker did nothing: what it wrote is above")


def _not_in(done: set[tuple[str, str]], models: Sequence[str], peers: Sequence[str]) -> list[tuple[str, list[str]]]:
    left = ((model, [peer for peer in peers if (model, peer) not in done]) for model in models)
    return [(model, wanted) for model, wanted in left if wanted]


def _settled(line: dict[str, Any], peers: Sequence[str]) -> set[tuple[str, str]]:
    lost = line["step"] == "truth" and "failed" in line
    return {(line["model"], peer) for peer in (peers if lost else (line["step"],))}


def _worker(tasks: Any, seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of one worker process, which is killed when a line takes longer than `seconds`."""
    command, pipe = [sys.executable, "-m", "detectors.worker"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=HERE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(tasks))
        process.stdin.close()
        watch = threading.Timer(seconds, process.kill)
        try:
            watch.start()
            for line in process.stdout:
                watch.cancel()
                yield json.loads(line)
                watch = threading.Timer(seconds, process.kill)
                watch.start()
        finally:
            watch.cancel()
            process.kill()


def benchmark(models: Sequence[str], peers: Sequence[str], jobs: int, seconds: float) -> Run:
    """Run all, `jobs` workers at a time; a worker stays within one library, whose import is dear."""
    found, ended, lock = Run(), set[str](), threading.Lock()

    def work(batch: Sequence[str]) -> None:
        for line in results(batch, peers, seconds):
            with lock:
                found.take(line)
                model = line["model"]
                if model in found.failed or len(found.scores.get(model, {})) == len(peers):
                    ended.add(model)
                    print(f"[{len(ended)}/{len(models)}] {verdict(found, model, peers)}", file=sys.stderr, flush=True)

    grouped = [list(group) for _, group in itertools.groupby(models, key=lambda name: name.partition("/")[0])]
    batches = [group[start : start + BATCH] for group in grouped for start in range(0, len(group), BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, batches))
    return found


def verdict(run: Run, model: str, peers: Sequence[str]) -> str:
    """One line on one model: its sites, and what every peer made of them."""
    if model in run.failed:
        return f"{model}: {run.failed[model]}"
    truth = run.truth[model]
    told = []
    for peer in peers:
        score = run.scores[model][peer]
        if isinstance(score, str):
            told.append(f"{peer} failed ({score})")
        else:
            false = f" + {score.false} false" if score.false else ""
            told.append(f"{peer} {score.found}{false}{'' if score.right_sizes else '*'}")
    channels = f" + {truth.channels.total()} over channels" if truth.channels else ""
    return f"{model}: {truth.tokens.total()} sites{channels}, {truth.others} other; {', '.join(told)}"


def table(run: Run, peers: Sequence[str]) -> str:
    """The totals as a markdown table."""
    rows = ["| finder | models read, failed | sites found | of all sites | false positives (models) |", "|-|-|-|-|-|"]
    for peer in peers:
        if PEERS[peer].version() is None:
            rows.append(f"| {peer} | unavailable: {PEERS[peer].package} is not installed | | | |")
            continue
        total = run.totals(peer)
        recall = "-" if total["recall"] is None else f"{total['found']} of {total['sites']} ({total['recall']:.1%})"
        of_all = "-" if total["recall_of_all"] is None else f"{total['recall_of_all']:.1%}"
        false = f"{total['false_positives']} ({total['models_with_false_positives']})"
        rows.append(f"| {peer} | {total['models']}, {total['failed']} | {recall} | {of_all} | {false} |")
    return "\n".join(rows)


def report(run: Run, peers: Sequence[str]) -> dict[str, Any]:
    scores = {
        model: {peer: asdict(s) if isinstance(s, Score) else {"failed": s} for peer, s in scores.items()}
        for model, scores in sorted(run.scores.items())
    }
    totals = {
        peer: {"how": PEERS[peer].how, "version": PEERS[peer].version()}
        | (run.totals(peer) if PEERS[peer].version() else {"unavailable": f"{PEERS[peer].package} is not installed"})
        for peer in peers
    }
    truth = {
        model: {"tokens": sites.tokens.total(), "channels": sites.channels.total(), "others": sites.others}
        for model, sites in sorted(run.truth.items())
    }
    how = environment(1)
    how["versions"] = {**how["versions"], **{name: version(name) for name in PACKAGES}}  # type: ignore[dict-item]
    return {"environment": how, "opset": OPSET, "peers": totals, "truth": truth, "models": scores, "broken": run.failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="library/name, or a library; by default all")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=180, help="that one step of one model may take")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument("--verbose", action="store_true", help="also print every model")
    asked = parser.parse_args()
    try:
        models = chosen("model", asked.models, zoo.names())
        peers = chosen("peer", asked.peers, list(PEERS))
    except InputError as error:
        parser.exit(2, f"{error}\n")
    started = time.perf_counter()
    here = [peer for peer in peers if PEERS[peer].version() is not None]
    run = benchmark(models, here, asked.jobs, asked.seconds)
    if asked.verbose:
        print("\n".join(verdict(run, model, here) for model in models) + "\n")
    tokens, channels = (sum(getattr(s, of).total() for s in run.truth.values()) for of in ("tokens", "channels"))
    print(table(run, peers))
    print(
        f"\n{len(run.truth)} models, {tokens} sites over tokens, {channels} over channels, "
        f"{sum(s.others for s in run.truth.values())} softmaxes that are none; ONNX opset {OPSET}; "
        f"{time.perf_counter() - started:.0f} s; {environment(1)['processor']}"
    )
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    for model, failure in run.failed.items():
        print(f"{model} does not run here: {failure}")
    if asked.json:
        asked.json.write_text(json.dumps(report(run, peers), indent=1))


if __name__ == "__main__":
    main()
