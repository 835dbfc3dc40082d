"""attnrewrite: find, replace, repair and lower the attention of trained vision transformers, at graph level.

    import attnrewrite as ar
    scan = ar.explain(model, example_inputs)
    done = ar.convert(model, example_inputs, variant="l1", calibration=images)
    done.save("out/vit")
"""

from attnrewrite.api import Conversion, compare, convert, evaluate, explain, lower, supported
from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, NothingMatchedError
from attnrewrite.plan import Plan
from attnrewrite.report import Comparison
from attnrewrite.site import AttentionSite, NearMiss, Scan
from attnrewrite.targets.base import Artifact

__version__ = "0.1.0"

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
