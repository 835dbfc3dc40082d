"""Whether what a loaded model answers is a class."""

import logging

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import Source
from attnrewrite.images.dataset import Images
from attnrewrite.patterns.fx.graph import FxGraph


def says_classes(source: Source, images: Images) -> bool:
    """Whether the largest element of the model's output for `images` is a class: they have labels, or it gives logits.
    True, too, where it cannot be captured. That it is an embedding is logged.
    """
    if images.y is not None:
        return True
    try:
        captured = capture(source.name, source.model or source.program, source.example_inputs)  # type: ignore[arg-type]
    except InputError:
        return True
    if FxGraph(captured.module).gives_logits:
        return True
    logging.getLogger("attnrewrite").warning(
        "no agreement: the output of %s is taken for an embedding, as no linear map with a bias gives it; give images "
        "with labels if it is a classifier", source.name
    )  # fmt: skip
    return False
