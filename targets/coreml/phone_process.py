"""A package measured on a device that Xcode reaches: a process of `runners/device_process.py`, run as a module.

coremltools builds, signs and launches an app of its own there, and talks with it in files. Its benchmarker, which keeps
no answers, measures; the answers are of a call of its own.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnrewrite.errors import Refusal, first_line
from attnrewrite.targets.coreml import on_mac, package

LOADS = 2  # the first, and again
FEWEST = 3  # timed calls, however slow they are


async def measure(asked: Path) -> dict[str, Any]:
    """Do the job in the file `asked`, and leave the answers where it says; what the process prints."""
    job = json.loads(asked.read_text())
    doing = "Xcode's tools cannot be asked for devices"
    try:
        from coremltools.models.ml_program.experimental.perf_utils import MLModelBenchmarker
        from coremltools.models.ml_program.experimental.remote_device import AppSigningCredentials, Device

        known = Device.get_devices()
        device = named(job["device"], known)
        if isinstance(device, Refusal):
            return {"reason": device.sentence}
        doing = "coremltools' app is not built and launched there"
        team = AppSigningCredentials(development_team=job["development_team"])
        there = await device.prepare_for_model_debugging(credentials=team, working_directory=asked.parent)
        try:
            model = package.unloaded(Path(job["package"]))
            with np.load(job["inputs"]) as given:
                names = [each.name for each in model.get_spec().description.input]
                inputs = {name: given[key] for name, key in zip(names, given.files, strict=True)}
            benchmarker = MLModelBenchmarker(model, there)
            doing = "the package does not load there"
            first, again = (await benchmarker.benchmark_load(LOADS)).samples
            doing = "it fails at running the model"
            answers, plan, seconds = await _answered(model, there, inputs)
            np.savez(job["outputs"], *answers, allow_pickle=False)
            calls = max(FEWEST, min(job["repeats"], int(job["budget_s"] / seconds)))
            timed = await benchmarker.benchmark_predict(inputs, iterations=calls, warmup=True)
        finally:
            there.session.stop()
        note = on_mac.Loaded(first, again, plan).sentence()
        return {"seconds": [each / 1e3 for each in timed.samples], "note": note}
    except Exception as error:  # coremltools raises what Xcode's tools say, in any type
        return {"reason": f"{doing} ({_said(error)})"}


def named(name: str, known: Sequence[Any]) -> Any | Refusal:
    """The coremltools Device of a name or identifier, or why there is none."""
    found = [each for each in known if name in (each.name, each.identifier, each.udid)]
    if len(found) == 1:
        return found[0]
    if found:
        return Refusal(
            "device", f"{len(found)} have that name: give an identifier, {' or '.join(d.udid for d in found)}"
        )
    listed = ", ".join(f"{each.name} ({each.state.value})" for each in known)
    return Refusal("device", f"Xcode knows no such device; it knows {listed or 'none'}")


async def _answered(
    model: Any, device: Any, inputs: Mapping[str, np.ndarray]
) -> tuple[list[np.ndarray], on_mac.Plan | Refusal, float]:
    """The answers, the plan, and the seconds that a call takes with all that is sent to and fro."""
    from coremltools.models.ml_program.experimental.async_wrapper import MLModelAsyncWrapper

    spec = model.get_spec()
    called = MLModelAsyncWrapper.from_spec_or_path(spec, model.weights_dir, model.compute_unit, device=device)
    await called.load()
    begin = time.perf_counter()
    answers = await called.predict(inputs)
    seconds = time.perf_counter() - begin
    try:
        plan: on_mac.Plan | Refusal = on_mac.read(await called.retrieve_compute_plan())
    except Exception as error:  # as above; there are times without a plan, too
        plan = Refusal("no-plan", _said(error))
    await called.unload()
    return [answers[each.name] for each in spec.description.output], plan, seconds


def _said(error: Exception) -> str:
    """An error in one line; what Xcode's tools wrote comes as bytes."""
    message = getattr(error, "message", None)
    return first_line(RuntimeError(message.decode(errors="replace")) if isinstance(message, bytes) else error)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1])))))
