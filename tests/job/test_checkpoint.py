"""Checkpoints: when they are due, what a file gives back, which folders stay."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.makers import at

from rota.job import checkpoint
from rota.job.checkpoint import CheckpointTimer, file_of, find, prune, read, write
from rota.job.place import folder_of
from rota.runtime.directory import FixedDirectory
from rota.spec.errors import BadInput
from rota.spec.ids import Epoch
from rota.spec.job import Checkpoint


def cadence(every: str) -> CheckpointTimer:
    return CheckpointTimer.of(Checkpoint(every=every), 0.0)


def test_every_n_commits_counts_commits_and_not_time() -> None:
    due = cadence("3 commits")
    assert [n for n in range(1, 10) if due.due(n, 1e9)] == [3, 6, 9]


@pytest.mark.parametrize(("every", "seconds"), [("5m", 300.0), ("90", 90.0), ("1h30m", 5400.0)])
def test_a_duration_counts_from_the_last_one_saved(every: str, seconds: float) -> None:
    due = cadence(every)
    assert not due.due(1, seconds - 1) and due.due(1, seconds)
    due.saved(seconds, 2.0)
    assert not due.due(2, 2 * seconds - 1) and due.due(2, 2 * seconds)


def test_auto_follows_the_cost_within_its_bounds() -> None:
    due = cadence("auto")
    assert due.period_s == 60
    due.saved(0.0, 1.0)
    assert due.period_s == pytest.approx((2 * 1.0 * 4 * 3600) ** 0.5)
    due.saved(0.0, 1e6)
    assert due.period_s == 3600


def test_a_hurried_one_is_written_without_a_cadence_too_and_takes_half_of_the_time_at_most() -> None:
    due = CheckpointTimer.of(None, 0.0)
    assert not due.due(1, 1e9)
    due.hurry()
    assert due.due(2, 5.0)
    due.saved(10.0, 5.0)
    assert not due.due(3, 1e9)
    due.hurry()
    assert not due.due(4, 14.0) and due.due(5, 15.0)


def test_another_form_is_refused() -> None:
    with pytest.raises(BadInput, match="'often' is none of"):
        cadence("often")


def test_a_numpy_state_comes_back_without_torch(tmp_path: Path) -> None:
    state = {"x": np.arange(3.0), "n": 7, "deep": [("a", np.eye(2))]}
    write(tmp_path, at("a/0"), state)
    back = read(file_of(tmp_path, at("a/0")))
    assert back["n"] == 7 and np.array_equal(back["x"], state["x"]) and np.array_equal(back["deep"][0][1], np.eye(2))


def test_a_torch_state_of_mixed_types_comes_back_equal(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"w": torch.ones(2, dtype=torch.bfloat16), "i": torch.arange(3), "a": np.arange(2)}
    write(tmp_path, at("a/1"), state)
    back = read(file_of(tmp_path, at("a/1")))
    assert torch.equal(back["w"], state["w"]) and torch.equal(back["i"], state["i"])
    assert isinstance(back["a"], np.ndarray)


def test_two_who_write_the_same_file_at_once_both_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a new master asks again for a checkpoint whose writer still writes for the one before."""
    sync, errors = os.fsync, list[BaseException]()

    def again(file: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        other = threading.Thread(target=lambda: write(tmp_path, at("a/0"), {"x": np.ones(9)}))
        other.start()
        other.join(60)
        assert read(file_of(tmp_path, at("a/0")))["x"].tolist() == [1.0] * 9
        sync(file)

    monkeypatch.setattr(os, "fsync", again)
    monkeypatch.setattr(threading, "excepthook", lambda raised: errors.append(raised.exc_value))
    write(tmp_path, at("a/0"), {"x": np.ones(9)})
    assert not errors and [path.name for path in tmp_path.iterdir()] == ["a-0.state"]
    assert read(file_of(tmp_path, at("a/0")))["x"].tolist() == [1.0] * 9


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, at("a/0"), {"x": np.ones(9)})
    assert not list(tmp_path.iterdir())


def test_the_newest_epoch_of_a_commit_is_found(tmp_path: Path) -> None:
    for epoch in (2, 10):
        write(folder_of(tmp_path, 4, Epoch(epoch)), at("a/0"), {"epoch": epoch})
    folder_of(tmp_path, 4, Epoch(11)).mkdir()
    found = find(tmp_path, at("a/0"), 4)
    assert found is not None and read(found) == {"epoch": 10}
    assert find(tmp_path, at("a/0"), 5) is None
    assert find(tmp_path / "nowhere", at("a/0"), 4) is None


def test_only_the_newest_are_kept_and_what_a_rollback_took_back_goes(tmp_path: Path) -> None:
    for n, epoch in ((1, 1), (2, 1), (3, 1), (3, 2), (9, 1)):
        write(folder_of(tmp_path, n, Epoch(epoch)), at("a/0"), {})
    prune(tmp_path, keep=2, newest=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2.e1", "step-3.e2"]


def test_the_first_copy_waits_until_another_machine_of_the_job_has_a_tensor_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes seconds to start, and a job is at its first commit sooner."""
    looks = list[bool]()
    known = FixedDirectory(host="m0", address="", secret=b"", known={"m0": "m0:1"})

    def stores(*, fresh: bool = False) -> dict[str, str]:
        looks.append(fresh)
        return {**known.known, **({"m1": "m1:1"} if len(looks) == 3 else {})}

    monkeypatch.setattr(checkpoint, "blocking_sleep", lambda _: None)
    monkeypatch.setattr(FixedDirectory, "stores", lambda _, *, fresh=False: stores(fresh=fresh))
    assert checkpoint._others(known, ["m0", "m1"]) == {"m1"} and looks == [True] * 3
    assert checkpoint._others(known, ["m0"]) == set(), "nobody is waited for where the job is on one machine"
    monkeypatch.setattr(checkpoint, "SERVER_START_S", 0.0)
    assert checkpoint._others(known, ["m0", "m1"]) == set()
