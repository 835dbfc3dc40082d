"""The closed-form stage on small models of every shape: what it finds, what it recovers exactly, when it steps back."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fits import KINDS, LAYER_NORM, LINEAR, NORMED, WIDTH, Attention, Model, calibration, error_on_others, pictures
from torch import Tensor, nn

from attnrewrite.calibration import branches as branches_of
from attnrewrite.calibration import descent, fit
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.descent import NO_CLOSER
from attnrewrite.calibration.distill import Distillation
from attnrewrite.calibration.fit import Fit, _back_off, teacher_heads
from attnrewrite.calibration.points import fit_points
from attnrewrite.calibration.processes import Processes
from attnrewrite.calibration.reconstruct import Reconstruction
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import Distance, Stage, StageInput, distance
from attnrewrite.calibration.stages import Copy, calibrate, run, split
from attnrewrite.errors import CheckFailedError
from attnrewrite.images.dataset import Images
from attnrewrite.images.model_inputs import ModelInputs
from attnrewrite.images.pool import Pool
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.request import Execution
from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.registry import get_variant


@pytest.mark.parametrize("kind", LINEAR)
def test_every_residual_branch_is_found_and_its_map_recovered(kind: str) -> None:
    """Spoil every map that ends a branch: fitted without a ridge to its stream, the student is the teacher again."""
    given = calibration(kind, get_variant("softmax"))
    found = list(branches(given.student))
    assert [branch.site is not None for branch in found] == [True, False, True, False]
    assert all(branch.stream is not branch.node for branch in found)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for branch in found:
            branch.weight.add_(torch.randn(branch.weight.shape, generator=generator) * 0.3)
            assert branch.bias is not None
            branch.bias.add_(0.1)
    assert distance(given).error > 1e-2
    given = replace(given, images=Pool(pictures(64), None, (3, 12, 12), 16))
    Fit(forms=False, ridge=1e-12).run(given)
    assert distance(given).error < 1e-8


@pytest.mark.parametrize("kind", NORMED)
def test_behind_a_normalisation_a_small_change_is_taken_back_but_for_what_it_does_to_lengths(kind: str) -> None:
    given = calibration(kind, get_variant("softmax"))
    found = list(branches(given.student))
    assert [branch.site is not None for branch in found] == [True, False, True, False]
    assert all(branch.stream is not branch.node for branch in found)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for branch in found:
            branch.weight.add_(torch.randn(branch.weight.shape, generator=generator) * 1e-3)
    before = distance(given).error
    Fit(forms=False, ridge=1e-12).run(replace(given, images=Pool(pictures(64), None, (3, 12, 12), 16)))
    assert distance(given).error < 0.03 * before


@pytest.mark.parametrize("kind", NORMED)
def test_behind_a_normalisation_a_map_is_to_give_what_the_original_does_but_for_errors_of_the_stream(kind: str) -> None:
    model = Model(kind)
    given = calibration(kind, get_variant("l1"), model=model)
    branch = next(branches(given.student))
    with Segments(given.student, given.images, Processes()) as segments:
        _, original = next(segments.run(segments.order[branch.stream] + 1, {branch.stream, *branch.original}))
    assert branch.beside is not None
    y, beside = branch.outputs(original[branch.node]), original[branch.beside]
    wanted, _ = branch.wanted(y[..., 0], {branch.beside: beside}, original)
    torch.testing.assert_close(wanted, y)
    error = 1e-3 * torch.randn(beside.shape, generator=torch.Generator().manual_seed(3))
    wanted, _ = branch.wanted(y[..., 0], {branch.beside: beside + error}, original)
    with torch.no_grad():
        stream = beside + error + model.blocks[0].first(wanted)
    assert (stream - original[branch.stream]).square().mean() < 0.4 * error.square().mean()  # its mean and length stay


def test_channels_that_a_layer_normalisation_hides_do_not_grow_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for least in (None, branches_of.LEAST_GAIN, 0.0):
        model = Model(LAYER_NORM)
        with torch.no_grad():
            for norm in (model.blocks[1].first, model.blocks[1].second):  # of what the first block changed
                norm.weight[::2] = 1e-5
        given = calibration(LAYER_NORM, get_variant("l1"), pictures(300), model=model)
        if least is not None:
            monkeypatch.setattr(branches_of, "LEAST_GAIN", least)
            Fit().run(given)
        errors.append(error_on_others(given))
    before, after, spoilt = errors
    assert after < 0.8 * before
    assert after < 0.8 * spoilt


@pytest.mark.parametrize("kind", [*LINEAR, *NORMED])
def test_what_a_map_gives_and_the_shift_of_its_path_are_what_its_branch_adds(kind: str) -> None:
    given = calibration(kind, get_variant("l1"))
    for branch in branches(given.student):
        assert branch.beside is not None
        needs = {branch.node, branch.beside, branch.stream, *branch.operands}
        with Segments(given.student, given.images, Processes()) as student:
            _, values = next(student.run(student.order[branch.stream] + 1, needs))
        y = branch.outputs(values[branch.node])
        added = branch.change_of_stream(y, values) + branch.shift(y[..., 0], values)
        torch.testing.assert_close(added, values[branch.stream] - values[branch.beside], rtol=1e-4, atol=1e-4)


class Itself(nn.Module):
    """Two blocks of attention; what each adds beside it depends on the map's own outputs in full, or is read again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what = what
        self.embed, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)
        self.first, self.second, self.map = Attention(), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.first(x)
        y = self.map(x)
        length = y.square().mean(-1, keepdim=True).sqrt()
        if self.what == "gates itself":
            x = x + y * y.sigmoid()
        elif self.what == "gated by its length":
            x = x + y * length.sigmoid()
        elif self.what == "added to itself":
            x = y + y.tanh()
        elif self.what == "less than itself":
            x = x + (y - y.tanh())
        else:
            x = x + y / length
        x = x + self.second(x)
        return self.head((x + length if self.what == "read again" else x).mean(1))


