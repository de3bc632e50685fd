"""File locks of this process: each file is opened once, shared by all clients, and closed with the last of them.

A record lock (``lockf``) belongs to the process and is lost when any descriptor of the file is closed. So two clients
of one namespace in one process may not each open the file, nor close what the other uses, also not when one comes in
the moment in which the last one goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from rota.runtime import environ, file_locks
from rota.runtime.undo import undone_if_raised
from rota.tensors.core import Fields
from rota.tensors.errors import file_errors

_Key = tuple[int, int, int]
_opened: weakref.WeakValueDictionary[_Key, LockFile] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_fds: dict[_Key, int] = {}
_users: Counter[_Key] = Counter()
_ended: deque[_Key] = deque()
"""Users that are gone and not yet counted off: garbage is collected at any line, also under the lock."""
_counting = threading.Lock()
_File = TypeVar("_File", bound="LockFile")


class LockFile:
    """An open file, made when it is missing; ``fd`` closes when nothing refers to this object. Get it by ``shared``.

    A record lock does not keep the threads of one process apart, and ends for all of them with the first that unlocks:
    ``locked`` and ``tried`` take a lock of the process before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        key, self.fd = _take(path)
        self._gate = threading.RLock()
        weakref.finalize(self, _give_back, key).atexit = False

    def is_current(self) -> bool:
        """False when the file was removed, or another lies at its path."""
        return self.path.exists() and _key(self.path.stat()) == _key(os.fstat(self.fd))

    @contextlib.contextmanager
    def locked(self, *, wait_s: float = file_locks.LOCK_MAX_S) -> Iterator[None]:
        """Hold the lock of the whole file; wait for it. Raises TimedOut, which names the process that has it."""
        with self._gate:
            file_locks.take_lock(self.path, self._try, wait_s)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def tried(self) -> Iterator[bool]:
        """Hold the lock of the whole file unless another process has it; yields whether it is held."""
        with self._gate:
            if not self._try():
                yield False
                return
            try:
                yield True
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def shared(path: Path, kind: type[_File], make: Callable[[Path], _File]) -> _File:
    """What this process has open of the file at ``path`` as a ``kind``, else what ``make`` opens."""
    with _opening:
        if path.exists():
            found = _opened.get(_key(path.stat()))
            if isinstance(found, kind):
                return found
        opened = make(path)
        _opened[_key(os.fstat(opened.fd))] = opened
        return opened


def _take(path: Path) -> tuple[_Key, int]:
    """One more user of the descriptor of a file, which is opened by the first."""
    with _counting:
        key = _key(path.stat()) if path.exists() else None
        if key is None or key not in _fds:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)
            key = _key(os.fstat(fd))
            _fds[key] = fd
        _users[key] += 1
        _close_unused()
        return key, _fds[key]


def _give_back(key: _Key) -> None:
    _ended.append(key)
    if _counting.acquire(blocking=False):  # else who holds it, or the next one, counts it off
        try:
            _close_unused()
        finally:
            _counting.release()


def _close_unused() -> None:
    while _ended:
        key = _ended.popleft()
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            fd = _fds.pop(key)
            if key[0] == os.getpid():  # in a forked child it is the parent's, and its end would end the child's locks
                os.close(fd)


def _key(stat: os.stat_result) -> _Key:
    return os.getpid(), stat.st_dev, stat.st_ino


def _after_fork_in_child() -> None:
    global _opening, _counting  # another thread of the parent may have held them
    _opening, _counting = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


_IDENTITY_BYTES: Final = 4096
_WORDS_FIRST: Final = 512
WORD: Final = 8
_DIRECT: Final = 1 << 63
"""In a noted version: this lease is known by the note alone, the registry was not asked."""
_BEGINNING: Final = 1 << 62
"""Noted while this client writes the header of a block that it reserved: see ``ClientFile.beginning``."""
FORK_MARK: Final = ".fork"
PIN_MARK: Final = "pin:"
KEEPER_MARK: Final = "keeper-"


# the files of this process: a connection that was closed while views live still has its client
_own: dict[tuple[int, Path], ClientFile] = {}


