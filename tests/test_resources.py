"""Sizes as people write them, and what the machine says that it has left."""

import platform
from pathlib import Path

import pytest

from attnrewrite import resources
from attnrewrite.errors import InputError
from attnrewrite.resources import format_bytes, free_disk, free_memory, give_back, held_memory, parse_bytes

WRITTEN = {
    "4GiB": 4 << 30, "4 gib": 4 << 30, "4Gi": 4 << 30, "1.5GiB": 3 << 29, "4GB": 4 * 10**9, "4g": 4 * 10**9,
    "500 MB": 500 * 10**6, "64KiB": 1 << 16, "1TiB": 1 << 40, "1000": 1000, "10 B": 10,
}  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN)
def test_a_size_is_read_as_it_is_written(text: str) -> None:
    assert parse_bytes(text) == WRITTEN[text]


@pytest.mark.parametrize("text", ["", "0", "-1", "4 GiBi", "GiB", "4,5GiB", "1e9", "half"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no size of memory: write it as 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (2048, "2 KiB"), (5 << 20, "5.0 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes_are_told_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_what_is_held_grows_with_what_is_taken() -> None:
    before = held_memory()
    taken = bytearray(64 << 20)
    assert held_memory() - before > len(taken) // 2
    assert free_memory() > 0
    assert free_disk(Path.cwd()) > 0


def test_a_control_group_limits_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    for name, text in (("memory.max", "3000000"), ("memory.current", "1000000")):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory() == 2000000
    # What was read of files is kept, and goes where memory is needed.
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 900000\ninactive_file 600000\nactive_file 300000\n")
    assert free_memory() == 2600000
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file\n")
    assert free_memory() == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 2600000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose malloc_trim gives memory back")
def test_what_nothing_lies_in_goes_back_to_the_system() -> None:
    *taken, last = (bytes([1]) * 100_000 for _ in range(1000))
    held = held_memory()
    del taken
    give_back()
    assert held - held_memory() > 50_000_000
    assert len(last) == 100_000
