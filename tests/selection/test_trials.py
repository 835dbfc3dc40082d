"""Candidates that stand alone: nothing that the scan of one site keeps or changes is in the way of the next."""

import pytest
import torch
import torch.nn.functional as F
from fits import HEADS, KINDS, WIDTH, Model, calibration, pictures
from torch import Tensor, nn

from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.selection import trials as trials_module
from attnrewrite.selection.trials import trials
from attnrewrite.variants.registry import get_variant


class Bare(nn.Module):
    """Two attentions, one upon the other: no linear map between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.embed(x).flatten(2).transpose(1, 2).unflatten(2, (HEADS, -1)).transpose(1, 2)
        for _ in range(2):
            heads = F.scaled_dot_product_attention(3 * heads, heads, heads)
        return self.head(heads.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("kind", [*KINDS, "bare"])
def test_a_site_is_found_the_same_whatever_was_tried_before_it(kind: str) -> None:
    model = Bare() if kind == "bare" else Model(kind)
    given = calibration(kind, get_variant("softmax"), model=model)
    before = {name: tensor.clone() for name, tensor in given.student.state_dict().items()}
    sites = scan(FxGraph(given.original), kind).sites
    candidates = [get_variant("l1"), get_variant("hedgehog")]
    both, last = list(trials(given, sites, candidates)), list(trials(given, sites[1:], candidates))
    assert [(trial.site, trial.candidate) for trial in both] == [(site.id, n) for site in sites for n in (0, 1)]
    for found, alone in zip(both[2:], last, strict=True):
        torch.testing.assert_close(found.output, alone.output)
        assert (found.output - given.answers.together).abs().max() > 1e-3
    assert {name: bool((tensor == before[name]).all()) for name, tensor in given.student.state_dict().items()} == (
        dict.fromkeys(before, True)
    )


@pytest.mark.parametrize("first", [True, False])
def test_an_output_that_is_no_number_is_never_the_closer_one(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = calibration("bare", get_variant("softmax"), pictures(20), Bare())  # too few for the fit to choose by
    site = scan(FxGraph(given.original), "bare").sites[:1]
    whole, broken = torch.zeros_like(given.answers.together), torch.full_like(given.answers.together, torch.nan)
    outputs = iter([broken, whole] if first else [whole, broken])
    monkeypatch.setattr(trials_module._Network, "_outputs", lambda self: next(outputs))
    (found,) = trials(given, site, [get_variant("l1")])
    assert found.output is whole
