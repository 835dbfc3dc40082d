"""What the verbs take for a model, as a source; what it would not heed of what is given beside it is refused."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from attnrewrite.conversion.record import Conversion
from attnrewrite.errors import refuse_given, unknown_name
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.scan import examine_onnx, is_onnx
from attnrewrite.frontends.sources import Source, load_source
from attnrewrite.images.preprocessing import override
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.matcher import scan
from attnrewrite.site import Scan

P = ParamSpec("P")
T = TypeVar("T")
Model = Any  # an nn.Module, an ExportedProgram, a Source, a Conversion, or a string or path that names a model
HOW = ("checkpoint", "input_size", "mean", "std")  # what `how` may hold
OF_PICTURES = ("mean", "std")  # those of them that a model which is loaded already heeds, too


def known_keywords_only(verb: Callable[P, T]) -> Callable[P, T]:
    """`verb`, which hands on as `how` what it does not know itself: an InputError names a keyword that is neither its
    own nor in HOW, and suggests the nearest that is.
    """
    known = {name for name, each in signature(verb).parameters.items() if each.kind is not each.VAR_KEYWORD} | {*HOW}

    @wraps(verb)
    def checked(*given: P.args, **named: P.kwargs) -> T:
        for name in named:
            if name not in known:
                raise unknown_name("keyword", name, known)
        return verb(*given, **named)

    return checked


def load(model: Model, example_inputs: tuple[Tensor, ...] | None = None, **how: Any) -> Source:
    """The model, as `load_source` loads it. Raises InputError where it cannot be, or would not heed what is given."""
    return load_source(of_conversion(model) if isinstance(model, Conversion) else model, example_inputs, **how)


def load_beside(
    model: Model, others: Iterable[Model], example_inputs: tuple[Tensor, ...] | None = None, **how: Any
) -> Source:
    """As `load`, where the rest is given for `others`, too: one that is loaded already takes of it what it can heed,
    unless all are.
    """
    if _is_loaded(model) and not all(map(_is_loaded, others)):
        example_inputs, how = None, {name: how[name] for name in OF_PICTURES if name in how}
    return load(model, example_inputs, **how)


def examine(model: Model, example_inputs: tuple[Tensor, ...] | None = None, **how: Any) -> tuple[GraphView, Scan]:
    """What `explain` says, beside the graph that it was found in. Raises as `explain` does."""
    if is_onnx(model):
        refuse_given(f"{model} says itself what it takes", example_inputs=example_inputs)
        override(None, how.get("mean"), how.get("std"))  # which change no scan, and are to make sense
        return examine_onnx(Path(model), how.get("input_size"), how.get("checkpoint"))
    loaded = load(model, example_inputs, **how)
    captured = capture(loaded.name, loaded.model or loaded.program, loaded.example_inputs)  # type: ignore[arg-type]
    graph = FxGraph(captured.module)
    return graph, scan(graph, loaded.name)


def of_conversion(done: Conversion) -> Source:
    """A converted model as it is deployed."""
    name = f"{done.report['model']} ({done.report['variant']})"
    made = Source(name, done.deployed(), None, done.example_inputs, done.preprocessing, done.origin)
    return made if made.origin is None else replace(made, labels=made.origin.labels)


def _is_loaded(model: Model) -> bool:
    return isinstance(model, Conversion | Source)
