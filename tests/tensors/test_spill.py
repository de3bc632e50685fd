"""Spilling beside other processes: what they remove, leave or may read does not make it fail or leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.spec.errors import BadInput
from rota.tensors.segments import Spill


@pytest.fixture
def spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    monkeypatch.setenv("ROTA_SPILL_DIR", str(tmp_path / "disk"))
    links = tmp_path / "root" / "ns"
    links.mkdir(parents=True)
    made = Spill.of(links)
    assert made is not None
    return made


def test_a_file_that_goes_while_the_sum_is_made_counts_as_nothing(spill: Spill) -> None:
    (spill.folder / "root+ns+seg-gone").symlink_to(spill.folder / "nowhere")  # listed, and not there when asked
    spill.make("seg-1", 4096)
    assert (spill.links / "seg-1").stat().st_size == 4096


def test_what_lies_under_the_name_of_a_new_segment_is_not_written_through(spill: Spill, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"untouched")
    (spill.folder / "root+ns+seg-1").symlink_to(other)
    spill.make("seg-1", 4096)
    assert other.read_bytes() == b"untouched" and (spill.links / "seg-1").stat().st_size == 4096


def test_a_folder_that_others_may_look_into_is_refused(spill: Spill) -> None:
    spill.folder.chmod(0o755)
    with pytest.raises(BadInput, match="others may read") as caught:
        Spill.of(spill.links)
    assert caught.value.hint == f"chmod 700 {spill.folder}"
