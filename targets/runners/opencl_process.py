"""Runs kernels.cl as launches.json says, on the values of values.npz: the process that opencl.execute starts.

It is run as a script and imports nothing of ours. What it prints is one JSON object: the device, or why there is none.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

SOURCE, LAUNCHES, VALUES, RESULTS = "kernels.cl", "launches.json", "values.npz", "results.npz"
# The loader inside pyopencl's wheel looks elsewhere than where Linux systems register their drivers.
VENDORS = "/etc/OpenCL/vendors"


def main(folder: Path) -> dict[str, str | None]:
    if Path(VENDORS).is_dir():
        os.environ.setdefault("OCL_ICD_VENDORS", VENDORS)
    import pyopencl as cl

    try:
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        return {"device": None, "reason": f"no OpenCL device: {error}"}
    if not devices:
        return {"device": None, "reason": "no OpenCL device (Debian: pocl-opencl-icd)"}
    np.savez(folder / RESULTS, allow_pickle=False, **_run(cl, cl.Context([devices[0]]), folder))
    return {"device": f"{devices[0].platform.name}, {devices[0].name}".strip()}


def _run(cl: Any, context: Any, folder: Path) -> dict[str, np.ndarray]:
    plan = json.loads((folder / LAUNCHES).read_text())
    queue = cl.CommandQueue(context)
    built = cl.Program(context, (folder / SOURCE).read_text()).build()
    kernels = {kernel.function_name: kernel for kernel in built.all_kernels()}
    buffers = {name: cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for name, size in plan["buffers"].items()}
    with np.load(folder / VALUES) as values:
        for name in values.files:
            cl.enqueue_copy(queue, buffers[name], np.ascontiguousarray(values[name]))
    for launch in plan["launches"]:
        arguments = [buffers[name] for name in launch["buffers"]]
        kernels[launch["kernel"]](queue, tuple(launch["global_size"]), tuple(launch["local_size"]), *arguments)
    results = {}
    for name in {output["buffer"] for output in plan["outputs"]}:
        results[name] = np.empty(plan["buffers"][name], np.uint8)
        cl.enqueue_copy(queue, results[name], buffers[name])
    queue.finish()
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
