"""Calibrates models on the second device and on the processor, and prints what came of it, a line of JSON each.

python calibrated.py LIBRARY KIND:FORM ...
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).parents[1]))

from fits import calibration, pictures

from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.stages import calibrate
from attnrewrite.variants.registry import get_variant
from second_device import use

IMAGES, STEPS = 40, 2


def devices(*modules: GraphModule) -> set[str]:
    return {str(tensor.device) for module in modules for tensor in (*module.parameters(), *module.buffers())}


def main() -> None:
    torch.set_num_threads(1)
    second = use(Path(sys.argv[1]))
    for kind, _, form in (case.partition(":") for case in sys.argv[2:]):
        errors = {}
        for device in ("cpu", second):
            given = calibration(kind, get_variant(form), pictures(IMAGES))
            given = replace(given, processes=Processes(device=device))
            errors[device] = [report.error_after for report in calibrate(given, STEPS)]
            assert devices(given.original, given.teacher, given.student) == {"cpu"}
        print(json.dumps([kind, form, errors["cpu"], errors[second]]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # as the process ends, torch's thread for the device may be left without what it runs on, and abort
