"""What `explain --image` shows: each form's map against its definition, laid out on the grid, before and after."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import CONTRAST, DESK, PHONE, headless, show
from PIL import Image
from torch import Tensor
from variant_sites import make_heads, make_site

import attnrewrite as ar
from attnrewrite.cli.main import main
from attnrewrite.errors import InputError
from attnrewrite.frontends.sources import load_source
from attnrewrite.pages.maps.image_maps import FormMaps, ImageMaps, SiteMaps, TokenMap, image_maps
from attnrewrite.pages.maps.page import maps_page, overlay
from attnrewrite.site import Grid
from attnrewrite.variants.base import Heads
from attnrewrite.variants.registry import get_variant, variants

GRID = Grid(3, 4, prefix=1)
SITE = make_site(heads=2, head_dim=8, grid=GRID)
HEADS = make_heads(SITE, batch=2)
FIRST = "attention of the first token"
RECEIVED = "attention received"


def maps_of(name: str, heads: Heads = HEADS, **options: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return get_variant(name, options).build(SITE).double().token_maps(heads)


def softmax(heads: Heads) -> Tensor:
    scores = heads.query @ heads.key.transpose(2, 3) * SITE.head_dim**-0.5
    return torch.softmax(scores if heads.bias is None else scores + heads.bias, dim=3)


def l2_of_l1(tokens: Tensor) -> Tensor:
    return (tokens / tokens.abs().sum(2, keepdim=True)).square().sum(3).sqrt()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_softmax_is_what_each_token_receives_and_what_the_class_token_sees() -> None:
    biased = HEADS._replace(bias=torch.linspace(-1, 1, 13 * 13, dtype=torch.float64).reshape(13, 13))
    for heads in (HEADS, biased):
        maps = maps_of("softmax", heads)
        assert list(maps) == [RECEIVED, FIRST]
        close(maps[RECEIVED], softmax(heads).mean(2))
        close(maps[FIRST], softmax(heads)[:, :, 0])
        for values in maps.values():
            close(values.sum(2), torch.ones(2, 2, dtype=torch.float64))


def test_l1_is_the_norm_of_each_normalised_token() -> None:
    maps = maps_of("l1", exact_prefix=False)
    close(maps["|query|"], l2_of_l1(HEADS.query))
    close(maps["|key|"], l2_of_l1(HEADS.key - HEADS.key.mean(2, keepdim=True)))
    one = maps_of("l1", exact_prefix=False, single_head=True, centred=False)
    close(one["|key|"], l2_of_l1(HEADS.key.permute(0, 2, 1, 3).flatten(2).unsqueeze(1)))


def test_exact_rows_show_the_class_token_beside_the_form() -> None:
    maps = maps_of("l1")
    assert list(maps) == ["|query|", "|key|", FIRST]
    close(maps[FIRST], softmax(HEADS)[:, :, 0])


def test_masked_shows_the_window() -> None:
    maps = maps_of("masked", size=3)
    scores = HEADS.query @ HEADS.key.transpose(2, 3) * SITE.head_dim**-0.5
    place = torch.arange(12)
    row, column = place // 4, place % 4
    near = ((row[:, None] - row).abs() <= 1) & ((column[:, None] - column).abs() <= 1)
    mask = torch.ones(13, 13, dtype=torch.float64)
    mask[1:, 1:] = near.double()
    weights = torch.softmax(scores * mask, dim=3)
    close(maps[RECEIVED], weights.mean(2))
    close(maps[FIRST], weights[:, :, 0])
    close(maps["window of the middle token"], weights[:, :, 1 + 1 * 4 + 2])


def test_separable_shows_its_context_scores() -> None:
    form = get_variant("separable", {"exact_prefix": False, "latents": 1}).build(SITE).double()
    torch.nn.init.normal_(form.latent.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = form.token_maps(HEADS)
    merged = HEADS.key.permute(0, 2, 1, 3).flatten(2)
    close(maps["context scores"], torch.softmax(merged @ form.latent.weight.T, dim=1).mT)
    close(maps["context scores"].sum(2), torch.ones(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("reading", ["conversion", "code", "paper"])
def test_mobile_shows_how_small_heads_and_tokens_compete(reading: str) -> None:
    weights = maps_of("mobile", exact_prefix=False, reading=reading)["competition weight"]
    assert weights.shape == (2, 4, 13)
    over = 1 if reading == "paper" else 2
    close(weights.sum(over), torch.full_like(weights.sum(over), 1.0 if reading == "paper" else 13.0))
    few = maps_of("mobile", exact_prefix=False, reading=reading, keep_heads=(0, 3))["competition weight"]
    assert few.shape == (2, 2, 13)


def test_additive_shows_each_tokens_part_in_the_global_queries() -> None:
    part = maps_of("additive", exact_prefix=False)["part in the global query"]
    value = HEADS.value.permute(0, 2, 1, 3).flatten(2)
    alpha = (value / value.norm(dim=2, keepdim=True)).sum(2, keepdim=True)
    close(part, (alpha / alpha.norm(dim=1, keepdim=True)).mT.expand(2, 2, 13))
    assert maps_of("additive", exact_prefix=False, queries=1)["part in the global query"].shape == (2, 1, 13)


@pytest.mark.parametrize("name", ["relu-linear", "elu", "hedgehog", "taylor", "polynomial"])
def test_forms_linear_in_the_value_show_the_weights_of_their_sum(name: str) -> None:
    form = get_variant(name, {"exact_prefix": False}).build(SITE).double()
    with torch.no_grad():
        (weights,) = form.token_maps(HEADS).values()
        close(weights.unsqueeze(2) @ HEADS.value, form(*HEADS).mean(2, keepdim=True))


@pytest.mark.parametrize("name", [name for name in variants() if name != "softmax"])
def test_a_local_branch_leaves_the_maps_as_they_are(name: str) -> None:
    plain, beside = maps_of(name), maps_of(name, local="true")
    assert list(plain) == list(beside)
    assert all(torch.equal(plain[each], beside[each]) for each in plain)
    assert all(values.shape[2] == 13 for values in plain.values())


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return path


HOW = {"input_size": "3x16x16", "mean": 0.5, "std": 0.25}
OPTIONS = ["--input-size", "3x16x16", "--mean", "0.5", "--std", "0.25"]


def by_hand(source: Any, image: Path) -> list[Tensor]:
    """The attention of each layer of nn.TransformerEncoder, from its own parameters: [heads, queries, keys]."""
    model = source.model
    pixels = torch.from_numpy(np.asarray(Image.open(image)).copy()).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        x = model.embed((pixels - 0.5) / 0.25).flatten(2).transpose(1, 2)
        x = torch.cat([model.token, x], 1)
        found = []
        for layer in model.blocks.layers:
            attention = layer.self_attn
            query, key, _ = (x @ attention.in_proj_weight.T + attention.in_proj_bias)[0].reshape(5, 3, 2, 8).unbind(1)
            found.append(torch.softmax(torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(8), dim=2))
            x = layer(x)
    return found


def test_the_maps_of_a_model_are_its_own_attention(models_file: Path, image: Path) -> None:
    source = load_source(f"{models_file}:vit", **HOW)
    found = image_maps(source, image)
    assert [each.site.id for each in found.sites] == ["site0", "site1"]
    assert np.array_equal(found.pixels, np.asarray(Image.open(image)))
    for each, wanted in zip(found.sites, by_hand(source, image), strict=True):
        assert each.after is None
        assert [one.title for one in each.before.maps] == [RECEIVED, FIRST]
        for one, values in zip(each.before.maps, (wanted.mean(1), wanted[:, 0]), strict=True):
            assert one.image.shape == (2, 2, 2)
            np.testing.assert_allclose(one.image.reshape(2, 4), values[:, 1:], rtol=1e-4)
            np.testing.assert_allclose(one.prefix, values[:, :1], rtol=1e-4)
            np.testing.assert_allclose(one.image.sum((1, 2)) + one.prefix.sum(1), 1, rtol=1e-5)


@pytest.fixture(scope="module")
def converted(models_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    command = ["convert", f"{models_file}:vit", *OPTIONS, "--variant", "l1", "--keep", "site0", "--out", str(out)]
    assert main(command) == 0
    return out


def test_a_converted_folder_is_shown_beside_its_original(converted: Path, models_file: Path, image: Path) -> None:
    before = image_maps(load_source(f"{models_file}:vit", **HOW), image)
    found = image_maps(load_source(converted), image)
    for one, other in zip(found.sites, before.sites, strict=True):
        for mine, theirs in zip(one.before.maps, other.before.maps, strict=True):
            np.testing.assert_array_equal(mine.image, theirs.image)
    kept, changed = (each.after for each in found.sites)
    assert kept is not None
    assert changed is not None
    assert (kept.form, changed.form) == ("softmax", "l1")
    assert [one.title for one in changed.maps] == ["|query|", "|key|", FIRST]
    # What comes before the changed site is as it was, so that its exact row is too.
    np.testing.assert_allclose(changed.maps[2].image, found.sites[1].before.maps[1].image, rtol=1e-4)
    np.testing.assert_array_equal(kept.maps[0].image, found.sites[0].before.maps[0].image)


def test_a_kept_site_whose_output_was_refitted_is_shown_too(models_file: Path, image: Path, tmp_path: Path) -> None:
    source, images = f"{models_file}:vit", torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    done = ar.convert(source, variant="additive", keep=["site1"], calibration=images, **HOW)
    assert "blocks.layers.1.self_attn.out_proj.weight" in done.plan.parameters
    changed, kept = image_maps(load_source(done.save(tmp_path / "out")), image).sites
    assert (kept.after and kept.after.form, changed.after and changed.after.form) == ("softmax", "additive")


def test_the_command_writes_the_page(
    capsys: pytest.CaptureFixture[str], converted: Path, image: Path, tmp_path: Path
) -> None:
    out = tmp_path / "maps.html"
    main(["explain", str(converted), "--image", str(image), "--maps", str(out), "--json"])
    printed = capsys.readouterr()
    assert printed.out.startswith("{")
    assert f"written: {out}" in printed.err
    page = out.read_text()
    assert page.count('<section class="site card"') == 2
    assert page.count('<div class="side before">') == page.count('<div class="side after">') == 2
    assert "http" not in page.replace("http-equiv", "")


BAD = {
    "an image without a page": (["--image", "IMAGE"], "--image FILE and --maps FILE belong together"),
    "a page without an image": (["--maps", "m.html"], "--image FILE and --maps FILE belong together"),
    "no such image": (["--image", "none.png", "--maps", "m.html"], "none.png is not an image that can be read"),
    "one page twice": (["--image", "IMAGE", "--maps", "m.html", "--graph", "m.html"], "give each page a name"),
    "no folder": (["--image", "IMAGE", "--maps", "IMAGE/m.html"], "is not a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_told_before_the_model_is_loaded(
    case: str, capsys: pytest.CaptureFixture[str], image: Path
) -> None:
    arguments, said = BAD[case]
    assert main(["explain", "nothing.py:vit", *(each.replace("IMAGE", str(image)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_model_whose_pixels_are_not_known_asks_for_them(models_file: Path, image: Path) -> None:
    with pytest.raises(InputError, match="give --mean and --std"):
        image_maps(load_source(f"{models_file}:vit", input_size="3x16x16"), image)


def test_the_page_says_why_a_site_is_not_drawn_and_escapes_names() -> None:
    hostile = "<script>alert(1)</script>"
    drawn = FormMaps("softmax", (TokenMap(RECEIVED, np.eye(2)[None].repeat(2, 0), np.array([[0.25], [0.75]])),))
    not_drawn = FormMaps("softmax", (), "it attends in 4 windows")
    sites = (
        SiteMaps(make_site(name=hostile, grid=Grid(2, 2, 1)), drawn, None),
        SiteMaps(make_site(id="site9", name="windowed"), not_drawn, None),
    )
    page = maps_page(ImageMaps(hostile, hostile, np.zeros((4, 4, 3), np.uint8), sites))
    assert "<script>alert" not in page
    assert "<li>site9 (windowed): it attends in 4 windows</li>" in page
    assert page.count("<figure") == 3
    assert "before the image: 0.5" in page


def test_colours_run_from_zero_or_what_is_below_it_to_the_largest() -> None:
    ends = [(each.low, each.high) for each in (overlay("", np.array([[1.0, 3.0]]), np.empty(0)),
                                               overlay("", np.array([[-1.0, 3.0]]), np.empty(0)),
                                               overlay("", np.zeros((1, 2)), np.empty(0)))]  # fmt: skip
    assert ends == [(0.0, 3.0), (-1.0, 3.0), (0.0, 0.0)]


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_browser_shows_every_map(width: int, converted: Path, image: Path, tmp_path: Path) -> None:
    found = image_maps(load_source(converted), image)
    path = tmp_path / "maps.html"
    path.write_text(maps_page(found))
    with headless() as browser:
        show(browser, path.as_uri(), width)
        drawn = "return [...document.images].filter(e => e.complete && e.naturalWidth === 2).length"
        sides = [side for each in found.sites for side in (each.before, each.after) if side is not None]
        count = sum(1 + len(one.image) for side in sides for one in side.maps)
        assert browser.execute_script(drawn) == count
        assert browser.execute_script("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
        assert min(browser.execute_script(CONTRAST)["ratios"]) >= 4.5
        assert browser.get_log("browser") == []
