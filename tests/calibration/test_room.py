"""Calibration within a budget of memory: fewer images at once, temporary files, and the same result."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fits import calibration

from attnrewrite.calibration import room, store
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.importance import Blocks
from attnrewrite.calibration.points import fit_points
from attnrewrite.calibration.room import peak_memory_of, sized
from attnrewrite.calibration.stage import StageInput, distance
from attnrewrite.calibration.stages import run
from attnrewrite.calibration.workplace import Demand, Workplace, _held_bytes, _widest
from attnrewrite.errors import InputError
from attnrewrite.request import Execution
from attnrewrite.variants.registry import get_variant

MIB = 1 << 20


def test_the_peak_counts_what_is_held_at_once_and_nothing_that_was_there_before() -> None:
    weight = torch.zeros(MIB // 4)

    def call() -> None:
        first = weight + 1  # 1 MiB
        second = torch.cat([first, first])  # 2 MiB beside it
        del first
        second.view(2, -1).add_(weight)  # in place
        second.sum()

    assert peak_memory_of(call) == pytest.approx(3 * MIB, rel=1e-3)


def test_the_peak_counts_what_a_backward_pass_keeps() -> None:
    x = torch.zeros(MIB // 4, requires_grad=True)
    kept = peak_memory_of(lambda: torch.autograd.grad(x.exp().exp().exp().sum(), x))
    with torch.no_grad():
        passing = peak_memory_of(lambda: x.exp().exp().exp().sum())
    assert (kept >= 4 * MIB, passing < 2.1 * MIB) == (True, True)


def within(monkeypatch: pytest.MonkeyPatch, left: int, streams: int | None = None) -> None:
    """A machine with so much memory left, and so much of it for the images' streams, whatever this one has."""
    monkeypatch.setattr(room, "room", lambda execution, device="cpu": left)
    monkeypatch.setattr("attnrewrite.calibration.workplace.room", lambda execution, device="cpu": streams or left)


def for_few_images(given: StageInput) -> int:
    """The bytes that three images' gradients take, and what the solver or a search holds beside them."""
    points, images = fit_points(given.student), given.images.images
    ends = list(branches(given.teacher))
    blocks = Blocks(given.teacher, [branch.node.name for branch in ends], given.answer)
    first = given.images.draw(torch.zeros(1, dtype=torch.int64))
    one = int(1.5 * peak_memory_of(lambda: blocks.gradients(first, 0)))
    return 3 * one + _held_bytes(points, len(images) * _widest(given.student, points), len(images))


def test_batches_follow_from_what_one_image_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = replace(calibration("pre-norm", get_variant("l1")).images, batch_size=64)

    def call(image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(MIB // 4)

    sizes = {}
    for left in (2, 6, 40, 4000):
        within(monkeypatch, left * MIB)
        sizes[left] = sized(pool, "a test", call, Execution()).batch_size
    assert sizes == {2: 1, 6: 4, 40: 16, 4000: 64}, "powers of two, MIB each and what is taken beside it"
    assert sized(replace(pool, filled=True), "a test", call, Execution()).batch_size == 64
    within(monkeypatch, MIB)
    with pytest.raises(InputError, match=r"a test: one image takes .* more than .*: give a larger --memory"):
        sized(pool, "a test", call, Execution())


def test_a_budget_is_what_this_process_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "held_memory", lambda: 300 * MIB)
    monkeypatch.setattr(room, "free_memory", lambda: 1000 * MIB)
    budgets = {"500MiB": 200, "5GiB": 1000, "200MiB": -100}
    assert {text: room.room(Execution(memory=text)) // MIB for text in budgets} == budgets
    assert room.room(Execution()) == 500 * MIB
    room.require_room(Execution(memory="301MiB"))
    with pytest.raises(InputError, match=r"--memory 200.0 MiB is 100.0 MiB less than the model and the libraries take"):
        room.require_room(Execution(memory="200MiB"))


@pytest.mark.parametrize("variant", ["l1", "additive"])
def test_the_result_is_the_same_whatever_the_budget(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, bool, dict[str, torch.Tensor], float]] = []
    for left in (1 << 40, 0):
        given = calibration("windows", get_variant(variant))
        within(monkeypatch, left or for_few_images(given), left or 1)
        work = Workplace.of("fit", given, fit_points(given.student))
        (report,) = run(given, (Fit(times=1),))
        assert (report.spilled > 0) == work.on_disk
        found.append((work.images.batch_size, work.on_disk, given.student.state_dict(), distance(given).error))
    (most, memory, tensors, error), (few, disk, others, other) = found
    assert (most, memory, few in (2, 4), disk) == (16, False, True, True)
    assert other == pytest.approx(error, rel=1e-4)
    for name, tensor in tensors.items():
        if (variant, name) != ("l1", "attention_site1.key.bias"):  # no result depends on it: rounding alone moves it
            torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_network_goes_forwards_once_where_there_is_room_and_by_blocks_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = calibration("pre-norm", get_variant("l1"))
    found = []
    for left, streams in ((1 << 40, None), (for_few_images(given), 1)):
        within(monkeypatch, left, streams)
        found.append(Workplace.of("fit", given, fit_points(given.student)).pieces)
    within(monkeypatch, 1 << 40)
    ends = [next(branches(given.teacher)).node.name]
    trained = Workplace.of("fit", given, fit_points(given.student), Demand(ends=ends))
    assert (*found, trained.pieces) == (1, None, None)


def test_products_on_a_gpu_are_fast_while_a_fit_is_at_work_and_as_they_were_behind_it() -> None:
    given = calibration("pre-norm", get_variant("l1"))
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    with Workplace.of("fit", given, fit_points(given.student)).opened():
        meanwhile = products.fp32_precision
    assert before != meanwhile == "tf32"
    assert products.fp32_precision == before


def test_what_goes_to_disk_is_announced_and_there_must_be_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    given = calibration("pre-norm", get_variant("l1"))
    within(monkeypatch, 1 << 40, streams=1)
    Fit().run(given)
    assert "fit: the images' activations are kept in temporary files, up to" in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(store, "free_disk", lambda folder: 1000)
    with pytest.raises(InputError, match=r"take .* in temporary files, and .* has 1000 B left: give fewer images"):
        Fit().run(given)


@pytest.mark.parametrize("kind", ["pre-norm", "windows"])
def test_two_streams_wait_and_no_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = calibration(kind, get_variant("l1"))
    stream = len(given.images.images) * _widest(given.student, fit_points(given.student))
    waiting: dict[tuple[int, int], int] = {}
    most = 0

    class Counted(store.InMemory):
        def put(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
            nonlocal most
            super().put(index, tensors)
            if all("/" in name for name in tensors):  # a stream's; what tokens count goes by branches' names
                waiting[id(self), index] = sum(tensor.nbytes for tensor in tensors.values())
                most = max(most, sum(waiting.values()))

    monkeypatch.setattr("attnrewrite.calibration.workplace.InMemory", Counted)
    Fit(times=1).run(given)
    assert stream < most <= 2 * stream


def test_what_waits_has_pages_of_its_own() -> None:
    held, tensor = store.InMemory(), torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)
    scalar = torch.tensor(True)
    held.put(0, {"moved": tensor, "scalar": scalar, "none": tensor[:0]})
    found = held.get(0, "cpu")
    for name, own in {"moved": tensor, "scalar": scalar, "none": tensor[:0]}.items():
        assert torch.equal(found[name], own)
        assert found[name].is_contiguous()
    tensor += 1
    assert not torch.equal(found["moved"], tensor)
