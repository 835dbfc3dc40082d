"""Import torchvision (and so timm) beside a CPU build of torch.

The torchvision wheel's compiled operators need CUDA libraries. Where they do not load, the package's own meta
registrations fail at import ("operator torchvision::nms does not exist"), although models and transforms need none of
them. Declaring the operators that it registers is enough. Where torchvision works, this changes nothing.
"""

import importlib
import sys
from functools import cache
from types import ModuleType

from torch.library import Library

# A library takes its operators with it when it is collected.
_declared: list[Library] = []


@cache
def import_torchvision() -> ModuleType | None:
    """torchvision, or None where it is not installed. Call this before importing torchvision or timm."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return importlib.import_module("torchvision")