@pytest.mark.parametrize(
    "what", ["gates itself", "gated by its length", "added to itself", "less than itself", "read again"]
)
def test_a_map_is_no_branch_whose_outputs_are_more_than_moved_and_scaled(what: str) -> None:
    given = calibration(what, get_variant("l1"), model=Itself(what))
    assert [branch.site is not None for branch in branches(given.student)] == [True, True]


def test_a_map_divided_by_its_own_length_is_a_branch() -> None:
    given = calibration("length", get_variant("l1"), model=Itself("length"))
    assert [branch.site is not None for branch in branches(given.student)] == [True, False, True]
    assert [branch.normalised for branch in branches(given.student)] == [False, True, False]


class Contexts(nn.Module):
    """Two blocks of attention; what each adds beside it is the same for all tokens of an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)
        self.first, self.second, self.context = Attention(), Attention(), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.first(x)
        x = x + self.context(x.mean(1, keepdim=True))
        x = x + self.second(x)
        return self.head((x + self.other(x.mean(1))[:, None]).mean(1))


def test_a_map_whose_rows_reach_several_tokens_each_is_no_branch() -> None:
    given = calibration("contexts", get_variant("l1"), model=Contexts())
    assert [branch.site is not None for branch in branches(given.student)] == [True, True]
    before = distance(given)
    (report,) = run(given, (Fit(),))
    assert report.error_after <= before.error


@pytest.mark.parametrize("variant", ["l1", "polynomial", "relu-linear", "mobile", "separable", "additive"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_brings_every_form_closer(kind: str, variant: str) -> None:
    given = calibration(kind, get_variant(variant))
    before = distance(given)
    (report,) = run(given, (Fit(),))
    assert (report.kl_before, report.error_before) == (before.kl, before.error)
    assert report.kl_after is not None
    assert before.kl is not None
    assert report.kl_after < 0.7 * before.kl
    assert all(note.startswith(NO_CLOSER) for note in report.notes)


@pytest.mark.parametrize(
    ("images", "enough", "small", "expected"),
    [
        (80, 10**9, 36, fit.MOST_TIMES),
        (80, 10**9, 35, 1),
        (80, 80 * 36 * 2, 36, 2),
        (80, 80 * 36 * 2 - 1, 36, 1),
        (80, 36, 36, 1),
    ],
)
def test_small_pictures_of_few_tokens_are_fitted_to_several_times(
    images: int, enough: int, small: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", enough)
    monkeypatch.setattr(fit, "SMALL_TOKENS", small)
    given = calibration("pre-norm", get_variant("l1"))
    given = replace(given, images=Pool(pictures(images), None, (3, 12, 12), 16))
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(descent, "search", lambda _, samples, *counts: seen.append(counts))
    Fit().run(given)
    Fit(times=1).run(given)
    assert seen == [*2 * [(images, (expected - 1) * (images - images // 5))], *2 * [(images, 0)]]


@pytest.mark.parametrize("kind", ["post-norm", "windows"])
def test_pictures_that_come_again_bring_the_fit_closer_on_others(kind: str) -> None:
    errors = []
    for times in (1, fit.MOST_TIMES):
        given = calibration(kind, get_variant("elu"), pictures(400))
        Fit(times=times).run(given)
        errors.append(error_on_others(given))
    assert errors[1] < 0.97 * errors[0]


def test_what_is_no_picture_is_fitted_to_once() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    inputs = Images(ModelInputs((torch.zeros(400, 3, 12, 12),)))
    given = replace(given, images=replace(given.images, images=inputs))
    assert Fit()._times(given, fit_points(given.student)) == 1


@pytest.mark.parametrize("size", [1, 4, 64])
def test_forms_are_refined_with_the_first_tokens_whatever_the_batches(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = calibration("windows", get_variant("l1"))
    name = fit_points(given.student)[0].node.name

    def heads(batch_size: int) -> list[Tensor]:
        images = replace(given.images, batch_size=batch_size, parts=())
        return [each.query for each in teacher_heads(Segments(given.teacher, images, given.processes), name)]

    whole = torch.cat(heads(8))
    monkeypatch.setattr(fit, "REFINED_TOKENS", 10 * whole.shape[2] + 3)
    torch.testing.assert_close(torch.cat(heads(size)), whole[:10], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("given", "expected"), [(None, None), (1, 1), (4, 2)])
def test_a_bias_goes_with_its_rows_or_is_shared(given: int | None, expected: int | None) -> None:
    part = torch.arange(24.0).reshape(4, 1, 2, 3)
    heads = Heads(part, part + 1, part + 2, None if given is None else part[:given] + 3).rows(2)
    for number, own in enumerate(heads[:3]):
        assert torch.equal(own, part[:2] + number)
    assert heads.bias is None if expected is None else torch.equal(heads.bias, part[:expected] + 3)


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (calibration("pre-norm", get_variant("polynomial")) for _ in range(2))
    for given in (first, second):
        Fit().run(given)
    pairs = zip(first.student.state_dict().items(), second.student.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


class Spoiled(Form):
    """Softmax whose `refine` puts `gain` in place of 1."""

    def __init__(self, form: Form, gain: float) -> None:
        super().__init__()
        self.form, self.becomes = form, gain
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.form(query, key, value, bias) * self.gain

    def refine(self, activations: Callable[[], object]) -> None:
        with torch.no_grad():
            self.gain.fill_(self.becomes)


def spoil(given: StageInput, gain: float) -> None:
    for site in rewritten_sites(given.student).values():
        site.form = Spoiled(site.form, gain)


def test_a_fit_that_makes_the_output_worse_is_taken_back() -> None:
    given = calibration("pre-norm", get_variant("softmax"))
    spoil(given, 0.0)
    before = {name: tensor.clone() for name, tensor in given.student.state_dict().items()}
    (note,) = Fit().run(given).notes
    assert note.startswith("taken back")
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.student.state_dict().items())
    assert distance(given).loss == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bad", [1.0, float("nan")])
@pytest.mark.parametrize("good", range(4))
def test_as_many_fits_stay_as_make_the_output_no_worse(good: int, bad: float) -> None:
    given = calibration("pre-norm", get_variant("softmax"))
    points = fit_points(given.student)
    undo = [point.undo() for point in points]
    for number, point in enumerate(points):  # the first ones change nothing, each later one makes it worse
        if number >= good:
            assert point.branch is not None
            point.branch.change(torch.full((point.branch.weight.shape[1] + 1, point.branch.weight.shape[0]), bad))
    kept, after = _back_off(given, points, undo, Distance(1e-9, 1e-9, 100.0))
    assert kept == good
    assert distance(given).loss == pytest.approx(0, abs=1e-9)
    assert after.loss <= 1e-9


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("stage", [Copy(), Fit(), Reconstruction(2), Distillation(2)], ids=lambda stage: stage.name)
def test_what_a_stage_says_of_the_student_is_measured(stage: Stage, spoiled: bool) -> None:
    """Also where it takes back what it did."""
    given = calibration("pre-norm", get_variant("softmax" if spoiled else "l1"))
    if spoiled:
        spoil(given, 0.0)
    assert stage.run(given).after == distance(given)


def test_a_fit_that_is_not_finite_names_its_site() -> None:
    given = calibration("pre-norm", get_variant("softmax"))
    spoil(given, float("nan"))
    with pytest.raises(CheckFailedError, match=r"site0.*--keep site0"):
        Fit().run(given)


def test_points_that_overlap_are_fitted_in_order() -> None:
    """In parallel blocks the attention's sum comes after the MLP's map: both are still points of their own."""
    points = fit_points(calibration("parallel", get_variant("softmax")).student)
    assert [point.site is not None for point in points] == [True, False, True, False]


class TwoHeads(Model):
    """What two linear heads say of a token each is added up, as a distilled DeiT's is; both are maps that end a branch
    there, and neither has its stream before the other.
    """

    def __init__(self) -> None:
        super().__init__("pre-norm")
        self.other = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.blocks(self.embed(x).flatten(2).transpose(1, 2))
        return (self.head(tokens[:, 0]) + self.other(tokens[:, 1])) / 2


@pytest.mark.parametrize("stage", [Fit(), Reconstruction(steps=150)])
def test_two_heads_that_are_added_up_are_fitted_one_after_the_other(stage: Stage) -> None:
    given = calibration("two heads", get_variant("l1"), model=TwoHeads().eval())
    points = fit_points(given.student)
    assert [point.site is not None for point in points] == [True, False, True, False, False, False]
    assert points[-1].stream is points[-2].stream
    before = distance(given).loss
    stage.run(given)
    assert distance(given).loss < before


class Bare(nn.Module):
    """Attention without residual connections or MLPs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(x).flatten(2).transpose(1, 2))).mean(1))


