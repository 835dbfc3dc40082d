"""Windowed attention on the image: shifted, padded and strided windows land where their tokens came from."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import load_source
from attnrewrite.pages.maps.image_maps import image_maps
from attnrewrite.pages.maps.page import maps_page
from attnrewrite.pages.maps.windows import WindowPlaces, window_places
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan

WINDOWED = '''
import torch
import torch.nn.functional as F
from torch import nn


class Windows(nn.Module):
    """[B, 3, 24, 24] -> [B, 16]: a map of 6 x 6 in windows, shifted and padded; strided ones where `apart`."""

    def __init__(self, size, shift=0, apart=False, flat=False, halo=0):
        super().__init__()
        self.size, self.shift, self.apart, self.flat, self.halo = size, shift, apart, flat, halo
        self.embed, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        x = self.norm(x.flatten(1, 2)).view(-1, 6, 6, 16) if self.flat else self.norm(x)
        size, out = self.size, -6 % self.size
        x = torch.roll(F.pad(x, (0, 0, 0, out, 0, out)), (-self.shift, -self.shift), (1, 2))
        many = (6 + out) // size
        if self.halo:
            x = x[:, : size * 2, : size * 2]
            many = 2
        shape = (-1, size, many, size, many, 16) if self.apart else (-1, many, size, many, size, 16)
        order = (0, 2, 4, 1, 3, 5) if self.apart else (0, 1, 3, 2, 4, 5)
        tokens = x.reshape(shape).permute(order).reshape(-1, size * size, 16)
        q, k, v = self.qkv(tokens).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        tokens = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return tokens.unflatten(0, (-1, many * many)).mean((1, 2))


def shifted():
    torch.manual_seed(0)
    return Windows(4, shift=2)


def partial():
    torch.manual_seed(0)
    return Windows(2, halo=1)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "windows.py"
    path.write_text(WINDOWED)
    return path


def found(file: Path, **options: object) -> WindowPlaces | str:
    names: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with warnings.catch_warnings(action="ignore"):
        graph = FxGraph(capture("windows", names["Windows"](**options).eval(), (torch.randn(2, 3, 24, 24),)).module)
    (site,) = scan(graph, "windows").sites
    assert site.windowed
    return window_places(graph, site)


CASES = {
    "windows": {"size": 2},
    "shifted": {"size": 3, "shift": 1},
    "padded": {"size": 4},
    "shifted and padded": {"size": 4, "shift": 2},
    "tokens in one line": {"size": 3, "shift": 1, "flat": True},
    "apart": {"size": 2, "apart": True},
}


def partition(size: int, shift: int = 0, apart: bool = False, flat: bool = False) -> np.ndarray:
    """The same partition of the numbers 0 to 35 by hand, -1 for padding: [windows, tokens]."""
    out = -6 % size
    image = F.pad(torch.arange(36).view(6, 6), (0, out, 0, out), value=-1)
    image, many = torch.roll(image, (-shift, -shift), (0, 1)), (6 + out) // size
    if apart:
        return image.view(size, many, size, many).permute(1, 3, 0, 2).reshape(-1, size * size).numpy()
    return image.view(many, size, many, size).permute(0, 2, 1, 3).reshape(-1, size * size).numpy()


@pytest.mark.parametrize("case", CASES)
def test_windows_lie_where_they_were_cut_out(case: str, file: Path) -> None:
    laid = found(file, **CASES[case])
    assert isinstance(laid, WindowPlaces)
    assert (laid.rows, laid.columns) == (6, 6)
    expected = partition(**CASES[case])  # type: ignore[arg-type]
    np.testing.assert_array_equal(laid.place, expected)
    values = np.where(expected == -1, 99, expected)[:, None].repeat(2, 1)  # what padding says is not shown
    np.testing.assert_array_equal(laid.lay_out(values), np.arange(36).reshape(1, 6, 6).repeat(2, 0))


def test_windows_over_a_part_of_the_image_are_told(file: Path) -> None:
    assert found(file, size=2, halo=1) == "attends in windows that overlap, or leave out a part of the image"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)
    return path


def received(model: nn.Module, x: Tensor) -> Tensor:
    """What each token receives in its own window, by hand, on the map: [heads, 6, 6]."""
    tokens = model.norm(model.embed(x).permute(0, 2, 3, 1))[0]
    places = torch.from_numpy(partition(4, 2))
    rows = torch.where(places[..., None] < 0, 0.0, tokens.reshape(36, 16)[places.clamp(min=0)])
    query, key, _ = model.qkv(rows).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(query @ key.transpose(2, 3) * 8**-0.5, dim=3).mean(2)
    drawn = torch.zeros(2, 36)
    for window, place in enumerate(places):
        drawn[:, place[place >= 0]] = weights[window][:, place >= 0]
    return drawn.view(2, 6, 6)


def test_a_shifted_models_maps_are_its_own_attention_on_the_image(file: Path, image: Path) -> None:
    source = load_source(f"{file}:shifted", input_size="3x24x24", mean=0.5, std=0.25)
    shown = image_maps(source, image)
    (one,) = shown.sites[0].before.maps
    pixels = torch.from_numpy(np.asarray(Image.open(image)).copy()).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        wanted = received(source.model, (pixels - 0.5) / 0.25)  # type: ignore[arg-type]
    np.testing.assert_allclose(one.image, wanted, rtol=1e-4)
    assert "16 → 16 tokens in each of 4 windows, each drawn where it lies in the image" in maps_page(shown)


def test_the_page_says_in_one_sentence_what_it_cannot_draw(file: Path, image: Path) -> None:
    source = load_source(f"{file}:partial", input_size="3x24x24", mean=0.5, std=0.25)
    page = maps_page(image_maps(source, image))
    assert "it attends in windows that overlap, or leave out a part of the image</li>" in page
