"""Images that come again, moved, and parts of them over others."""

import numpy as np
import pytest
import torch

from attnrewrite.images.augment import pasted, repeated
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.images.preprocessing import Preprocessing

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), np.uint8)
PLAIN = Preprocessing((0.0,) * 3, (1.0,) * 3)
SIZE = (3, 16, 24)
ORDER = np.array([2, 0, 2, 1, 2, 0])


def read(images: Images) -> torch.Tensor:
    return images.x.read(PLAIN, SIZE)


KINDS = {"uint8": load_images(PIXELS), "float32": load_images(torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_as_it_is_once_and_moved_otherwise_each_time(kind: str) -> None:
    images = KINDS[kind]
    plain, found = read(images), read(repeated(images, ORDER))
    first = [0, 1, 3]
    torch.testing.assert_close(found[first], plain[[2, 0, 1]], rtol=0, atol=0)
    assert len(found.flatten(1).unique(dim=0)) == len(ORDER)
    for place in (2, 4, 5):  # what is moved has the image's own values, those of its edge repeated
        assert set(found[place].flatten().tolist()) <= set(plain[ORDER[place]].flatten().tolist())


def test_it_is_moved_alike_whatever_it_is_read_with() -> None:
    images = repeated(KINDS["uint8"], ORDER)
    whole = read(images)
    for indices in ([5], [4, 2], [0, 5, 1]):
        torch.testing.assert_close(read(images.take(np.array(indices))), whole[indices], rtol=0, atol=0)
    decoded = images.decoded(PLAIN, SIZE)
    torch.testing.assert_close(read(decoded), whole, rtol=0, atol=0)


def test_labels_size_and_digest_follow_and_reading_changes_nothing() -> None:
    images = Images(KINDS["float32"].x, np.array([7, 8, 9]))
    before = read(images).clone()
    again = repeated(images, ORDER)
    read(again)
    assert again.y is not None
    assert again.y.tolist() == [9, 7, 9, 8, 9, 7]
    assert (len(again), again.x.size) == (len(ORDER), SIZE)
    again.check(PLAIN, SIZE)
    torch.testing.assert_close(read(images), before, rtol=0, atol=0)
    assert len({again.digest(), images.take(ORDER).digest(), repeated(images, ORDER[::-1]).digest()}) == 3


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
