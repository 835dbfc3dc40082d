"""Converting: what is converted, what is kept and why, what is checked, and what is left on disk."""

import json
from pathlib import Path

import pytest
import torch
from head_loops import HEADS, JOINED, TOKENS, WIDTH, Loop
from identity import identity_errors
from tiny_vits import INPUTS, encoder
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.conversion.convert import final_plan
from attnrewrite.errors import CheckFailedError, InputError, NothingMatchedError
from attnrewrite.passes.draws import drawn


def test_a_copy_keeps_the_parameters_and_reports_every_site() -> None:
    done = ar.convert(encoder(), INPUTS, variant="relu-linear")
    assert [site["variant"] for site in done.report["sites"]] == ["relu-linear", "relu-linear"]
    assert all(site["identity_error"] <= 1e-5 for site in done.report["sites"])
    assert all(site["float64_error"] <= 1e-3 for site in done.report["sites"])
    assert done.module(INPUTS[0]).shape == (2, 5)


def test_sites_are_kept_by_id_or_by_name() -> None:
    names = [site.name for site in ar.explain(encoder(), INPUTS)]
    done = ar.convert(encoder(), INPUTS, variant="l1", keep=["site0"])
    assert [site["note"] for site in done.report["sites"]] == ["stays as it is: kept on request", None]
    assert repr(done) == "<Conversion of Encoder: l1 at 1 of 2 sites>"
    assert repr(done.scan) == "<Scan of Encoder: sites 2, near misses 0>"
    with pytest.raises(NothingMatchedError, match="kept on request"):
        ar.convert(encoder(), INPUTS, variant="l1", keep=names)
    with pytest.raises(InputError, match=r"unknown site to keep 'site7': did you mean 'site"):
        ar.convert(encoder(), INPUTS, variant="l1", keep=["site7"])


def test_heads_of_a_loop_are_one_site_unless_one_is_kept() -> None:
    model, x = Loop(*JOINED["a projection for each"]).eval(), (torch.randn(2, TOKENS, WIDTH),)
    done = ar.convert(model, x, variant="mobile")
    assert [(each.site, each.members) for each in done.plan.placements] == [("site0", ("site0", "site1", "site2"))]
    assert [(each["members"], each["heads"]) for each in done.report["sites"]] == [(["site0", "site1", "site2"], HEADS)]
    kept = ar.convert(model, x, variant="mobile", keep=["site1"])
    assert [(each.site, each.members) for each in kept.plan.placements] == [("site0", ()), ("site2", ())]
    two = nn.Sequential(model, Loop(*JOINED["slices, stacked"])).eval()
    named = ar.convert(two, x, variant="mobile", keep=["0"])
    assert [(each.site, each.heads) for each in named.plan.placements] == [("site3", HEADS)], (
        "all heads of module 0 stay"
    )


def test_calibration_repairs_and_is_the_same_for_a_seed() -> None:
    images = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    how = {"variant": "l1", "calibration": images, "seed": 3}
    first, second = (ar.convert(encoder(), INPUTS, **how) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    stages = {stage["name"]: stage for stage in first.report["calibration"]["stages"]}
    assert stages["fit"]["kl_after"] < stages["copy"]["kl_after"]


def test_a_model_without_attention_says_what_was_almost_one() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).softmax(-1) * x

    with pytest.raises(NothingMatchedError, match=r"no attention to rewrite .*comes from linear"):
        ar.convert(Gated(), (torch.randn(2, 8),), variant="l1")


def test_an_extraction_that_is_wrong_stops_the_conversion() -> None:
    done = ar.convert(encoder(), INPUTS, variant="softmax")
    with torch.no_grad():
        done.module.attention_site1.query.weight[0, 0] += 0.5
    with pytest.raises(
        CheckFailedError, match=r"site1 .* the extraction is wrong there; keep the site with --keep site1"
    ):
        identity_errors(done.original, done.module, done.scan, drawn(done.original, INPUTS))


