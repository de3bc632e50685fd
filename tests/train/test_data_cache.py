"""The node's cache of data files: one download, whole files only, oldest out, no source needed for what it has."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from rota.spec.errors import BadInput, NotReachable, TimedOut
from rota.train.data import DataCache


def source(folder: Path, name: str, size: int) -> Path:
    path = folder / name
    path.write_bytes(os.urandom(size))
    return path


def test_a_new_version_is_fetched_and_the_old_one_had_is_given_without_the_source(tmp_path: Path) -> None:
    cache, path = DataCache(tmp_path / "cache"), source(tmp_path, "a", 1000)
    first = cache.fetch(str(path))
    assert first.read_bytes() == path.read_bytes() and cache.fetch(f"file://{path}").read_bytes() == path.read_bytes()
    source(tmp_path, "a", 1200)
    second = cache.fetch(str(path))
    assert second != first and second.read_bytes() == path.read_bytes()
    path.unlink()
    assert cache.fetch(str(path)) == second
    with pytest.raises(NotReachable, match="no copy"):
        cache.fetch(str(tmp_path / "b"))


class Breaks(DataCache):
    """Its source answers, and then the connection breaks, or the disk is full."""

    fault: OSError

    def _download(self, files: Any, path: str, wanted: Path, size: int) -> None:
        raise self.fault


def test_a_download_that_breaks_off_gives_the_copy_had_and_a_full_disk_an_error(tmp_path: Path) -> None:
    path = source(tmp_path, "a", 1000)
    cache = Breaks(tmp_path / "cache")
    cache.fault = ConnectionResetError("broken off")
    with pytest.raises(NotReachable, match="broken off, and this node has no copy"):
        cache.fetch(str(path))
    had = DataCache(tmp_path / "cache").fetch(str(path))
    source(tmp_path, "a", 1200)
    assert cache.fetch(str(path)) == had
    cache.fault = OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError, match="full"):
        cache.fetch(str(path))


def test_the_oldest_goes_when_the_cache_is_full_and_what_never_fits_is_refused(tmp_path: Path) -> None:
    cache = DataCache(tmp_path / "cache", bytes_max=2500)
    paths = [source(tmp_path, name, 1000) for name in "abc"]
    kept = []
    for at, path in enumerate(paths):
        kept.append(cache.fetch(str(path)))
        os.utime(kept[-1], (at, at))
        cache.fetch(str(paths[0]))  # used all the time
    assert [one.exists() for one in kept] == [True, False, True]
    assert len([one for one in (tmp_path / "cache").iterdir() if one.suffix != ".lock"]) == 2
    with pytest.raises(BadInput, match="2600 bytes, the cache holds 2500"):
        cache.fetch(str(source(tmp_path, "d", 2600)))


def test_a_part_of_a_dead_download_is_never_given_out_and_many_fetch_once(tmp_path: Path) -> None:
    path = source(tmp_path, "a", 300_000)
    cache = DataCache(tmp_path / "cache")
    wanted = cache.fetch(str(path))
    wanted.unlink()
    wanted.with_suffix(".part").write_bytes(b"torn")
    found: list[Path] = []
    downloads: list[str] = []

    class Counted(DataCache):
        def _download(self, files: Any, path: str, wanted: Path, size: int) -> None:
            downloads.append(path)
            super()._download(files, path, wanted, size)

    cache = Counted(tmp_path / "cache")
    threads = [threading.Thread(target=lambda: found.append(cache.fetch(str(path)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert downloads == [str(path)] and found == [wanted] * 6
    assert (
        wanted.read_bytes() == path.read_bytes()
        and wanted.stat().st_nlink == 1
        and not wanted.with_suffix(".part").exists()
    )


def test_a_fetch_that_never_ends_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    path, folder = source(tmp_path, "a", 10), tmp_path / "cache"
    DataCache(folder).fetch(str(path))
    (lock,) = (one for one in folder.glob("*.lock") if one.stem != "evict")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimedOut, match=rf"is locked by process {os.getpid()} .*for more than 0\.1 s"):
            DataCache(folder, lock_s=0.1).fetch(str(path))
    assert DataCache(folder, lock_s=0.1).fetch(str(path)).exists()
