"""What is proven of a model before anything is replaced, where the example alone would show nothing."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_vits import INPUTS, encoder
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.errors import CheckFailedError, InputError, NothingMatchedError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import load_source
from attnrewrite.passes.draws import drawn, in_one_batch
from attnrewrite.passes.original import agreement
from attnrewrite.passes.roundings import rewriting_error
from attnrewrite.passes.verify import IDENTITY_TOLERANCE, Run, float64_errors, relative_error, rewritten_sites
from attnrewrite.passes.wide import Recording
from attnrewrite.variants.registry import get_variant


class Odd(nn.Module):
    """Attention over x [B, 9, 16], and something odd about the model around it."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd, self.number = odd, 0
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.odd == "counts":
            self.calls.add_(1.0)
            x = x + self.calls
        if self.odd == "changes its input":
            x.mul_(2)
        if self.odd.startswith("counts in Python"):
            self.number += 1
            x = x * self.number
        query, key, value = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.odd == "drops scores" else 0.0)
        out = self.proj(out.transpose(1, 2).flatten(2))
        out = F.dropout(out, 0.2) if self.odd.startswith("drops") else out
        return F.pad(out, (0, 1), value=-1e9) if self.odd.endswith("out of sight") else out


TOKENS = (torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        ("counts", InputError, "changes its own buffer calls as it runs"),
        ("changes its input", InputError, "changes its input in place as it runs: have forward work on a copy"),
        ("drops", InputError, r"draws random numbers at dropout.*training=self\.training"),
        ("drops out of sight", InputError, "draws random numbers at dropout"),
        ("drops scores", NothingMatchedError, "its probabilities pass through dropout"),
        ("counts in Python", CheckFailedError, "differs from the model by .* was frozen as the example had it"),
        ("counts in Python out of sight", CheckFailedError, "differs from the model by"),  # beside a large constant
    ],
)
def test_a_model_that_is_no_function_of_its_input_is_told_as_such(odd: str, error: type, message: str) -> None:
    ar.convert(Odd(), TOKENS, variant="softmax")
    with pytest.raises(error, match=message):
        ar.convert(Odd(odd), TOKENS, variant="softmax")