def test_what_cannot_be_fitted_is_told() -> None:
    given = calibration("bare", get_variant("l1"), model=Bare())
    notes = Fit().run(given).notes
    assert notes == (
        "fitted to the teacher's own output, as no residual connection follows: site0, site1",
        "no linear map that ends a residual branch follows, so that none is fitted: site0, site1",
    )


def test_calibrate_reports_each_stage_and_measures_on_images_it_did_not_fit() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    fitted, held_out = (pool.images for pool in split(Pool(pictures(), None, (3, 12, 12), 16)))
    assert (len(fitted), len(held_out)) == (84, 12)
    values = np.concatenate([part.x.values.flatten(1).numpy() for part in (held_out, fitted)])  # type: ignore[attr-defined]
    assert len(np.unique(values, axis=0)) == 96
    told: list[tuple[str, int, int]] = []
    execution = Execution(progress=lambda *what: told.append(what))
    reports = calibrate(replace(given, execution=execution))
    assert [report.name for report in reports] == [Copy().name, Fit().name]
    assert reports[0].kl_before == reports[0].kl_after == reports[1].kl_before
    assert reports[1].peak_memory > 0
    assert told[0] == ("fit", 0, 4)
    assert told[-1] == ("fit", 4, 4)


def test_one_image_is_enough() -> None:
    images = pictures(1)
    assert [len(part.images) for part in split(Pool(images, None, (3, 12, 12), 16))] == [1, 1]
    given = calibration("post-norm", get_variant("l1"), images=images)
    before = distance(given).loss
    Fit().run(given)
    assert distance(given).loss <= before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_not_computed_again_and_gives_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attend = [0], SiteModule.attend

    def counted(site: SiteModule, *tensors: Tensor) -> Tensor:
        calls[-1] += 1
        return attend(site, *tensors)

    monkeypatch.setattr(SiteModule, "attend", counted)
    held = calibration(kind, get_variant("l1"))
    Fit().run(held)
    monkeypatch.setattr(Segments, "hold", lambda *_: None)
    calls.append(0)
    computed = calibration(kind, get_variant("l1"))
    Fit().run(computed)
    assert calls[0] < calls[1]
    ours = held.student.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in computed.student.state_dict().items())
