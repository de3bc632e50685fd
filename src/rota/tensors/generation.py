"""Shared table: is the version I hold still the newest? One load from shared memory answers.

The file ``gen`` holds slots of two 64-bit words, ``(version, last)``. Slot 0 is ``(registry epoch, newest id when it
began)``, one further slot belongs to each name. ``version`` is the current version of the name, or 0: ask the
registry. ``last`` is the newest id that was ever current. Whoever changes a current version does so under the lock of
its slot: ``version = 0``, script, ``last``, ``version``. Death frees the lock and leaves 0, which is slow but right.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from rota.runtime.clock import Clock, blocking_sleep
from rota.tensors import errors
from rota.tensors.core import SLOTS_MAX
from rota.tensors.errors import failpoint
from rota.tensors.locks import LockFile

SLOT_BYTES: Final = 16
_BLOCKED_S: Final = 1.0
_RETRY_FIRST_S: Final = 0.00005
_RETRY_MAX_S: Final = 0.002
_STRIPES: Final = 64
_DELETED: Final = 1 << 63


class GenerationTable(LockFile):
    """The table of one namespace, mapped into this process once, whatever the number of its clients.

    ``words`` is a view of unsigned 64-bit words; aligned stores and loads of one word are atomic on x86-64 and arm64.
    ``creations`` (the second word of slot 0) changes whenever a name gets its first version.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock
        size = (SLOTS_MAX + 1) * SLOT_BYTES
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, size)
        self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.words = memoryview(self._map).cast("Q")
        self._stripes = [threading.RLock() for _ in range(_STRIPES)]
        self._inside: set[int] = set()

    @property
    def epoch(self) -> int:
        """The registry epoch: a change means that the registry was rebuilt."""
        return self.words[0]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.words[0] = value

    @property
    def creations(self) -> int:
        """Changes with the first version of any name."""
        return self.words[1]

    def created(self, version: int) -> None:
        """Wake those who wait for an unknown name. Ids are never reused, so the word never repeats a value."""
        self.words[1] = version

    def current(self, slot: int) -> int:
        """The current version of a slot, or 0: ask the registry."""
        return self.words[2 * slot]

    def last(self, slot: int) -> int:
        """The newest id that was ever current in this slot, or that was deleted from it."""
        return self.words[2 * slot + 1] & ~_DELETED

    def newest(self) -> int:
        """The newest id that this table has ever shown, of names that are gone too."""
        return int((np.frombuffer(self.words, np.uint64)[1::2] & np.uint64(_DELETED - 1)).max())

    def deleted(self, slot: int) -> bool:
        """True when the newest id that was ever current was deleted, and none came since."""
        return bool(self.words[2 * slot + 1] & _DELETED)

    def store(self, slot: int, version: int) -> None:
        """Say what is current now; the caller holds the slot's lock."""
        if version > self.last(slot):
            self.words[2 * slot + 1] = version
        self.words[2 * slot] = version

    def try_store(self, slot: int, version: int) -> bool:
        """Say what is current unless the slot is locked: its holder will say it."""
        stripe = self._stripes[slot % _STRIPES]
        if not stripe.acquire(blocking=False):
            return False
        try:
            if slot in self._inside:
                return False
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, slot * SLOT_BYTES)
            self.store(slot, version)
            fcntl.lockf(self.fd, fcntl.LOCK_UN, SLOT_BYTES, slot * SLOT_BYTES)
        except (BlockingIOError, PermissionError):
            return False
        finally:
            stripe.release()
        return True

    def store_deleted(self, slot: int, version: int) -> None:
        """Say that there is none any more; the caller holds the slot's lock."""
        self.words[2 * slot + 1] = max(version, self.last(slot)) | _DELETED
        self.words[2 * slot] = 0

    def lose_all(self, epoch: int) -> None:
        """The registry is lost: a new epoch begins, and every slot says ask the registry."""
        self.words[0] = epoch
        for word in 2 * np.flatnonzero(np.frombuffer(self.words, np.uint64)[2::2]) + 2:
            self.words[word] = 0

    @contextlib.contextmanager
    def slot_lock(self, slot: int, name: str) -> Iterator[None]:
        """Hold the slot's lock, its version set to 0. Raises PublishBlocked after a second, with the pid inside."""
        stripe = self._stripes[slot % _STRIPES]
        with stripe:
            if slot in self._inside:  # by this very thread, which is in the handler of a signal
                raise errors.PublishBlocked(f"{name}: this thread is publishing it", name=name, pid=os.getpid())
            try:
                self._lock(slot, name)
                self._inside.add(slot)
                self.words[2 * slot] = 0
                failpoint("slot-zero")
                yield
            finally:
                self._inside.discard(slot)
                fcntl.lockf(self.fd, fcntl.LOCK_UN, SLOT_BYTES, slot * SLOT_BYTES)

    def blocker(self, slot: int) -> int:
        """Pid of the process inside the slot's lock, 0 when there is none (or it is this one)."""
        ask = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, slot * SLOT_BYTES, SLOT_BYTES, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(self.fd, fcntl.F_GETLK, ask))
        return 0 if kind == fcntl.F_UNLCK else pid

    def _lock(self, slot: int, name: str) -> None:
        deadline_s = self._clock.monotonic_s() + _BLOCKED_S
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, slot * SLOT_BYTES)
            except (BlockingIOError, PermissionError):
                if self._clock.monotonic_s() > deadline_s:
                    pid = self.blocker(slot)
                    raise errors.PublishBlocked(f"{name}: process {pid} is publishing it", name=name, pid=pid) from None
                blocking_sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
            else:
                return
