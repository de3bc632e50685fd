"""Locks of files among processes (flock): each wait has a limit, and its error names the process that has the lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rota.runtime.clock import backoff
from rota.runtime.process import command_line, is_stopped, locking
from rota.spec.errors import TimedOut


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file for this descriptor alone (flock), or with others that share it; False while that cannot be.

    The kernel frees it at death.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


LOCK_MAX_S = 300.0
"""Longest wait for a lock that is held while one process starts, or files are unpacked: far longer than that takes."""
_LOCK_PAUSE_S = (0.002, 0.05)


def take_lock(path: Path, tried: Callable[[], bool], wait_s: float = LOCK_MAX_S) -> None:
    """Try to lock the file at ``path`` until it succeeds.

    Raises TimedOut after ``wait_s``, which names the process that has it: a holder that is stopped never unlocks.
    """
    until_s, pauses = time.monotonic() + wait_s, backoff(*_LOCK_PAUSE_S)
    while not tried():
        if time.monotonic() > until_s:
            raise _still_locked(path, wait_s)
        time.sleep(next(pauses))


def _still_locked(path: Path, wait_s: float) -> TimedOut:
    holders = locking(path.resolve())
    stopped = [str(one.pid) for one in holders if is_stopped(one)]
    named = [f"{one.pid} ({command_line(one.pid)[:200].strip()})" for one in holders]
    who = f"process {', '.join(named)}" if named else "a process that cannot be seen from here"
    pids = " ".join(str(one.pid) for one in holders)
    if stopped:
        hint = f"it is stopped by a signal: kill -CONT {' '.join(stopped)}, then try again"
    else:
        hint = f"wait for it, or end it with kill {pids}, then try again" if pids else f"fuser {path} may show it"
    pid = holders[0].pid if holders else None
    return TimedOut(f"{path} is locked by {who} for more than {wait_s:g} s", hint=hint, path=str(path), pid=pid)


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = LOCK_MAX_S) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be. It ends with this process; no program it starts has it.

    Raises TimedOut after ``wait_s``, see ``take_lock``.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(path, lambda: try_lock(fd), wait_s)
        yield
    finally:
        os.close(fd)
