"""Caches of a machine, of what can be made again: who uses a thing, and which go when they are old or too many.

A thing in use is one whose lock file a process shares; the kernel frees it at the end of the process. The time of that
file, or of the thing, is when it was used last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rota.runtime import environ, file_locks
from rota.runtime.file_locks import take_lock, try_lock
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput
from rota.spec.resources import parse_size

SHARE = 0.2
"""Of the disk, for a cache whose limit is not set."""


def limit_of(setting: str, folder: Path) -> int:
    """Most bytes of the cache in a folder: the variable of that name, such as ``500GiB``. Raises ValueError."""
    if not (text := environ.get(setting)):
        return int(shutil.disk_usage(folder).total * SHARE)
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{setting}={text}: {error}") from None


def check_limits(folder: Path, *settings: str) -> None:
    """Raises BadInput when a limit of a cache does not parse as a size."""
    for setting in settings:
        try:
            limit_of(setting, folder)
        except ValueError as error:
            raise BadInput(str(error), hint=f"set {setting} to a size, for example 500GiB, or unset it") from None


def print_folder(make: Callable[[], Path], *failures: type[Exception]) -> int:
    """The main of a program that makes a folder of a cache: prints it, or the text of a failure; the exit status."""
    try:
        folder = make()
    except failures as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(str(folder))
    return 0


def hold(lock: Path) -> int:
    """Use a thing from now on, for as long as the descriptor is open: it is not removed, and counts as used now.

    Whoever removes it at this moment is waited for: look whether it is still there. Raises TimedOut.
    """
    use = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)
    with undone_if_raised(os.close, use):
        take_lock(lock, lambda: try_lock(use, shared=True))
        os.utime(use)
    return use


def remove_folder(folder: Path) -> None:
    """Remove a folder at once: who is killed on the way leaves no part of it that would be taken for the whole."""
    if folder.is_dir():
        folder.rename(folder.with_name(f".{folder.name}-{os.getpid()}-{time.monotonic_ns()}"))
    for left in folder.parent.glob(f".{folder.name}-*"):  # also what one that was killed left
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def unused(*locks: Path) -> Iterator[bool]:
    """Whether all of these locks are free; in the block no other process can take them."""
    with contextlib.ExitStack() as stack:
        free = True
        for path in locks:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, environ.PRIVATE_FILE)
            stack.callback(os.close, lock)
            free = free and file_locks.try_lock(lock)
        yield free


def remove_unused(locks: Iterable[Path], before_s: float, remove: Callable[[Path], None]) -> None:
    """Call ``remove`` with the lock of each thing that is not in use, and was last used before ``before_s``."""
    for lock in locks:
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime < before_s:
                with unused(lock) as free:
                    if free and lock.stat().st_mtime < before_s:
                        remove(lock)


def remove_oldest(things: Iterable[tuple[float, int, Path]], bytes_max: int, remove: Callable[[Path], bool]) -> int:
    """Remove what was used longest ago until the rest has ``bytes_max`` bytes at most; the bytes of the rest.

    ``things`` have the time of their last use and their bytes; ``remove`` says whether it removed one.
    """
    rows = sorted(things)
    left = sum(size for _, size, _ in rows)
    for _, size, path in rows:
        if left > bytes_max and remove(path):
            left -= size
    return left


def files(folder: Path, pattern: str = "*") -> Iterator[tuple[float, int, Path]]:
    """The files of a folder as things; one that goes meanwhile is none."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield status.st_mtime, status.st_size, path


def removed(path: Path) -> bool:
    """Remove a file; True."""
    path.unlink(missing_ok=True)
    return True
