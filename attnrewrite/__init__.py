"""attnrewrite: find, replace, repair and lower the attention of trained vision transformers, at graph level.

import attnrewrite as ar
scan = ar.explain(model, example_inputs)
done = ar.convert(model, example_inputs, variant="l1", calibration=images)
done.save("out/vit")
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnrewrite.api import Comparison, Conversion, compare, convert, evaluate, explain, lower, supported
    from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, NothingMatchedError
    from attnrewrite.plan import Plan
    from attnrewrite.site import AttentionSite, NearMiss, Scan
    from attnrewrite.targets.base import Artifact

__version__ = "0.1.0"

_HOMES = {
    "attnrewrite.api": ("Comparison", "Conversion", "compare", "convert", "evaluate", "explain", "lower", "supported"),
    "attnrewrite.errors": ("AttnRewriteError", "CheckFailedError", "InputError", "NothingMatchedError"),
    "attnrewrite.plan": ("Plan",),
    "attnrewrite.site": ("AttentionSite", "NearMiss", "Scan"),
    "attnrewrite.targets.base": ("Artifact",),
}

__all__ = [
    "Artifact",
    "AttentionSite",
    "AttnRewriteError",
    "CheckFailedError",
    "Comparison",
    "Conversion",
    "InputError",
    "NearMiss",
    "NothingMatchedError",
    "Plan",
    "Scan",
    "compare",
    "convert",
    "evaluate",
    "explain",
    "lower",
    "supported",
]


def __getattr__(name: str) -> object:
    """The public names, imported when they are first used: the command line's help needs no torch."""
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'attnrewrite' has no attribute {name!r}")
