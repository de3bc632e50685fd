"""Cache of data files on a node: each is fetched once, the least recently used go first, copies need no source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fsspec

from rota.runtime.clock import SystemClock, blocking_sleep
from rota.spec.errors import BadInput, NotReachable, TimedOut

DEFAULT_BYTES_MAX: Final = 20 * 2**30
LOOK_S: Final = 0.05
_PART: Final = ".part"


class DataCache:
    """Files of one node under ``folder``, addressed by source and version; at most ``bytes_max`` bytes are kept.

    A file in use by an open descriptor or mapping stays readable when it is evicted. Processes share the folder: one
    fetches, the others wait for its lock for up to ``lock_s``; its death frees it.
    """

    def __init__(self, folder: Path, *, bytes_max: int = DEFAULT_BYTES_MAX, lock_s: float = 3600.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._bytes_max, self._lock_s = folder, bytes_max, lock_s

    def fetch(self, uri: str) -> Path:
        """The local file of what ``uri`` (any fsspec URL, or a path) holds now; the newest one had, if unreachable.

        Raises BadInput for a file above ``bytes_max``, NotReachable when neither source nor copy can be read,
        TimedOut when another process fetches it for more than ``lock_s`` seconds.
        """
        source = hashlib.sha256(uri.encode()).hexdigest()[:24]
        try:
            files, path = fsspec.core.url_to_fs(uri)
            facts = files.info(path)
        except OSError as error:
            return self._newest(source, uri, error)
        size = int(facts.get("size") or 0)
        if size > self._bytes_max:
            raise BadInput(f"{uri}: {size} bytes, the cache holds {self._bytes_max}", hint="raise bytes_max")
        mark = str(facts.get("ETag") or facts.get("etag") or (size, facts.get("mtime") or facts.get("LastModified")))
        wanted = self._folder / f"{source}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
        with self._locked(source):
            if not wanted.exists():
                self._download(files, path, wanted, size)
            os.utime(wanted)
        self._evict(keep=wanted)
        return wanted

    def _newest(self, source: str, uri: str, error: OSError) -> Path:
        found = sorted(self._folder.glob(f"{source}-*"), key=lambda path: path.stat().st_mtime)
        copies = [path for path in found if path.suffix != _PART]
        if not copies:
            raise NotReachable(f"{uri}: {error}, and this node has no copy") from error
        return copies[-1]

    def _download(self, files: Any, path: str, wanted: Path, size: int) -> None:
        part = wanted.with_suffix(_PART)  # of a dead process, if it exists: written anew
        with files.open(path, "rb") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        if size and part.stat().st_size != size:
            raise NotReachable(f"{path}: {part.stat().st_size} of {size} bytes came", hint="fetch it again")
        part.replace(wanted)

    def _contents(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.suffix not in (_PART, ".lock")]

    def _evict(self, keep: Path) -> None:
        with self._locked("evict"):
            found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._contents())
            excess = sum(size for _, size, _ in found) - self._bytes_max
            for _, size, path in found:
                if excess > 0 and path != keep:
                    path.unlink(missing_ok=True)
                    excess -= size

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path, clock = self._folder / f"{name}.lock", SystemClock()
        end_s = clock.monotonic_s() + self._lock_s
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _take(fd):
                if clock.monotonic_s() > end_s:
                    raise TimedOut(f"{path}: held by another process for {self._lock_s:g} s", hint="raise lock_s")
                blocking_sleep(LOOK_S)
            yield
        finally:
            os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
