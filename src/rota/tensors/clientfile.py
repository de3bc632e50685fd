"""A client's file: its lock says that the process lives, its words note the leases it has.

The lock is a POSIX record lock (``lockf``): it ends with the process whatever the end is, works across PID namespaces
and is not inherited by a fork. It is also lost when its holder opens and closes the same file again, so the file is
opened once, and nobody probes its own. A fork hold is the other way round: its ``flock`` follows the descriptor that
the child inherited.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rota.tensors.backends.file import making_files

_IDENTITY_BYTES: Final = 4096
_WORDS_FIRST: Final = 512
_WORD: Final = 8
FORK_MARK: Final = ".fork"
PIN_MARK: Final = "pin:"
KEEPER_MARK: Final = "keeper-"


# the files of this process: a plane that was closed while views live still has its client
_own: dict[tuple[int, Path], ClientFile] = {}


class ClientFile:
    """The file of this process in ``folder``: created, locked, then made visible under the client's name."""

    def __init__(self, folder: Path, client: str, identity: dict[str, Any]) -> None:
        self.path = folder / client
        self.identity = identity
        partial = folder / f".{client}"
        self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._words: memoryview[int] | None = None
        self._outgrown: list[mmap.mmap] = []
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, json.dumps(identity).encode().ljust(_IDENTITY_BYTES, b"\0")[:_IDENTITY_BYTES], 0)
            self._grow(_WORDS_FIRST)
        except BaseException:
            partial.unlink()
            os.close(self._fd)
            raise
        _own[os.getpid(), self.path] = self
        partial.rename(self.path)

    def add(self, version: int) -> int:
        """Note a leased version; its place."""
        with self._lock:
            if not self._free:
                self._grow(2 * self._count)
            place = self._free.pop()
            assert self._words is not None
            self._words[place] = version
            return place

    def noted(self) -> list[int]:
        """Every noted version."""
        with self._lock:
            return [] if self._words is None else [version for version in self._words if version]

    def clear(self, place: int) -> None:
        """Strike a place."""
        with self._lock:
            if self._words is not None:
                self._words[place] = 0
                self._free.append(place)

    def close(self) -> None:
        """Give up the lock; from now on this client is dead."""
        with self._lock:
            if self._words is None:
                return
            self._words, words = None, self._words
            words.release()
            for outgrown in (*self._outgrown, self._map):
                outgrown.close()
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            _own.pop((os.getpid(), self.path), None)

    def _grow(self, count: int) -> None:
        before = 0 if self._words is None else self._count
        size = _IDENTITY_BYTES + count * _WORD
        with making_files():
            os.posix_fallocate(self._fd, 0, size)
        if self._words is not None:
            self._words.release()
            self._outgrown.append(self._map)  # closing a map closes a descriptor of the file, and so loses its lock
        self._map = mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map)[_IDENTITY_BYTES:].cast("Q")
        self._count = count
        self._free += range(count - 1, before - 1, -1)


def clients_in(folder: Path) -> list[str]:
    """Every client and fork hold that has a file."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def take_if_dead(folder: Path, client: str) -> int | None:
    """A descriptor holding the dead client's lock, which is the right to sweep it; None while it lives or is gone."""
    if (os.getpid(), folder / client) in _own:  # a process always gets its own lock, and loses it by closing
        return None
    try:
        fd = os.open(folder / client, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if FORK_MARK in client:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    return fd


def is_alive(folder: Path, client: str) -> bool:
    """True while the client's lock is held."""
    fd = take_if_dead(folder, client)
    if fd is not None:
        os.close(fd)
        return False
    return (folder / client).exists()


def read_file(folder: Path, client: str) -> tuple[dict[str, Any], list[int]]:
    """Identity and noted versions of a client; those of this process come from memory, not through its file."""
    own = _own.get((os.getpid(), folder / client))
    if own is not None:
        return own.identity, own.noted()
    try:
        raw = (folder / client).read_bytes()
    except FileNotFoundError:
        return {}, []
    text = raw[:_IDENTITY_BYTES].rstrip(b"\0")
    words = raw[_IDENTITY_BYTES:]
    versions = [v for (v,) in struct.iter_unpack("<Q", words[: len(words) // _WORD * _WORD]) if v]
    return (json.loads(text) if text else {}), versions


def make_fork_hold(folder: Path, client: str, index: int, versions: list[int]) -> tuple[str, int]:
    """A file whose ``flock`` lives as long as any process that inherits the returned descriptor."""
    name = f"{client}{FORK_MARK}{index}"
    fd = os.open(folder / f".{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    body = b"{}".ljust(_IDENTITY_BYTES, b"\0") + b"".join(struct.pack("<Q", v) for v in versions)
    os.pwrite(fd, body, 0)
    (folder / f".{name}").rename(folder / name)
    return name, fd


def dead_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Every dead client with the descriptor that holds its lock; the caller closes it."""
    for client in clients_in(folder):
        fd = take_if_dead(folder, client)
        if fd is not None:
            yield client, fd
