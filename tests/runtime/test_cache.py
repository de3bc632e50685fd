"""Caches of a machine: what is in use stays; what nobody used goes by its age or, for room, the oldest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rota.runtime import cache

OLD_S, NOW_S = 1000.0, 5000.0


def things(folder: Path, *names: str) -> list[Path]:
    """Locks of things that were used one after the other, long ago."""
    locks = [folder / f"{name}.lock" for name in names]
    for at, lock in enumerate(locks):
        lock.touch()
        os.utime(lock, (OLD_S + at, OLD_S + at))
    return locks


def test_what_nobody_used_for_long_goes_and_what_is_in_use_or_young_stays(tmp_path: Path) -> None:
    old, held, young = things(tmp_path, "old", "held", "young")
    use = cache.hold(held)
    os.utime(held, (OLD_S, OLD_S))  # a process that has used it since then
    os.utime(young, (NOW_S, NOW_S))
    gone = list[Path]()
    cache.remove_unused([tmp_path / "none.lock", old, held, young], NOW_S - 1.0, gone.append)
    assert gone == [old] and not (tmp_path / "none.lock").exists()
    os.close(use)
    cache.remove_unused([held, young], NOW_S - 1.0, gone.append)
    assert gone == [old, held]
    os.close(cache.hold(held))
    assert held.stat().st_mtime > NOW_S, "it counts as used now"


def test_a_thing_with_two_locks_is_unused_only_when_both_are_free(tmp_path: Path) -> None:
    making, use = things(tmp_path, "making", "use")
    held = cache.hold(use)
    with cache.unused(making, use) as free:
        assert not free
    os.close(held)
    with cache.unused(making, use) as free:
        assert free
        with cache.unused(use) as again:
            assert not again, "nobody else can take it meanwhile"


def test_the_oldest_go_until_the_rest_fits_and_one_that_stays_counts(tmp_path: Path) -> None:
    kept, *_, newest = things(tmp_path, "kept", "a", "b", "c")
    for path in tmp_path.iterdir():
        at_s = path.stat().st_mtime
        path.write_bytes(b"x" * 100)
        os.utime(path, (at_s, at_s))
    left = cache.remove_oldest(cache.files(tmp_path), 250, lambda path: path != kept and cache.removed(path))
    assert left == 200 and set(tmp_path.iterdir()) == {kept, newest}
    assert cache.remove_oldest(cache.files(tmp_path), 50, lambda path: False) == 200


def test_a_folder_that_is_removed_is_never_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)

    def killed(path: Path, **_: object) -> None:
        (path / "bin").rmdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cache.shutil, "rmtree", killed)
        cache.remove_folder(folder)
    assert not folder.exists() and list(tmp_path.iterdir())
    cache.remove_folder(folder)
    assert not list(tmp_path.iterdir()), "what was left goes with the next"


def test_a_hold_that_fails_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("disk full")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(cache.os, "utime", full)
    with pytest.raises(OSError, match="disk full"):
        cache.hold(tmp_path / "x.lock")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