@pytest.mark.parametrize(("number", "said"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_what_is_no_number_is_told_as_such(number: float, said: str, tmp_path: Path) -> None:
    broken = Odd()
    with torch.no_grad():
        broken.qkv.weight[0, 0] = number
    for model, example, where in (
        (Odd(), (TOKENS[0] + number,), "example input 0 of Odd"),
        (broken, TOKENS, r"Odd: weight qkv\.weight"),
    ):
        for call in (
            lambda: ar.convert(model, example, variant="softmax", keep_bad=True),  # noqa: B023, called at once
            lambda: ar.lower(model, "host", tmp_path / "out", example_inputs=example),  # noqa: B023
            lambda: ar.compare({"odd": model}, example),  # noqa: B023
            lambda: ar.evaluate(load_source(model, example), TOKENS[0]),  # noqa: B023
        ):
            with pytest.raises(InputError, match=f"{where} holds {said}"):
                call()


def test_a_batch_that_the_models_code_fixes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Two(Odd):
        """Weighs the first image otherwise than the second, and so has no answer for a third."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.tensor([1.0, 2.0])[:, None, None])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.weights)

    ar.convert(Two(), TOKENS, variant="softmax")
    assert "Two takes batches of 2 only: " in caplog.text


def test_the_report_says_what_was_checked() -> None:
    told: list[tuple[str, int, int]] = []
    checks = ar.convert(Odd(), TOKENS, variant="l1", progress=lambda *far: told.append(far)).report["checks"]
    kinds = "values in another order, sparse, and large, 2 images"
    assert checks["draws"] == ["the example", kinds]
    assert checks["draws_refused"] == {}
    one = ar.convert(Odd(), (TOKENS[0][:1],), variant="l1").report["checks"]
    assert one["draws"] == [f"the example and {kinds}"]
    assert checks["seconds"] > 0
    assert told == [(what, done, 2) for what in ("check the graph", "check the sites") for done in range(3)]
    assert max(checks["graph_error"], checks["rewriting_error"]) < 1e-5


def test_a_draw_that_a_model_does_not_take_is_tried_kind_by_kind() -> None:
    class Single(Odd):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] != 1:
                raise ValueError("one image at a time")
            return super().forward(x)

    alone = (TOKENS[0][:1],)
    graph = capture("odd", Odd(), alone).module
    draws = drawn(graph, alone)
    told: list[tuple[int, int]] = []
    agreed = agreement("single", Single(), graph, draws, progress=lambda *far: told.append(far))
    own = "the example's values in another order"
    assert [run.draw.name for run in agreed.runs] == [
        "the example", f"{own}, as many images as in the example", "sparse values of both signs, 1 image",
        "large values of one sign, 1 image",
    ]  # fmt: skip
    assert told == [(0, 2), (1, 2), (2, 5), (3, 6), (4, 6), (5, 6), (6, 6)]
    assert list(agreed.refused) == [draws[1].name, f"{own}, 2 images"]
    together = agreement("single", Single(), graph, in_one_batch(draws))
    assert (len(together.runs), together.refused) == (1, {})  # it answers each alone as the graph does both


def test_a_draw_that_has_no_number_for_an_answer_is_drawn_kind_by_kind() -> None:
    """A logarithm has none for the sparse part of a draw, and attention carries that to all tokens."""

    class Logarithm(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.log())

    checks = ar.convert(Logarithm(), (TOKENS[0][:1].abs() + 1,), variant="softmax").report["checks"]
    both, mixed = checks["draws_refused"]
    assert both == f"the example and {mixed}"
    assert checks["draws_refused"][mixed] == "the model answers with no number"
    assert [name.split(",")[0] for name in checks["draws"]] == [
        "the example", "the example's values in another order", "sparse values of both signs",
        "large values of one sign",
    ]  # fmt: skip


@pytest.mark.parametrize("open_batch", [True, False])
def test_a_conversion_without_images_runs_the_model_on_its_example_and_on_what_is_drawn(open_batch: bool) -> None:
    """Once as it is loaded, once on that alone: whatever is proven of it is proven of these runs."""

    class Counted(Odd):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                seen.append(x.shape[0])
            return super().forward(x if open_batch else x.reshape(1, 9, 16))

    seen: list[int] = []
    ar.convert(Counted(), (TOKENS[0][:1],), variant="l1")
    assert seen == [1, 1]


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_images_that_see_each_other_are_held_to_the_model_together(scale: float) -> None:
    class Crowd(Odd):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[0])
            return super().forward(x - x.mean(0))

    seen: list[int] = []
    model, alone = Crowd(), (TOKENS[0][:1],)
    graph = copy.deepcopy(capture("crowd", model, alone).module)
    draws = in_one_batch(drawn(graph, alone))
    with torch.no_grad():
        graph.proj.weight.mul_(scale)
    seen.clear()
    if scale == 1.0:
        assert agreement("crowd", model, graph, draws).error < 1e-5
    else:
        with pytest.raises(CheckFailedError, match=f"differs from the model by .* on {draws[0].name}"):
            agreement("crowd", model, graph, draws)
    assert seen == [1, 2]


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_the_model_with_softmax_re_emitted_is_run_as_a_whole(scale: float) -> None:
    """On what was drawn, alone; in the batch that it was drawn in, where images see each other."""

    class Crowd(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    for model in (Odd(), Crowd()):
        alone = (TOKENS[0][:1],)
        graph = capture("odd", model, alone).module
        (pair,) = in_one_batch(drawn(graph, alone))
        wired = copy.deepcopy(graph)
        with torch.no_grad():
            wired.proj.weight.mul_(scale)
        run = Run.of(Recording(graph), pair)
        if scale == 1.0:
            assert rewriting_error(graph, wired, run) < 1e-5
            continue
        with pytest.raises(CheckFailedError, match=f"differs from the original .* on {pair.name}, although each site"):
            rewriting_error(graph, wired, run)


def test_a_graph_that_takes_no_image_alone_is_told() -> None:
    class Pairs(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(2, 9, 16)

    alone = (TOKENS[0][:1],)
    (pair,) = in_one_batch(drawn(capture("odd", Odd(), alone).module, alone))
    graph = capture("pairs", Pairs(), TOKENS).module
    with pytest.raises(CheckFailedError, match="does not take one image, but the batch that it was checked with"):
        rewriting_error(graph, graph, Run.of(Recording(graph), pair))


def test_float64_decides_where_large_scores_are_rounded() -> None:
    class Large(Odd):
        """All keys have much in common, which no softmax sees; the scale stands elsewhere than it is re-emitted."""

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            scores = (query * 0.3) @ (key * 0.7).transpose(2, 3)
            return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    large = Large()
    with torch.no_grad():
        large.qkv.bias[16:32] = 1e4
    done = ar.convert(large, TOKENS, variant="softmax")
    assert relative_error(done.module(*TOKENS), large(*TOKENS)) > IDENTITY_TOLERANCE
    assert done.report["sites"][0]["identity_error"] < IDENTITY_TOLERANCE / 100


def test_a_site_whose_check_fails_can_be_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site's scale is read wrong, first at one site, then at both."""
    wrong = {"site1"}
    monkeypatch.setattr(
        "attnrewrite.variants.softmax.score_scale",
        lambda site: site.core.scale * (1.001 if site.id in wrong else 1.0),
    )
    with pytest.raises(CheckFailedError, match=r"^site1 .* on .*: .*keep the site with --keep site1, or .*--keep-bad"):
        ar.convert(encoder(), INPUTS, variant="l1")
    done = ar.convert(encoder(), INPUTS, variant="l1", keep_bad=True)
    one, two = done.report["sites"]
    assert (one["variant"], two["variant"]) == ("l1", "softmax")
    assert two["note"].startswith("stays as it is: its check failed: site1 ")
    assert two["identity_error"] > 1e-5
    assert [placement.site for placement in done.plan.placements] == ["site0"]
    wrong.add("site0")
    with pytest.raises(CheckFailedError, match="site0"):
        ar.convert(encoder(), INPUTS, variant="l1", keep_bad=True)


def test_a_form_that_fails_at_one_site_can_be_left_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a form is checked last, when all is calibrated."""
    broken = {"site1"}

    def checked(student: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
        for site in broken & set(rewritten_sites(student)):
            raise CheckFailedError(f"{site}: differs", site=site)
        return float64_errors(student, inputs)

    monkeypatch.setattr("attnrewrite.conversion.replacing.float64_errors", checked)
    with pytest.raises(CheckFailedError, match="site1: differs"):
        ar.convert(encoder(), INPUTS, variant="l1")
    done = ar.convert(encoder(), INPUTS, variant="l1", keep_bad=True)
    assert [site["variant"] for site in done.report["sites"]] == ["l1", "softmax"]
    assert done.report["sites"][1]["note"] == "stays as it is: its check failed: site1: differs"
    broken.add("site0")
    with pytest.raises(CheckFailedError, match=r"site\d: differs"):
        ar.convert(encoder(), INPUTS, variant="l1", keep_bad=True)


def test_what_the_example_hides_is_said_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask that keeps all, a mask that is lost looks right; the check's own masks show it."""

    class Masked(Odd):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            query, key, value = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
            return self.proj(out.transpose(1, 2).flatten(2))

    given = (*TOKENS, torch.ones(2, 9, dtype=torch.bool))
    assert ar.convert(Masked(), given, variant="softmax").report["checks"]["rewriting_error"] < 1e-5
    monkeypatch.setattr("attnrewrite.passes.site_module.SiteModule.bias", lambda *_: None)
    with pytest.raises(CheckFailedError, match="the example hides it, as a mask that drops nothing"):
        ar.convert(Masked(), given, variant="softmax")


def test_distances_are_to_the_original() -> None:
    from fits import calibration

    from attnrewrite.calibration.stage import distance

    given = calibration("pre-norm", get_variant("softmax"))
    assert distance(given).error < 1e-10
    with torch.no_grad():
        for module in (given.teacher, given.student):
            module.attention_site0.query.weight.mul_(1.5)
    assert distance(replace(given)).error > 1e-4
