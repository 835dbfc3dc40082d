"""Images from folders, .npz files and iterables; what cannot be used is refused before anything starts."""

import weakref
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from tiny_vits import INPUTS, encoder

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.images.dataset import Array, Files, load_images
from attnrewrite.images.decode import DamagedError, is_whole, read_picture
from attnrewrite.images.pool import Pool
from attnrewrite.images.preprocessing import Preprocessing, as_taken, channel_values, image_size, override, parse_size

PLAIN = Preprocessing((0.0,), (1.0,))
SIZE = (3, 6, 8)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(path: Path, *shape: int) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = pixels(*shape)
    Image.fromarray(values).save(path)
    return values


def test_an_npz_in_batches_normalised_with_its_labels(tmp_path: Path) -> None:
    x, y = pixels(5, 6, 8, 3), np.array([4, 3, 2, 1, 0], dtype=np.uint16)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    images = load_images(tmp_path / "d.npz")
    pool = Pool(images, Preprocessing((0.5, 0.25, 0.0), (0.5,)), SIZE, 2)
    batches = [pool.batch(index)[0] for index in range(len(pool))]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    wanted = (torch.from_numpy(x).permute(0, 3, 1, 2) / 255 - torch.tensor([0.5, 0.25, 0]).view(3, 1, 1)) / 0.5
    torch.testing.assert_close(torch.cat(batches), wanted, rtol=0, atol=1e-6)
    assert images.y is not None
    assert images.y.tolist() == [4, 3, 2, 1, 0]


def test_a_model_that_takes_bytes_gets_the_pixels_channels_last(tmp_path: Path) -> None:
    x = pixels(3, 6, 8, 3)
    np.savez(tmp_path / "d.npz", x=x)
    taken = as_taken(None, torch.zeros(1, 6, 8, 3, dtype=torch.uint8))
    batch = load_images(tmp_path / "d.npz").x.read(taken, image_size((1, 6, 8, 3)))
    assert batch.dtype == torch.uint8
    assert np.array_equal(batch.numpy(), x)


def test_grey_images_have_one_channel_and_no_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=pixels(3, 6, 8))
    images = load_images(tmp_path / "d.npz")
    assert images.x.read(PLAIN, (1, 6, 8)).shape == (3, 1, 6, 8)
    assert images.y is None


