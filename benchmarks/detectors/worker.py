"""The half of the detection benchmark that may crash or hang: runs peers on models, a JSON line for each step.

Reads [[model, [peer, ...]], ...] as JSON from standard input. Writes {"model", "step", "seconds"} and
"events", "found" or "failed"; the first step of a model is "truth". A line with "begins" tells what is under way.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from zoo import build

from detectors.peers import PEERS, Failed, Subject, first_line
from detectors.truth import record


def main() -> None:
    tasks: list[tuple[str, list[str]]] = json.load(sys.stdin)
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    for model, peers in tasks:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run(model, peers, Path(), lambda line: print(json.dumps(line), file=told, flush=True))


def run(model: str, peers: list[str], folder: Path, tell: Callable[[dict[str, Any]], None]) -> None:
    def step(name: str, key: str, make: Callable[[], Any]) -> bool:
        tell({"model": model, "begins": name})
        started = time.perf_counter()
        result: dict[str, Any]
        try:
            result = {key: [dataclasses.asdict(item) for item in make()]}
        except Failed as error:
            result = {"failed": str(error)}
        except Exception as error:  # any failure of a peer is a result
            result = {"failed": first_line(error)}
        tell({"model": model, "step": name, "seconds": round(time.perf_counter() - started, 2), **result})
        return key in result

    if not step("truth", "events", lambda: record(*build(model))):
        return
    subject = Subject(*build(model), folder)  # anew: recording leaves shadows on its tensors
    for peer in peers:
        step(peer, "found", lambda peer=peer: PEERS[peer].find(subject))  # type: ignore[misc]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
