"""What is accepted in an ONNX graph is right for every input: odd scores are equal once rewritten, or have no core."""

import numpy as np
import pytest
from onnx_runs import run
from onnx_spellings import ODD_SCORES, odd

from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant


def drawn(batch: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and a mask of their keys, which leaves the first image none."""
    random = np.random.default_rng(batch)
    mask = random.random((batch, 1, 1, 10)) < 0.6
    mask[0] = False
    return (random.normal(size=(batch, 10, 16)) * scale).astype(np.float32), mask


@pytest.mark.parametrize("name", ODD_SCORES)
def test_odd_scores_are_right_or_refused(name: str) -> None:
    model, softmax = odd(name), get_variant("softmax")
    (site,) = scan_onnx(OnnxGraph(model), name).sites
    assert ("right" if softmax.refuse(site) is None else "no core") == ODD_SCORES[name][0], softmax.refuse(site)
    if site.core is None:
        return
    rewritten, _ = OnnxRewrite(Plan(name, (Placement.at(site, softmax),))).apply(model)
    for batch, scale in ((3, 0.3), (1, 1.0), (5, 3.0)):
        given = drawn(batch, scale)[: len(model.graph.inputs)]
        (wanted,), (found,) = run(model, *given), run(rewritten, *given)
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max(), (batch, scale)
