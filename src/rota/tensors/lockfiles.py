"""Files that this process locks: each is opened once, shared by all its clients, and closed with the last of them.

A record lock (``lockf``) belongs to the process and is lost when any descriptor of the file is closed. So two clients
of one namespace in one process may not each open the file, nor close what the other uses.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rota.runtime import environ

_Key = tuple[int, int, int]
_opened: weakref.WeakValueDictionary[_Key, LockFile] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_File = TypeVar("_File", bound="LockFile")


class LockFile:
    """An open file, made when it is missing; ``fd`` closes when nothing refers to this object. Get it by ``shared``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)

    def __del__(self) -> None:
        if (fd := getattr(self, "fd", None)) is not None:
            os.close(fd)


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


def _key(stat: os.stat_result) -> _Key:
    return os.getpid(), stat.st_dev, stat.st_ino
