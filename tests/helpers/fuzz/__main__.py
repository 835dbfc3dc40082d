"""The command: so many cases of a seed, a table of what became of them, exit code 1 where any went wrong."""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fuzz.cases import SOUND, Judge, Verdict
from fuzz.limits import Limits
from fuzz.seeds import make
from fuzz.subjects import SUBJECTS

_NEED_NONE = frozenset(
    {"onnx", "safetensors", "pth", "npz", "pictures", "configuration", "mlpackage"}
)  # converted models
_judge: Judge  # of this process and those that are forked from it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many, shared out among the kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=list(SUBJECTS), help="these kinds alone")
    parser.add_argument("--case", type=int, help="this case of the one --kind alone, with the traceback of its error")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder), given.kind or list(SUBJECTS))
        if given.case is not None:
            verdict = _judge((given.kind[0], given.case, given.seed))
            os.environ["ATTNREWRITE_DEBUG"] = "1"
            print(verdict, _judge((given.kind[0], given.case, given.seed)).told, sep="\n")
            return int(verdict.outcome not in SOUND)
        cases = _shared_out(given.cases, given.kind or list(SUBJECTS), given.seed)
        started = time.monotonic()
        with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
            found = [_told(verdict, given.seed) for verdict in pool.imap_unordered(_tried, cases)]
    print(table(found))
    print(f"{len(found)} cases of seed {given.seed} in {time.monotonic() - started:.0f} s")
    return int(any(verdict.outcome not in SOUND for verdict in found))


def _prepare(folder: Path, kinds: list[str]) -> None:
    """What every case starts from is made once; sound files go through, which imports what all cases need."""
    global _judge
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    with quiet():
        converted = not _NEED_NONE.issuperset(kinds)
        seeds = make(folder, converted=converted, package="mlpackage" in kinds)
        _judge = Judge(seeds, _original(folder) if converted else None, Limits())
        for kind in kinds:
            _judge.rehearse(kind)
    gc.collect()
    gc.freeze()  # what is held lies still: children that count its references would copy it


def _original(folder: Path) -> Any:
    """The graph that the converted folder was made from."""
    from attnrewrite.frontends.capture import capture
    from attnrewrite.frontends.sources import load_source

    source = load_source(folder / "pictures.onnx")
    assert source.model is not None
    return capture("pictures", source.model, source.example_inputs)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is written to standard output meanwhile, by compiled code neither."""
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    yield
    os.dup2(kept, 1)


def _tried(case: tuple[str, int, int]) -> Verdict:
    return _judge(case)


def _shared_out(count: int, kinds: list[str], seed: int) -> list[tuple[str, int, int]]:
    whole = sum(SUBJECTS[kind].weight for kind in kinds)
    shares = {kind: max(1, round(count * SUBJECTS[kind].weight / whole)) for kind in kinds}
    return [(kind, number, seed) for number in range(max(shares.values())) for kind in kinds if number < shares[kind]]


def _told(verdict: Verdict, seed: int) -> Verdict:
    if verdict.outcome not in SOUND:
        again = f"--kind {verdict.kind} --case {verdict.number} --seed {seed}"
        print(f"WRONG {again}: {verdict.line}: {verdict.told}", flush=True)
    return verdict


def table(found: list[Verdict]) -> str:
    """How many cases of each kind ended how."""
    outcomes = (*SOUND, "wrong")
    counts = Counter((verdict.kind, verdict.outcome) for verdict in found)
    rows = [["", *outcomes, "all"]]
    for kind in [*dict.fromkeys(verdict.kind for verdict in found), "all"]:
        numbers = [
            sum(n for (k, o), n in counts.items() if kind in (k, "all") and o == outcome) for outcome in outcomes
        ]
        rows.append([kind, *map(str, numbers), str(sum(numbers))])
    return "\n".join(
        "  ".join(cell.rjust(max(19, 0) if at == 0 else 15) for at, cell in enumerate(row)) for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
