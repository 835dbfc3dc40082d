"""Tokens that are an image: of a stage whose one window is the whole map, and of patches taken once for many layers."""

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.api import explain
from attnrewrite.site import Grid

Side = tuple[int, int]


class Stage(nn.Module):
    """[B, 8, *before] -> the tokens of a map of `after`, row by row or `by_columns`, attended in one window."""

    def __init__(self, before: Side, after: Side, by_columns: bool) -> None:
        super().__init__()
        self.after, self.by_columns = after, by_columns
        self.stem, self.merge = nn.Conv2d(8, 8, 1), nn.Linear(before[0] * before[1], after[0] * after[1])
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.after
        stage = self.norm(self.merge(self.stem(x).flatten(2)).mT.reshape(-1, rows, columns, 8))
        window = stage.view(-1, 1, rows, 1, columns, 8).permute(0, 1, 3, 2, 4, 5)
        tokens = (window.transpose(3, 4) if self.by_columns else window).reshape(-1, rows * columns, 8)
        q, k, v = self.qkv(tokens).view(-1, rows * columns, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT * 0.5).softmax(-1) @ v).transpose(1, 2).reshape(-1, rows * columns, 8))


CASES: dict[str, tuple[Side, Side, bool, Grid | None]] = {
    "merged patches": ((6, 8), (3, 4), False, Grid(3, 4)),
    "merged patches of a padded map": ((7, 9), (4, 5), False, Grid(4, 5)),
    "a map of the same size": ((3, 4), (3, 4), False, Grid(3, 4)),
    "another shape than the map's": ((6, 8), (2, 6), False, None),
    "columns before rows": ((6, 8), (3, 4), True, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_grid_of_a_stage_that_is_one_window(case: str) -> None:
    before, after, by_columns, expected = CASES[case]
    (site,) = explain(Stage(before, after, by_columns).eval(), (torch.randn(1, 8, *before),))
    assert site.windows == 1
    assert site.grid == expected


class Joined(nn.Module):
    """[1, 8, 3, 4] -> a token before those of the map, [1, 13, 8], or laid out as `layout` says."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.stem, self.token = layout, nn.Conv2d(8, 8, 1), nn.Parameter(torch.randn(1, 1, 8))
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        if self.layout == "tokens first":
            x = torch.cat([self.token, x.transpose(0, 1)]).transpose(0, 1)
        elif self.layout == "no images":
            x = torch.cat([self.token[0], x.squeeze(0)])[None]
        else:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        q, k, v = self.qkv(x).view(-1, 13, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT * 0.5).softmax(-1) @ v).transpose(1, 2).reshape(-1, 13, 8))


@pytest.mark.parametrize("layout", ["images first", "tokens first", "no images"])
def test_a_token_before_those_of_a_map_is_seen_along_whichever_axis_tokens_have(layout: str) -> None:
    (site,) = explain(Joined(layout).eval(), (torch.randn(1, 8, 3, 4),))
    assert site.grid == Grid(3, 4, 1)


class Patches(nn.Module):
    """[B, 8, 6, 8], of whose 2x2 patches each pixel attends to its like in the others, in two layers."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between, self.stem, self.place = between, nn.Conv2d(8, 8, 1), nn.Parameter(torch.randn(12, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=each) for each in (True, False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).view(-1, 8, 3, 2, 4, 2).permute(0, 3, 5, 2, 4, 1).reshape(-1, 12, 8) + self.place
        x = self.layers[0](x)
        x = {"nothing": x, "flipped": x.flip(1), "mixed": (x.mT @ x.new_ones(12, 12)).mT}[self.between]
        return self.layers[1](x)


@pytest.mark.parametrize(("between", "second"), [("nothing", Grid(3, 4)), ("flipped", None), ("mixed", None)])
def test_patches_stay_a_grid_as_long_as_each_stays_in_its_place(between: str, second: Grid | None) -> None:
    sites = explain(Patches(between).eval(), (torch.randn(1, 8, 6, 8),))
    assert [site.windows for site in sites] == [4, 4]
    assert [site.grid for site in sites] == [Grid(3, 4), second]
