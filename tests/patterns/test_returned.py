"""Probabilities that the model answers with: its attention is found, and says that they are used elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.scan import examine_onnx
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.site import Scan

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
Answer = Callable[[Tensor, Tensor], object]


class Told(nn.Module):
    """[B, 5, 8] -> what `answer` makes of the probabilities [B, 5, 5] and the values [B, 5, 8]."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.answer = answer

    def forward(self, x: Tensor) -> object:
        return self.answer((self.query(x) @ self.key(x).transpose(1, 2) / 3).softmax(-1), self.value(x))


def in_torch(model: nn.Module, folder: Path) -> Scan:
    return scan(FxGraph(capture("told", model, (X,)).module), "told")


def in_onnx(model: nn.Module, folder: Path) -> Scan:
    torch.onnx.export(model, (X,), folder / "told.onnx", dynamo=True, verbose=False)
    return examine_onnx(folder / "told.onnx", None, None)[1]


BESIDE: dict[str, Answer] = {
    "behind the answer": lambda p, v: (p @ v, p),
    "before it": lambda p, v: (p, p @ v),
    "by name": lambda p, v: {"answer": p @ v, "attentions": [p]},
    "their mean": lambda p, v: (p @ v, p.mean(1)),
}
ALONE: dict[str, Answer] = {"alone": lambda p, v: p, "alone, in a list": lambda p, v: [p], "cut": lambda p, v: p[:, 0]}


@pytest.mark.parametrize("found", [in_torch, in_onnx])
@pytest.mark.parametrize("answer", BESIDE)
def test_a_site_says_that_its_probabilities_are_an_answer(
    answer: str, found: Callable[[nn.Module, Path], Scan], tmp_path: Path
) -> None:
    made = found(Told(BESIDE[answer]).eval(), tmp_path)
    assert [site.probs_escape for site in made.sites] == [True]
    assert not made.near_misses


@pytest.mark.parametrize("found", [in_torch, in_onnx])
@pytest.mark.parametrize("answer", ALONE)
def test_probabilities_that_weigh_nothing_are_no_attention(
    answer: str, found: Callable[[nn.Module, Path], Scan], tmp_path: Path
) -> None:
    made = found(Told(ALONE[answer]).eval(), tmp_path)
    assert (made.sites, [miss.code for miss in made.near_misses]) == ((), ["no-values"])
