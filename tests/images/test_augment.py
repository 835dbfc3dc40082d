"""Images that come again, moved, and parts of them over others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from attnrewrite.images.augment import Varied, moved, pasted, repeated
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.images.preprocessing import Preprocessing

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 16, 24, 3), np.uint8)
PLAIN = Preprocessing((0.0,) * 3, (1.0,) * 3)
SIZE = (3, 16, 24)
PARTS = ((3, 3), (1, 1))
ORDER = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 3])


def read(images: Images) -> torch.Tensor:
    return images.x.read(PLAIN, SIZE)


KINDS = {"uint8": load_images(PIXELS), "float32": load_images(torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_comes_again_changed_each_time_and_another_once(kind: str) -> None:
    images = KINDS[kind]
    plain, found = read(images), read(repeated(images, PARTS))
    as_they_are = [0, 1, 2, 9]
    torch.testing.assert_close(found[as_they_are], plain, rtol=0, atol=0)
    assert len(found.flatten(1).unique(dim=0)) == len(ORDER)
    values = [set(image.flatten().tolist()) for image in plain]
    for place in range(3, 9):  # nothing but the image's own values and those of others that come again
        assert set(found[place].flatten().tolist()) <= values[0] | values[1] | values[2]
        assert len(set(found[place].flatten().tolist()) & values[ORDER[place]]) > 10


def test_a_copy_is_the_image_moved_with_a_part_of_another_at_its_place() -> None:
    images = load_images((torch.arange(2.0)[:, None, None, None] + 1).expand(2, 3, 40, 40))
    found = read(repeated(images, [(2, 50)]))[2:]
    shares = [float((image != own).float().mean()) for image, own in zip(found, [1.0, 2.0] * 49, strict=True)]
    assert set(found.flatten().tolist()) == {1.0, 2.0}
    assert 0.15 < sum(shares) / len(shares) < 0.35  # half of half: one in two has a part of itself
    assert 0.2 < np.mean([share > 0 for share in shares]) < 0.8


def test_it_is_changed_alike_whatever_it_is_read_with() -> None:
    images = repeated(KINDS["uint8"], PARTS)
    whole = read(images)
    for indices in ([5], [4, 2], [0, 5, 1], [9, 8]):
        torch.testing.assert_close(read(images.take(np.array(indices))), whole[indices], rtol=0, atol=0)
    decoded = images.take(np.array([4, 8, 9])).decoded(PLAIN, SIZE)
    torch.testing.assert_close(read(decoded), whole[[4, 8, 9]], rtol=0, atol=0)


def test_labels_size_and_digest_follow_and_reading_changes_nothing() -> None:
    images = Images(KINDS["float32"].x, np.array([7, 8, 9, 6]))
    before = read(images).clone()
    again = repeated(images, PARTS)
    read(again)
    assert again.y is not None
    assert again.y.tolist() == [7, 8, 9, 7, 8, 9, 7, 8, 9, 6]
    assert (len(again), again.x.size) == (len(ORDER), SIZE)
    again.check(PLAIN, SIZE)
    torch.testing.assert_close(read(images), before, rtol=0, atol=0)
    assert len({again.digest(), images.take(ORDER).digest(), repeated(images, [(4, 2)]).digest()}) == 3


def test_what_is_damaged_is_left_out_with_all_that_a_part_of_it_is_over(tmp_path: Path) -> None:
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    again = repeated(load_images(tmp_path, skip_bad=True), PARTS)
    left, numbers = again.x.decoded(PLAIN, SIZE)
    assert isinstance(again.x, Varied)
    expected = [place for place in range(len(ORDER)) if 1 not in (again.x.chosen[place], again.x.others[place])]
    assert numbers.tolist() == expected
    torch.testing.assert_close(left.read(PLAIN, SIZE), read(repeated(KINDS["uint8"], PARTS))[numbers])


def test_each_has_a_rectangle_of_another_at_the_same_place() -> None:
    count, height, width = 400, 9, 14
    images = torch.arange(count * 2 * height * width).reshape(count, 2, height, width).float()
    found = pasted(images, torch.Generator().manual_seed(3))
    shares = []
    for plain, changed in zip(images, found, strict=True):
        other = (changed != plain).all(0)
        torch.testing.assert_close(other, (changed != plain).any(0))
        rows, columns = other.any(1), other.any(0)
        torch.testing.assert_close(other, rows[:, None] & columns)  # a rectangle, without gaps
        assert all(int(side.diff().abs().sum()) <= 2 for side in (rows.int(), columns.int()))
        if other.any():
            (distance,) = (changed - plain)[:, other].unique().tolist()  # all of it from one image, from where it lies
            assert distance % (2 * height * width) == 0
            shares.append(float(other.float().mean()))
    assert len(shares) > 0.9 * count  # the others' are too small for a pixel
    assert np.quantile(shares, (0.25, 0.75)) == pytest.approx((0.25, 0.75), abs=0.15)
    torch.testing.assert_close(found, pasted(images, torch.Generator().manual_seed(3)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("change", [moved, pasted])
def test_channels_may_come_last_whatever_the_type(change: Callable[..., Tensor], dtype: torch.dtype) -> None:
    first = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).to(dtype)
    expected, found = (change(each, torch.Generator().manual_seed(4)) for each in (first, first.permute(0, 2, 3, 1)))
    assert not torch.equal(expected, first)
    torch.testing.assert_close(found.permute(0, 3, 1, 2), expected, rtol=0, atol=0)


def test_copies_for_a_model_of_channels_last_are_those_of_any_other() -> None:
    again = repeated(KINDS["uint8"], PARTS).x
    last = again.read(replace(PLAIN, channels_last=True), SIZE)
    torch.testing.assert_close(last.permute(0, 3, 1, 2), again.read(PLAIN, SIZE), rtol=0, atol=0)
