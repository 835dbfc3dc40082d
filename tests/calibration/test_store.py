"""Temporary files of activations: where they are, and what becomes of them."""

import tempfile
from pathlib import Path

import pytest
import torch

from attnrewrite.calibration.store import IN_USE, PREFIX, OnDisk, require_disk


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / f"{PREFIX}left", tmp_path / f"{PREFIX}of-the-user"
    for folder in (left, other):
        folder.mkdir()
        (folder / "0.safetensors").write_bytes(b"0" * 100)
    (left / IN_USE).touch()  # whose lock went with the process
    used = OnDisk()
    used.put(0, {"x": torch.arange(3.0)})
    require_disk("fit", 1)
    assert f"{left}, which a run that was killed had left, is removed" in caplog.text
    assert not left.exists()
    assert other.exists()
    assert used.get(0, "cpu")["x"].tolist() == [0, 1, 2]
    used.close()
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
