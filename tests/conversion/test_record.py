"""A converted folder read back: what stands at each site is what its plan says."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_vits import IMAGE, INPUTS, encoder
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.api import sites_of
from attnrewrite.conversion.record import REPORT_FILE
from attnrewrite.frontends.sources import load_source
from attnrewrite.plan import Plan

FACTS = ("id", "name", "heads", "head_dim", "n_queries", "n_keys", "variant", "note")


@pytest.mark.parametrize(("variant", "options"), [("l1", {}), ("relu-linear", {"exact_prefix": False})])
@pytest.mark.parametrize("keep", [[], ["site0"], ["site1"]])
def test_the_sites_of_a_folder_are_those_of_the_conversion(
    variant: str, options: dict[str, object], keep: list[str], tmp_path: Path
) -> None:
    done = ar.convert(encoder(), INPUTS, variant=variant, options=options, keep=keep)
    folder = done.save(tmp_path / "out")
    wanted = tuple({key: site[key] for key in FACTS} for site in sites_of(done, load_source(folder)))
    found = sites_of(folder, load_source(folder))
    assert found == wanted
    replaced = [site["id"] for site in found if site["variant"] == variant]
    assert replaced == [placement.site for placement in Plan.load(folder).placements]
    assert [site["note"] for site in found if site["id"] in keep] == ["stays as it is: kept on request"] * len(keep)


def test_a_report_that_says_otherwise_changes_nothing(tmp_path: Path) -> None:
    folder = ar.convert(encoder(), INPUTS, variant="l1").save(tmp_path / "out")
    before = sites_of(folder, load_source(folder))
    report = json.loads((folder / REPORT_FILE).read_text())
    for site in report["sites"]:
        site |= {"variant": "mobile", "heads": 99, "name": "elsewhere"}
    (folder / REPORT_FILE).write_text(json.dumps(report))
    assert sites_of(folder, load_source(folder)) == before


class Biased(nn.Module):
    """An embedding of 16 tokens, and attention of 4 heads with a bias of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.proj = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 96), nn.Linear(32, 5)
        self.bias = nn.Parameter(torch.randn(1, 4, 16, 16))

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.embed(image).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, self.bias)
        return self.proj(heads.transpose(1, 2).flatten(2).mean(1))


def test_only_what_stands_there_is_counted_and_noted() -> None:
    torch.manual_seed(0)
    images, options = torch.randn(8, *IMAGE[1:]), {"approximate": True}
    plain, fitted = (
        ar.convert(Biased().eval(), images[:1], variant="l1", options=options, calibration=given).report["sites"][0]
        for given in (None, images)
    )
    assert fitted["multiplies"] - plain["multiplies"] == 4 * 4 * (16 + 16) * 8  # heads, rank, tokens, head_dim
    assert fitted["note"] == f"{plain['note']}, but for factors of rank 4 that calibration gives"
