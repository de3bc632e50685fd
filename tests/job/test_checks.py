"""The check of a node before an instance starts: folders, space, devices; on real folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.job.checks import NodeUnfit, quick
from rota.runtime.devices import fake_devices
from rota.spec.reasons import Reason


def test_a_fit_node_has_nothing_wrong_and_no_file_is_left(tmp_path: Path) -> None:
    assert quick([tmp_path, tmp_path / "new"], ()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_takes_no_writes_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (found,) = quick([tmp_path / "file" / "below"], ())
    assert (found.check, found.reason) == ("disk", Reason.OUTPUT_FULL)
    assert f"{tmp_path / 'file' / 'below'} takes no writes" in found.text


def test_too_little_space_is_told_in_mebibytes(tmp_path: Path) -> None:
    (found,) = quick([tmp_path], (), free_min_bytes=1 << 62)
    assert found.reason is Reason.OUTPUT_FULL and "MiB left" in found.text


def test_a_device_that_is_not_there_is_a_lost_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rota.job.checks.local_devices", lambda: fake_devices("1xH100"))
    (found,) = quick([tmp_path], (0, 1))
    assert (found.check, found.reason) == ("devices", Reason.GPU_LOST)
    assert NodeUnfit([found]).reason is Reason.GPU_LOST
