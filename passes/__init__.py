"""Rewriting graphs: passes with a contract, which consume a Plan and swap each site for its attention form.

A pass takes a graph and gives a new one with what it edited; it checks what it requires and what it ensures. It does
not load models, calibrate them or write files.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "attnrewrite.passes":
    raise ImportError(
        "import attnrewrite.passes, not passes: a second copy of a package would be a second copy of its registries"
    )

if TYPE_CHECKING:
    from attnrewrite.passes.base import Edit, Pass, PassResult, Pipeline, Stage
    from attnrewrite.passes.fx.exported import ExportedRewrite, rewrite
    from attnrewrite.passes.fx.rewrite import FxRewrite
    from attnrewrite.passes.onnx.rewrite import OnnxRewrite

__all__ = [
    "Edit",
    "ExportedRewrite",
    "FxRewrite",
    "OnnxRewrite",
    "Pass",
    "PassResult",
    "Pipeline",
    "Stage",
    "rewrite",
]

# Loaded when asked for: the package itself costs nothing.
_WHERE = {
    **dict.fromkeys(("Edit", "Pass", "PassResult", "Pipeline", "Stage"), "attnrewrite.passes.base"),
    **dict.fromkeys(("ExportedRewrite", "rewrite"), "attnrewrite.passes.fx.exported"),
    "FxRewrite": "attnrewrite.passes.fx.rewrite",
    "OnnxRewrite": "attnrewrite.passes.onnx.rewrite",
    "coreml_pipeline": "attnrewrite.targets.coreml.pipeline",  # by name alone: nothing here knows of targets
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
