"""Runs a library on a device that TVM's RPC server waits on: the process that rpc.measure starts.

It is run as a script and imports nothing of ours. What it prints is one JSON object: the seconds that calls took by the
device's own clock, or why there are none. A device that hangs hangs this process alone, which is then ended.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

FEWEST = 3  # timed calls, however slow they are


def main(asked: Path) -> dict[str, Any]:
    job = json.loads(asked.read_text())
    doing = "it cannot be reached"
    try:
        # The compiler and torch, which TVM imports where it finds them, take seconds and are of no use here.
        os.environ["TVM_USE_RUNTIME_LIB"], sys.modules["torch"] = "1", None  # type: ignore[assignment]
        import tvm
        from tvm import rpc
        from tvm.runtime.vm import VirtualMachine

        session = rpc.connect(job["host"], job["port"], session_timeout=job["timeout_s"])
        doing = "the library does not load there"
        session.upload(job["library"])
        library = session.load_module(Path(job["library"]).name)
        device = session.cpu()
        machine = VirtualMachine(library, device)
        session.get_function("runtime.config_threadpool")(1, job["threads"])
        doing = "it fails at running the model"
        with np.load(job["inputs"]) as given:
            machine.set_input("main", *(tvm.runtime.tensor(given[name], device) for name in given.files))
        machine.invoke_stateful("main")
        np.savez(job["outputs"], *_arrays(machine.get_outputs("main")), allow_pickle=False)
        return {"seconds": _timed(machine, device, job["repeats"], job["budget_s"])}
    except Exception as error:  # TVM raises what it likes, and which error it is says little
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The last line is the cause, those above it say where in TVM's own code.
        return {"reason": f"{doing} ({lines[-1][:200] if lines else type(error).__name__})"}


def _arrays(outputs: Any) -> list[np.ndarray]:
    if hasattr(outputs, "numpy"):
        return [outputs.numpy()]
    return [array for each in outputs for array in _arrays(each)]


def _timed(machine: Any, device: Any, repeats: int, budget_s: float) -> list[float]:
    """The seconds of up to `repeats` calls, of fewer where they take more than `budget_s` together."""

    def results(count: int) -> list[float]:
        # One call is made first that is not timed.
        return list(machine.time_evaluator("invoke_stateful", device, number=1, repeat=count)("main").results)

    first = results(1)[0]
    return results(max(FEWEST, min(repeats, int(budget_s / first))))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