class ClientFile:
    """The file of this process in ``folder``: created, locked, then made visible under the client's name."""

    def __init__(self, folder: Path, client: str, identity: Fields) -> None:
        self.path = folder / client
        self.identity = identity
        partial = folder / f".{client}"
        self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._words: memoryview[int] | None = None
        self._outgrown: list[mmap.mmap] = []
        with undone_if_raised(os.close, self._fd), undone_if_raised(partial.unlink):
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, json.dumps(identity).encode().ljust(_IDENTITY_BYTES, b"\0")[:_IDENTITY_BYTES], 0)
            self._grow(_WORDS_FIRST)
        _own[os.getpid(), self.path] = self
        partial.rename(self.path)

    def add(self, version: int) -> int:
        """Note a leased version; its place."""
        place = self.take()
        self.note(place, version)
        return place

    def take(self) -> int:
        """A place for a note."""
        with self._lock:
            if not self._free:
                self._grow(2 * self._count)
            return self._free.pop()

    def note(self, place: int, version: int, *, direct: bool = False) -> None:
        """Note a leased version. ``direct``: the note is all there is of the lease."""
        with self._lock:
            assert self._words is not None
            self._words[place] = version | _DIRECT if direct else version

    def settle(self, place: int, version: int) -> None:
        """From now on the registry knows of this lease, too."""
        with self._lock:
            if self._words is not None:
                self._words[place] = version

    def noted(self) -> list[int]:
        """Every noted version, with the mark of those that the registry does not know."""
        with self._lock:
            return [] if self._words is None else [version for version in self._words if version]

    def clear(self, place: int) -> None:
        """Strike a place."""
        with self._lock:
            if self._words is not None:
                self._words[place] = 0
                self._free.append(place)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Who rebuilds the registry waits for the end of this block, or has shown a new epoch before its first line."""
        place = self.take()
        try:
            self.note(place, _BEGINNING)
            fence()
            yield
        finally:
            with self._lock:  # no call of Python, in which the handler of a signal could raise
                if self._words is not None:
                    self._words[place] = 0
                    self._free.append(place)

    def close(self) -> None:
        """Release the lock; from now on this client is dead."""
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
        size = _IDENTITY_BYTES + count * WORD
        with file_errors():
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
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))  # noqa: PTH208  # paths are slow


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


def read_file(folder: Path, client: str) -> tuple[Fields, list[int]]:
    """Identity and noted versions of a client; those of this process come from memory, not through its file."""
    own = _own.get((os.getpid(), folder / client))
    if own is not None:
        return own.identity, _versions(own.noted())
    try:
        raw = (folder / client).read_bytes()
    except FileNotFoundError:
        return {}, []
    text = raw[:_IDENTITY_BYTES].rstrip(b"\0")
    return (json.loads(text) if text else {}), _versions(_words(raw))


def is_beginning(folder: Path, client: str) -> bool:
    """True while a living client is in the block of ``ClientFile.beginning``."""
    return _BEGINNING in _noted(folder, client) and is_alive(folder, client)


def _versions(words: Sequence[int]) -> list[int]:
    return [word & ~_DIRECT for word in words if word != _BEGINNING]


def _words(raw: bytes) -> list[int]:
    count = max(len(raw) - _IDENTITY_BYTES, 0) // WORD
    words = np.frombuffer(raw, np.uint64, count, _IDENTITY_BYTES) if count else np.empty(0, np.uint64)
    return words[words != 0].tolist()


def _noted(folder: Path, client: str) -> list[int]:
    own = _own.get((os.getpid(), folder / client))
    if own is not None:
        return own.noted()
    try:
        with open(f"{folder}/{client}", "rb", buffering=0) as file:  # noqa: PTH123  # this is read once a few puts
            return _words(file.read())
    except FileNotFoundError:
        return []


def fence() -> None:
    """Let every store of this thread be seen by the others before its next load: x86-64 and arm64 may swap a store and
    a later load of another word, but no release of a lock with the next take of it."""
    lock = threading.Lock()  # of its own: a handler of a signal may come in the middle
    lock.acquire()
    lock.release()
    lock.acquire()


def noted_in(folder: Path) -> Counter[int]:
    """Versions that client files note and the registry does not know of, each with the number of these leases.

    The dead count until they are swept, and so do the holds of forked children. A fork copies notes to a file that may
    have come since the folder was listed, before the parent strikes its own: then all is read once more.
    """
    fence()
    while True:
        clients, found = clients_in(folder), Counter[int]()
        for client in clients:
            found.update({word & ~_DIRECT for word in _noted(folder, client) if word & _DIRECT})
        if set(clients_in(folder)) <= set(clients):
            return found


def make_fork_hold(folder: Path, client: str, index: int, leases: Sequence[tuple[int, int]]) -> tuple[str, int]:
    """A file whose ``flock`` lives as long as any process that inherits the returned descriptor; it notes what the
    client leases, as (version, number of the get or 0)."""
    name = f"{client}{FORK_MARK}{index}"
    fd = os.open(folder / f".{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of a new file: no process has it
    body = b"{}".ljust(_IDENTITY_BYTES, b"\0") + b"".join(
        struct.pack("<Q", version if seq else version | _DIRECT) for version, seq in leases
    )
    os.pwrite(fd, body, 0)
    (folder / f".{name}").rename(folder / name)
    return name, fd


def dead_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Every dead client with the descriptor that holds its lock; the caller closes it."""
    for client in clients_in(folder):
        fd = take_if_dead(folder, client)
        if fd is not None:
            yield client, fd
