"""Files that this process locks: each is opened once, shared by all its clients, and closed with the last of them.

A record lock (``lockf``) belongs to the process and is lost when any descriptor of the file is closed. So two clients
of one namespace in one process may not each open the file, nor close what the other uses, also not when one comes in
the moment in which the last one goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rota.runtime import environ

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
    def locked(self) -> Iterator[None]:
        """Hold the lock of the whole file; wait for it."""
        with self._gate:
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def tried(self) -> Iterator[bool]:
        """Hold the lock of the whole file unless another process has it; yields whether it is held."""
        with self._gate:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                yield False
                return
            try:
                yield True
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)


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