def test_a_converted_folder_is_whole_and_loads_again(tmp_path: Path) -> None:
    done = ar.convert(encoder(), INPUTS, variant="l1")
    folder = done.save(tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.pt2",
        "plan.json",
        "report.json",
        "weights.safetensors",
    ]
    assert json.loads((folder / "report.json").read_text())["variant"] == "l1"
    with pytest.raises(InputError, match="exists"):
        done.save(tmp_path / "out")
    program = torch.export.load(folder / "model.pt2").module()
    x = torch.randn(7, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(program(x), done.module(x), atol=1e-6)


def test_a_failed_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ar.convert(encoder(), INPUTS, variant="l1")
    monkeypatch.setattr("attnrewrite.passes.verify.EXPORT_TOLERANCE", -1.0)
    with pytest.raises(CheckFailedError, match="differs from the module"):
        done.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nan_in_the_weights_is_found_before_anything_is_written() -> None:
    model = encoder()
    with torch.no_grad():
        model.blocks.layers[1].self_attn.in_proj_weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"weight blocks\.layers\.1\.self_attn\.in_proj_weight holds NaN"):
        ar.convert(model, INPUTS, variant="l1")


def test_an_interrupted_distillation_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    images = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    how = {"variant": "l1", "options": {"exact_prefix": False}, "calibration": images, "steps": 60}
    whole = ar.convert(encoder(), INPUTS, **how)
    seen: list[str] = []

    def stop_in_the_second_half(what: str, done: int, total: int) -> None:
        seen.append(what)
        if "distil" in what and "site" not in what and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ar.convert(encoder(), INPUTS, **how, state=tmp_path, progress=stop_in_the_second_half)
    assert any(tmp_path.iterdir())
    again = ar.convert(encoder(), INPUTS, **how, state=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.module.parameters(), again.module.parameters(), strict=True))


class Placeless(nn.Module):
    """[B, 3, 16, 16] -> [B, 5]: patches alone, with neither positions nor a class token to tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = 3 * self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].amax(1))


def test_a_wrong_extraction_is_seen_on_blank_example_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, blank = Placeless(), (torch.zeros(1, 3, 16, 16),)
    (site,) = ar.convert(model, blank, variant="l1").report["sites"]
    assert site["float64_error"] < 1e-5
    monkeypatch.setattr("attnrewrite.variants.softmax.score_scale", lambda site: 1.5 * site.core.scale)
    with pytest.raises(CheckFailedError, match="the extraction is wrong there"):
        ar.convert(model, blank, variant="l1")


def test_sites_are_kept_by_a_pattern_of_their_names() -> None:
    done = ar.convert(encoder(), INPUTS, variant="l1", keep=["*.layers.1.*"])
    assert [site["note"] for site in done.report["sites"]] == [None, "stays as it is: kept on request"]
    with pytest.raises(InputError, match=r"unknown site to keep 'decoder\.\*'"):
        ar.convert(encoder(), INPUTS, variant="l1", keep=["decoder.*"])


def test_each_reason_of_a_refusal_is_told_once() -> None:
    with pytest.raises(NothingMatchedError) as error:
        ar.convert(encoder(), INPUTS, variant="masked", options={"heads": 99})
    assert "(site0, site1: heads=99 does not fit its " in str(error.value)
    assert str(error.value).endswith("choose another variant, or options of it that help (--option KEY=VALUE)")


def test_a_part_whose_name_begins_as_a_sites_is_in_the_plan() -> None:
    named = nn.Sequential()
    named.add_module("attention_site0_body", encoder())
    done = ar.convert(named, INPUTS, variant="l1")
    with torch.no_grad():  # as distillation does
        done.module.get_submodule("attention_site0_body.head").bias.add_(1)
        done.module.get_submodule("attention_site0").value.bias.add_(1)
    assert list(final_plan(done.scan, {}, done.module, done.original).parameters) == ["attention_site0_body.head.bias"]
