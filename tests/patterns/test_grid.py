"""Tokens that are an image: the pixels of a map in their order, a stage whose one window is the whole map, patches that
are taken once for many layers.
"""

from collections.abc import Callable
from pathlib import Path

import onnxruntime
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


class Cut(nn.Module):
    """Pictures [B, 3, 12, 16] -> tokens of patches of 3 x 2 by a linear layer, cut as `cut` says, the last one first
    where they are `turned`, after a `token`.
    """

    def __init__(self, cut: Callable[[Tensor], Tensor], token: bool, turned: bool = False) -> None:
        super().__init__()
        width, self.turned = cut(torch.zeros(1, 3, 12, 16)).shape[-1], turned
        self.cut, self.token = cut, nn.Parameter(torch.randn(1, 1, 8)) if token else None
        self.norm, self.gain, self.embed = nn.LayerNorm(width), nn.Parameter(torch.ones(width)), nn.Linear(width, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.norm(self.cut(x)) * self.gain)
        x = x.flip(1) if self.turned else x
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return x


def rearranged(x: Tensor, *order: int) -> Tensor:
    """The patches by a permutation of [B, C, 4 rows, 3, 8 columns, 2]: [B, 32, 6 * C]."""
    return x.reshape(-1, x.shape[1], 4, 3, 8, 2).permute(0, *order).reshape(-1, 32, 6 * x.shape[1])


CUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool, Grid | None]] = {
    "patches": (lambda x: rearranged(x, 2, 4, 3, 5, 1), False, Grid(4, 8)),
    "after a token": (lambda x: rearranged(x, 2, 4, 1, 3, 5), True, Grid(4, 8, 1)),
    "channels last": (
        lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4, 3, 8, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 32, 18),
        False,
        Grid(4, 8),
    ),
    "unfolded": (lambda x: nn.functional.unfold(x, (3, 2), stride=(3, 2)).mT, True, Grid(4, 8, 1)),
    "overlapping, padded": (lambda x: nn.functional.unfold(x, 5, stride=2, padding=2).mT, False, Grid(6, 8)),
    "a part of the picture": (lambda x: nn.functional.unfold(x, 3, stride=3).mT, False, Grid(4, 5)),
    "with the picture moved aside": (
        lambda x: rearranged(torch.cat([x, nn.functional.pad(x, (1, -1))], 1), 2, 4, 3, 5, 1),
        True,
        Grid(4, 8, 1),
    ),
    "columns before rows": (lambda x: rearranged(x, 4, 2, 3, 5, 1), False, None),
    "rows are tokens": (lambda x: x.permute(0, 2, 1, 3).reshape(-1, 12, 48), False, None),
    "the last patch first": (lambda x: rearranged(x, 2, 4, 3, 5, 1).flip(1), False, None),
}


@pytest.mark.parametrize("case", CUTS)
def test_patches_that_a_linear_layer_embeds_are_a_grid(case: str) -> None:
    cut, token, expected = CUTS[case]
    sites = explain(Cut(cut, token).eval(), (torch.randn(2, 3, 12, 16),))
    assert [site.grid for site in sites] == [expected] * 2


class Ordered(nn.Module):
    """[B, 3, 12, 16] -> the pixels of a map [B, 8, 4, 8] as tokens in an `order`, behind a `token` or none, through
    two layers.
    """

    def __init__(self, order: Callable[[Tensor], Tensor], token: bool) -> None:
        super().__init__()
        self.order, self.token = order, nn.Parameter(torch.randn(1, 1, 8)) if token else None
        self.stem, self.place = nn.Conv2d(3, 8, (3, 2), (3, 2)), nn.Parameter(torch.randn(32, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=each) for each in (True, False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.order(self.stem(x).relu()) + self.place
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return x


SHUFFLED = torch.randperm(32, generator=torch.Generator().manual_seed(0))
ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], bool, Grid | None]] = {
    "row by row": (lambda x: x.flatten(2).mT, False, Grid(4, 8)),
    "row by row, after a token": (lambda x: x.permute(0, 2, 3, 1).reshape(-1, 32, 8), True, Grid(4, 8, 1)),
    "columns before rows": (lambda x: x.mT.flatten(2).mT, False, None),
    "every other row backwards": (
        lambda x: torch.stack([x[:, :, ::2], x[:, :, 1::2].flip(3)], 3).flatten(2).mT,
        True,
        None,
    ),
    "square by square": (
        lambda x: x.view(-1, 8, 2, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 32, 8),
        True,
        None,
    ),
    "shuffled": (lambda x: x.flatten(2).mT[:, SHUFFLED], False, None),
    "channels among pixels": (lambda x: x.reshape(-1, 32, 8), False, None),
}


@pytest.mark.parametrize("case", ORDERS)
def test_pixels_of_a_map_are_a_grid_row_by_row_alone(case: str) -> None:
    order, token, expected = ORDERS[case]
    sites = explain(Ordered(order, token).eval(), (torch.randn(2, 3, 12, 16),))
    assert [site.grid for site in sites] == [expected] * 2


@pytest.mark.parametrize("case", ["row by row, after a token", "square by square"])
def test_the_order_of_pixels_is_seen_in_a_file(case: str, tmp_path: Path) -> None:
    order, token, expected = ORDERS[case]
    model, images = Ordered(order, token).eval(), torch.randn(2, 3, 12, 16)
    torch.onnx.export(model, (images,), tmp_path / "model.onnx", dynamo=False)
    assert [site.grid for site in explain(tmp_path / "model.onnx").sites] == [expected] * 2


@pytest.mark.parametrize("token", [False, True])
def test_patches_are_no_grid_once_they_are_turned_around(token: bool) -> None:
    sites = explain(Cut(CUTS["patches"][0], token, turned=True).eval(), (torch.randn(2, 3, 12, 16),)).sites
    assert [site.grid for site in sites] == [None] * 2


@pytest.mark.parametrize("case", ["patches", "after a token", "columns before rows"])
def test_patches_are_seen_in_a_file_that_onnxruntime_optimised(case: str, tmp_path: Path) -> None:
    """Their layer is a Gemm there, which takes the patches of all images as rows."""
    cut, token, expected = CUTS[case]
    torch.onnx.export(Cut(cut, token).eval(), (torch.randn(2, 3, 12, 16),), tmp_path / "model.onnx", dynamo=False)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    assert [site.grid for site in explain(tmp_path / "optimised.onnx").sites] == [expected] * 2


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
