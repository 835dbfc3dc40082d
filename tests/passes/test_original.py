"""A graph is its model's on every output: numbers to a tolerance, integers and truths one by one."""

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes.draws import drawn
from attnrewrite.passes.original import agreement
from attnrewrite.passes.verify import export_error

EXAMPLE = (torch.randn(2, 40, 7, generator=torch.Generator().manual_seed(0)),)


class Answer(nn.Module):
    """[B, N, C] to what `answer` makes of it."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        places = x.argmax(-1)
        return {
            "largest place": places,
            "smallest place": x.argmin(-1),
            "above": x > 0,
            "from 0 on": x >= 0,
            "below": x < 0,
            "both": (x, places),
            "both, the smallest": (x, x.argmin(-1)),
            "fewer": places[:, 1:],
        }[self.answer]


@pytest.mark.parametrize(
    ("model", "graph", "same"),
    [
        ("largest place", "largest place", True),
        ("largest place", "smallest place", False),
        ("above", "from 0 on", True),  # but for zeros, of which there are few
        ("above", "below", False),
        ("both", "both", True),
        ("both", "both, the smallest", False),
        ("largest place", "fewer", False),
    ],
)
def test_integers_and_truths_are_compared_too(model: str, graph: str, same: bool) -> None:
    captured, own = (capture("answer", Answer(answer), EXAMPLE).module for answer in (graph, model))
    example, mixed = drawn(captured, EXAMPLE)
    draws = (example, mixed.fallbacks()[0])
    if same:
        assert agreement("answer", Answer(model), captured, draws).error == 0
        assert export_error(captured, own, EXAMPLE) == 0
        return
    with pytest.raises(CheckFailedError, match="differs from the model by inf"):
        agreement("answer", Answer(model), captured, draws)
    with pytest.raises(CheckFailedError, match="differs from the module by inf"):
        export_error(captured, own, EXAMPLE)


class Clips(nn.Module):
    """[4 B, C] to [B, C]: four images are a clip."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 4, 4, x.shape[1]).mean(1)


def test_a_model_that_takes_no_other_batch_is_asked_as_many_images_as_the_example_has() -> None:
    example = (torch.randn(8, 5),)
    captured = capture("clips", Clips(), example).module
    found = agreement("clips", Clips(), captured, drawn(captured, example))
    assert [run.draw.inputs[0].shape for run in found.runs] == [(8, 5)] * 4
    assert len({float(run.draw.inputs[0].sum()) for run in found.runs}) == 4
    assert len(found.refused) == 4