def test_a_sample_is_the_same_for_a_seed_and_pairs_images_with_labels() -> None:
    images = load_images([(torch.full((1, 2, 2), float(i)), i) for i in range(20)])
    first = images.sample(7, 1)
    assert first.y is not None
    orders = [images.sample(7, seed).y.tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert len(set(first.y.tolist())) == 7
    assert first.x.read(None, (1, 2, 2))[:, 0, 0, 0].tolist() == first.y.tolist()
    assert len(images.sample(100, 0)) == 20


def test_a_folder_of_classes_in_order_of_name(tmp_path: Path) -> None:
    for name in ("dog/b.png", "dog/a.jpg", "cat/x.PNG", ".hidden/z.png"):
        picture(tmp_path / name, 6, 8, 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a picture")
    images = load_images(tmp_path)
    assert images.classes == ("cat", "dog", "empty")
    assert images.y is not None
    assert images.y.tolist() == [0, 1, 1]
    assert images.x.read(PLAIN, SIZE).shape == (3, *SIZE)


def test_hidden_files_are_no_pictures(tmp_path: Path) -> None:
    """macOS writes ._a.png beside a.png, notebooks keep folders of their own."""
    for name in ("cat/a.png", "cat/._a.png", "cat/.ipynb_checkpoints/a.png", "dog/more/b.png", ".c.png"):
        picture(tmp_path / name, 6, 8, 3)
    images = load_images(tmp_path)
    assert isinstance(images.x, Files)
    assert [str(path.relative_to(tmp_path)) for path in images.x.paths] == ["cat/a.png", "dog/more/b.png"]


def test_no_two_files_are_in_memory_to_be_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, 5)
    images, held, counts = load_images(tmp_path), [], []

    def read(path: Path) -> np.ndarray:
        content = np.fromfile(path, np.uint8)  # which can be seen to be let go of, as bytes cannot
        held.append(weakref.ref(content))
        counts.append(sum(each() is not None for each in held))
        return content

    monkeypatch.setattr(Path, "read_bytes", read)
    images.digest()
    assert len(counts) == 5
    assert max(counts) <= 2  # one is let go of when the next has been read


def test_a_flat_folder_is_read_as_it_is_where_it_has_the_size(tmp_path: Path) -> None:
    values = picture(tmp_path / "a.png", 6, 8, 3)
    images = load_images(str(tmp_path))
    batch = images.x.read(PLAIN, SIZE)
    assert images.y is None
    assert torch.equal((batch[0] * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(values))
    assert images.x.read(PLAIN, (1, 6, 8)).shape == (1, 1, 6, 8)


@pytest.mark.parametrize(("height", "width"), [(300, 400), (401, 300), (50, 50), (224, 300)])
@pytest.mark.parametrize("crop", [0.875, 0.9, 1.0])
def test_files_are_resized_as_timm_does_for_evaluation(tmp_path: Path, height: int, width: int, crop: float) -> None:
    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()
    data = pytest.importorskip("timm.data", reason="needs timm")
    picture(tmp_path / "a.png", height, width, 3)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    transform = data.create_transform((3, 224, 224), mean=mean, std=std, crop_pct=crop, interpolation="bicubic")
    wanted = transform(Image.open(tmp_path / "a.png"))
    batch = load_images(tmp_path).x.read(Preprocessing(mean, std, crop), (3, 224, 224))
    torch.testing.assert_close(batch[0], wanted, rtol=0, atol=1e-5)


def test_iterables_of_floats_are_inputs_and_of_bytes_are_pictures() -> None:
    floats = torch.randn(4, 3, 6, 8)
    batch = load_images([floats[:3], floats[3]]).x.read(None, SIZE)
    assert torch.equal(batch, floats)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(floats, torch.arange(4)), batch_size=3)
    loaded = load_images(loader)
    assert torch.equal(loaded.x.read(None, SIZE), floats)
    assert loaded.y is not None
    assert loaded.y.tolist() == [0, 1, 2, 3]
    bytes_ = torch.from_numpy(pixels(2, 3, 6, 8))
    batch = load_images(bytes_).x.read(PLAIN, SIZE)
    assert torch.equal(batch, bytes_ / 255)


@pytest.mark.parametrize("labels", [None, "label", "labels"])
def test_what_loaders_give_is_taken_as_they_give_it(labels: str | None) -> None:
    floats, numbers = torch.randn(4, 3, 6, 8), torch.arange(4)
    named = {"pixel_values": floats} | ({} if labels is None else {labels: numbers})
    rows = [{name: values[i] for name, values in named.items()} for i in range(4)]
    alone = torch.utils.data.TensorDataset(*named.values())
    for given in (rows, alone, torch.utils.data.DataLoader(rows, batch_size=3), torch.utils.data.DataLoader(alone)):  # type: ignore[arg-type]
        loaded = load_images(given)
        assert torch.equal(loaded.x.read(None, SIZE), floats)
        assert (None if loaded.y is None else loaded.y.tolist()) == (labels and [0, 1, 2, 3])


def saved(**arrays: object) -> object:
    return lambda path: np.savez(path / "d.npz", **arrays)  # type: ignore[arg-type]


def cut_short(path: Path) -> None:
    np.savez(path / "d.npz", x=pixels(40, 6, 8, 3))
    whole = (path / "d.npz").read_bytes()
    (path / "d.npz").write_bytes(whole[: len(whole) // 2])


def half_a_head(path: Path) -> None:
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 6"
    with zipfile.ZipFile(path / "d.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)


BAD_NPZ = {
    "no x": (saved(images=pixels(2, 6, 8)), "has no array 'x' .it has images"),
    "floats": (saved(x=np.zeros((2, 6, 8))), "x is float64 .2, 6, 8. and must be uint8"),
    "one axis": (saved(x=pixels(5)), r"x is uint8 \[5\] and must be"),
    "empty": (saved(x=np.zeros((0, 6, 8), np.uint8)), "holds no images"),
    "labels too few": (saved(x=pixels(2, 6, 8), y=np.arange(3)), r"y is int64 \[3\] and must be 2 integers"),
    "labels not whole": (saved(x=pixels(2, 6, 8), y=np.zeros(2)), "y is float64"),
    "labels below zero": (saved(x=pixels(2, 6, 8), y=np.array([0, -1])), "y holds -1"),
    "pickled": (saved(x=np.array([object()])), "it holds pickled objects"),
    "truncated": (cut_short, "it is truncated"),
    "half a head": (half_a_head, "it is truncated"),
    "text": (lambda path: (path / "d.npz").write_text("hello"), "not an .npz"),
    "a web page": (lambda path: (path / "d.npz").write_text("<!doctype html>"), "d.npz is a web page, not a .npz"),
    "absent": (lambda path: None, "cannot read the .npz .*d.npz: No such file"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_a_bad_npz_is_refused(tmp_path: Path, case: str) -> None:
    make, message = BAD_NPZ[case]
    make(tmp_path)
    with pytest.raises(InputError, match=message):
        load_images(tmp_path / "d.npz")


def both_kinds(path: Path) -> None:
    picture(path / "a.png", 6, 8, 3)
    picture(path / "cat" / "b.png", 6, 8, 3)


BAD_FOLDERS = {
    "empty": (lambda path: None, "holds no images"),
    "both kinds": (both_kinds, "both images and folders of images"),
    "not a picture": (lambda path: (path / "a.png").write_text("<html>"), "a.png is not an image"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused(tmp_path: Path, case: str) -> None:
    make, message = BAD_FOLDERS[case]
    make(tmp_path)
    with pytest.raises(InputError, match=message):
        load_images(tmp_path)


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 60, 80, 3)
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.png is damaged"):
        load_images(tmp_path).x.read(PLAIN, SIZE)


def test_whatever_a_decoder_raises_is_told_in_one_line(tmp_path: Path) -> None:
    """A tag of another type, for which Pillow raises a TypeError."""
    path = tmp_path / "a.tif"
    Image.fromarray(pixels(6, 8, 3)).save(path)
    content = bytearray(path.read_bytes())
    content[72] = 12
    path.write_bytes(content)
    assert not is_whole(path)
    with pytest.raises(InputError, match=r"a\.tif is (damaged|not an image)"):
        load_images(tmp_path).x.read(PLAIN, SIZE)
    with pytest.raises(DamagedError, match=r"a\.tif is damaged"):
        read_picture(path, PLAIN, SIZE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is empty"),
        ([torch.zeros(3)], r"not a tensor \[3\]"),
        (["a"], "not a str"),
        ([{"a": torch.zeros(1, 2, 2), "b": torch.zeros(1, 2, 2)}], "not a dict"),
        ([(torch.zeros(1, 2, 2), 0, 1)], "not a tuple"),
        ([torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)], "several shapes"),
        ([torch.zeros(1, 2, 2, dtype=torch.int64)], "not torch.int64"),
        (3, "a int is no images"),
    ],
)
def test_a_bad_iterable_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_images(data)  # type: ignore[arg-type]


def test_a_mismatch_with_the_model_is_told_before_the_first_batch(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=pixels(2, 6, 8, 3))
    images = load_images(tmp_path / "d.npz")
    with pytest.raises(InputError, match="holds images of 3x6x8 and the model takes 3x8x8: resize them"):
        images.check(PLAIN, (3, 8, 8))
    with pytest.raises(InputError, match="give --mean and --std"):
        images.check(None, SIZE)
    with pytest.raises(InputError, match="mean has 2 numbers and the images 3 channels"):
        images.x.read(Preprocessing((0.0, 0.0), (1.0,)), SIZE)


def test_sizes_and_channel_values_as_users_write_them() -> None:
    assert parse_size("3x32x48") == (3, 32, 48)
    assert parse_size("224") == (3, 224, 224)
    assert parse_size([1, 28, 28]) == (1, 28, 28)
    assert channel_values("mean", "0.5,0.25,0") == (0.5, 0.25, 0.0)
    assert channel_values("mean", 0.5) == (0.5,)
    known = Preprocessing((0.5,), (0.5,), 0.9, "bilinear")
    assert override(known, "0.1,0.2,0.3", None) == Preprocessing((0.1, 0.2, 0.3), (0.5,), 0.9, "bilinear")
    assert override(None, None, None) is None
    assert override(None, 0, 1) == PLAIN


@pytest.mark.parametrize("size", ["", "3x", "axbxc", "32x32", "3x0x32", "3x32x32x1", "-3x2x2", (3, 4)])
def test_bad_sizes(size: object) -> None:
    with pytest.raises(InputError, match="is not CHANNELSxHEIGHTxWIDTH"):
        parse_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ("a", "1", "--mean 'a' is not a number"),
        ("0,,0", "1", "is not a number"),
        ("0", "0", "above zero"),
        ("nan", "1", "finite"),
        ("0.5", None, "--mean without --std"),
        (None, "0.5", "--std without --mean"),
    ],
)
def test_bad_channel_values(mean: str | None, std: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(None, mean, std)


def test_damaged_files_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        picture(tmp_path / name, 6, 8, 3)
    whole = (tmp_path / "a/2.png").read_bytes()
    (tmp_path / "a/2.png").write_bytes(whole[: len(whole) // 2])  # begins as a picture, and breaks off
    (tmp_path / "b/4.png").write_text("no picture")
    with pytest.raises(InputError, match=r"4\.png is not an image that can be read: mend it, remove it, or --skip-bad"):
        load_images(tmp_path)
    images = load_images(tmp_path, skip_bad=True).decoded(PLAIN, SIZE)
    assert [path.name for path in images.skipped] == ["2.png", "4.png"]
    assert images.y is not None
    assert images.y.tolist() == [0, 1]
    batch = images.x.read(PLAIN, SIZE)
    assert len(batch) == 2
    (tmp_path / "b/4.png").unlink()
    with pytest.raises(InputError, match=r"2\.png is damaged"):
        load_images(tmp_path).x.read(PLAIN, SIZE)
    for name in ("a/1.png", "b/3.png"):
        (tmp_path / name).write_text("no picture either")
    with pytest.raises(InputError, match="all 3 images are damaged"):
        load_images(tmp_path, skip_bad=True).whole(PLAIN, SIZE)


def test_some_images_are_taken_with_their_labels_and_in_memory_they_are_not_copied() -> None:
    values = pixels(6, 6, 8, 3)
    images = replace(load_images(values), y=np.arange(6))
    some = images.take(np.array([5, 1, 3])).take(np.array([2, 0]))
    assert some.y is not None
    assert some.y.tolist() == [3, 5]
    assert isinstance(some.x, Array)
    assert some.x.values is values
    assert len(some) == len(some.x) == 2
    batch = some.x.read(PLAIN, SIZE)
    assert torch.equal((batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1), torch.from_numpy(values[[3, 5]]))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures whose pixels are decoded from here on, in order."""
    names: list[str] = []
    load = ImageFile.ImageFile.load

    def counted(picture: ImageFile.ImageFile) -> object:
        if picture.tile:  # Pillow has nothing left to decode where there is none
            names.append(Path(str(picture.filename)).name)
        return load(picture)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return names


def folder_of(path: Path, count: int) -> list[str]:
    for index in range(count):
        Image.fromarray(pixels(40, 30, 3, seed=index)).save(path / f"{index}.jpg")
    return [f"{index}.jpg" for index in range(count)]


def test_decoded_pictures_are_read_as_the_files_are_and_from_no_file(tmp_path: Path, decoded: list[str]) -> None:
    names = folder_of(tmp_path, 5)
    files = load_images(tmp_path)
    kept = files.decoded(PLAIN, SIZE)
    assert decoded == names
    assert isinstance(kept.x, Array)
    assert (kept.x.values.dtype, kept.x.values.shape) == (np.uint8, (5, 6, 8, 3))
    for _ in range(3):
        read = kept.x.read(PLAIN, SIZE)
    assert decoded == names
    assert torch.equal(read, files.x.read(PLAIN, SIZE))


def test_what_would_take_too_much_memory_stays_in_its_files(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = folder_of(tmp_path, 5)
    monkeypatch.setattr("attnrewrite.images.dataset.DECODED_BYTES", 5 * 3 * 6 * 8 - 1)
    images = load_images(tmp_path).decoded(PLAIN, SIZE)
    assert isinstance(images.x, Files)
    assert decoded == names  # each is seen to be whole all the same
    monkeypatch.setattr("attnrewrite.images.dataset.DECODED_BYTES", 5 * 3 * 6 * 8)
    assert isinstance(images.decoded(PLAIN, SIZE).x, Array)


def test_decoding_names_all_damaged_pictures(tmp_path: Path) -> None:
    for name in folder_of(tmp_path, 4)[1:3]:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    with pytest.raises(InputError, match=r"2 of 4 images are damaged \(1\.jpg, 2\.jpg\): mend them"):
        load_images(tmp_path).decoded(PLAIN, SIZE)


def test_a_conversion_decodes_each_picture_once(tmp_path: Path, decoded: list[str]) -> None:
    """Through the check, the fit, the stages that distil and every measurement on held-out images."""
    names = folder_of(tmp_path, 12)
    done = ar.convert(encoder(), INPUTS, variant="l1", calibration=tmp_path, samples=10, steps=4, mean=0.5, std=0.25)
    assert done.report["calibration"]["images"] == 10
    assert len(decoded) == len(set(decoded)) == 10
    assert set(decoded) < set(names)


def test_a_pool_takes_some_of_its_images_in_batches_of_the_same_size() -> None:
    pool = Pool(load_images(torch.arange(5.0).reshape(5, 1, 1, 1)), None, (1, 1, 1), 2).take(np.array([4, 0, 2]))
    filled, parted = replace(pool, filled=True), replace(pool, parts=(1,))
    for each, wanted in ((pool, [[4, 0], [2]]), (filled, [[4, 0], [2, 4]]), (parted, [[4], [0, 2]])):
        found = [each.batch(index)[0].flatten().tolist() for index in range(len(each))]
        assert found == wanted
        assert each.joined(each.batch(index)[0] for index in range(len(each))).flatten().tolist() == [4, 0, 2]


def test_a_digest_is_of_the_pixels_labels_and_order(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    order = np.array([1, 0, 2, 3])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index, values in enumerate(pixels):
            Image.fromarray(values).save(tmp_path / name / f"{index}.png")
    kinds = (pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2).float(), tmp_path / "a")
    for data in kinds:
        images = load_images(data)
        assert images.digest() == load_images(data).digest() == images.take(np.arange(4)).digest()
        assert len({images.digest(), images.take(order).digest(), images.take(order[:3]).digest()}) == 3
        labelled = replace(images, y=np.arange(4))
        assert len({images.digest(), labelled.digest(), replace(images, y=order).digest()}) == 3
    assert load_images(tmp_path / "a").digest() == load_images(tmp_path / "b").digest()
    Image.fromarray(pixels[0] + 1).save(tmp_path / "b" / "3.png")
    assert load_images(tmp_path / "a").digest() != load_images(tmp_path / "b").digest()
