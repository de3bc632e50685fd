"""Table of generations in shared memory: whether a version is still the newest, answered by one load.

The file ``gen`` holds slots of two 64-bit words, ``(version, last)``. Slot 0 is ``(registry epoch, newest id when it
began)``, one further slot belongs to each name. ``version`` is the current version of the name, or 0: ask the
registry. ``last`` is the newest id that was ever current. Whoever changes a current version does so under the lock of
its slot: ``version = 0``, script, place, ``last``, ``version``. Death frees the lock and leaves 0, which is slow but
right, and a mark in ``last``: who takes the lock next waits first until the registry has done what the dead had sent.

Behind the slots lie for each of them two **places**, of an even and of an odd version, each in four words ``(version,
number of the segment, offset, block)``: with it a reader needs no registry. A place never changes while the slot shows
its version, so it is right when its first word is what the slot shows before the place was read and afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from rota.runtime.clock import Clock, blocking_sleep
from rota.runtime.undo import undone_if_raised
from rota.tensors import errors
from rota.tensors.core import SLOTS_MAX
from rota.tensors.errors import failpoint
from rota.tensors.locks import LockFile

SLOT_BYTES: Final = 16
_BLOCKED_S: Final = 1.0
_RETRY_FIRST_S: Final = 0.00005
_RETRY_MAX_S: Final = 0.002
_STRIPES: Final = 64
_TRIES_AT_ONCE: Final = 16
_RINGS: Final = 1 << 40
"""Locks of rings are those of bytes that no file has, far behind the slots."""
_DELETED: Final = 1 << 63
_INSIDE: Final = 1 << 62
"""In ``last``: a process is between the lock of the slot and the answer of the registry, or died or gave up there."""
_CLAIMED: Final = 1 << 61
"""In ``last``: a client puts this name by itself (``ownership.py``). Who takes the mark away has ended the claim."""
_ID: Final = _CLAIMED - 1
_PLACE: Final = struct.Struct("<4Q")
_PLACES_AT: Final = (SLOTS_MAX + 1) * SLOT_BYTES
_PLACES_STEP: Final = 2048
Place: TypeAlias = tuple[int, int, int, int]
"""Where a version lies: (version, number of its segment, offset, block); the segment is ``seg-<block>-<number>``."""


class GenerationTable(LockFile):
    """The table of one namespace, mapped into this process once, whatever the number of its clients.

    ``words`` is a view of unsigned 64-bit words; aligned stores and loads of one word are atomic on x86-64 and arm64.
    ``creations`` (the second word of slot 0) changes whenever a name gets its first version.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock
        size = _PLACES_AT + 2 * (SLOTS_MAX + 1) * _PLACE.size
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, _PLACES_AT + 2 * _PLACES_STEP * _PLACE.size)
            os.truncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.words = memoryview(self._map)[:_PLACES_AT].cast("Q")
        self._allocated = memoryview(self._map)[_PLACES_AT : _PLACES_AT + _PLACE.size].cast("Q")
        """In the place of slot 0: the slots that have a place, if more than the first step have one, and ``fences``."""
        self._stripes = [threading.RLock() for _ in range(2 * _STRIPES)]
        self.settle: Callable[[], object] = lambda: None
        """Waits until the registry has done what arrived before: also what a process sent that has died since."""
        self.inside = dict[int, int]()
        """By key, the identity of what this process holds it with; no reference, which would keep it."""

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

    @property
    def fences(self) -> int:
        """Changes with every fence."""
        return self._allocated[1]

    @property
    def watched(self) -> bool:
        """True while events are watched: then every publish commits to the registry at once."""
        return self._clock.monotonic_s() * 1000 < self._allocated[2]

    def watch(self, ms: int) -> None:
        """Events are watched for that time."""
        self._allocated[2] = max(self._allocated[2], int(self._clock.monotonic_s() * 1000) + ms)

    @property
    def adopted(self) -> int:
        """Changes with every version that another process than its writer made known to the registry."""
        return self._allocated[3]

    @adopted.setter
    def adopted(self, version: int) -> None:
        self._allocated[3] = version

    def fenced(self) -> None:
        """Let those look who work without the registry; the caller holds the lock of all fences."""
        self._allocated[1] += 1

    def created(self, version: int) -> None:
        """Wake those who wait for an unknown name. Ids are never reused, so the word never repeats a value."""
        self.words[1] = version

    def current(self, slot: int) -> int:
        """The current version of a slot, or 0: ask the registry."""
        return self.words[2 * slot]

    def last(self, slot: int) -> int:
        """The newest id that was ever current in this slot, or that was deleted from it."""
        return self.words[2 * slot + 1] & _ID

    def newest(self) -> int:
        """The newest id that this table has ever shown, of names that are gone too."""
        return int((np.frombuffer(self.words, np.uint64)[1::2] & np.uint64(_ID)).max())

    def deleted(self, slot: int) -> bool:
        """True when the newest id that was ever current was deleted, and none came since."""
        return bool(self.words[2 * slot + 1] & _DELETED)

    def is_newest(self, slot: int, version: int) -> bool:
        """True when nothing was published in, or deleted from, the slot after this version."""
        return version != 0 and self.words[2 * slot + 1] & ~(_INSIDE | _CLAIMED) == version

    def place(self, slot: int, version: int) -> Place | None:
        """Where a version lies that the slot shows; None when the table does not say: the registry knows."""
        if slot >= max(self._allocated[0], _PLACES_STEP):
            return None
        found: Place = _PLACE.unpack_from(self._map, _place_at(slot, version))
        return found if found[0] == version else None

    def store_place(self, slot: int, version: int, seg: str, offset: int, block: int) -> None:
        """Say where a version lies, before ``store`` shows it; the caller holds the slot's lock. Without memory for it
        readers ask the registry: there are places for as many slots as were needed, and never a hole, since a look
        into one kills where shared memory is full."""
        if slot >= max(self._allocated[0], _PLACES_STEP):
            end = (slot // _PLACES_STEP + 1) * _PLACES_STEP
            try:
                os.posix_fallocate(self.fd, _PLACES_AT, 2 * end * _PLACE.size)
            except OSError:
                return
            self._allocated[0] = end
        number = int(seg.rpartition("-")[2])
        _PLACE.pack_into(self._map, _place_at(slot, version), version, number, offset, block)

    def is_claimed(self, slot: int, version: int) -> bool:
        """True when the claim of who published this version, or deleted up to it, holds; under the slot's lock."""
        return self.words[2 * slot + 1] & ~(_INSIDE | _DELETED) == version | _CLAIMED

    def store_claimed(self, slot: int, version: int) -> None:
        """Say what is current now, by who claims the name; the caller holds the slot's lock."""
        self.words[2 * slot + 1] = version | _CLAIMED
        self.words[2 * slot] = version

    def store_claimed_deleted(self, slot: int, version: int) -> None:
        """Say that nothing is current, and that all ids up to this one are gone; as ``store_claimed``."""
        self.words[2 * slot + 1] = version | _CLAIMED | _DELETED
        self.words[2 * slot] = 0

    def end_claim(self, slot: int) -> None:
        """From now on no client puts this name by itself; the caller holds the slot's lock."""
        self.words[2 * slot + 1] &= ~_CLAIMED

    def hold(self, slot: int, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold the slot's lock; what it shows stays. Raises as ``slot_lock``."""
        return _Held(self, {slot: name})

    def store(self, slot: int, version: int) -> None:
        """Say what is current now; the caller holds the slot's lock."""
        if version >= self.last(slot):  # the same one again: it was not deleted after all
            self.words[2 * slot + 1] = version | (self.words[2 * slot + 1] & _INSIDE)
        self.words[2 * slot] = version

    def try_store(self, slot: int, version: int) -> bool:
        """Say what is current unless the slot is locked: its holder will say it."""
        try:
            with _Held(self, {slot: ""}, wait=False):
                self.store(slot, version)
        except errors.PublishBlocked:
            return False
        return True

    def restore(self, slot: int, name: str, find_version: Callable[[], int]) -> None:
        """Say what is current in a slot that says nothing. It is asked for under the slot's lock: what was current
        before may have been deleted since. Raises as ``slot_lock``."""
        with _Held(self, {slot: name}):
            if self.words[2 * slot]:
                return
            if self.words[2 * slot + 1] & _INSIDE:  # what the holder before sent is done first, and then answered
                self.settle()
            if version := find_version():
                self.store(slot, version)

    def store_last(self, slot: int, word: int) -> None:
        """Undo ``store_deleted``, which gave this word."""
        self.words[2 * slot + 1] = word

    def store_deleted(self, slot: int, version: int) -> int:
        """Mark the slot as empty; the caller holds its lock. Returns the word it had of the newest."""
        before = self.words[2 * slot + 1]
        self.words[2 * slot + 1] = max(version, self.last(slot)) | _DELETED | (before & _INSIDE)
        self.words[2 * slot] = 0
        return before

    def lose_all(self, epoch: int) -> None:
        """The registry is lost: a new epoch begins, and every slot says ask the registry."""
        self.words[0] = epoch
        for word in 2 * np.flatnonzero(np.frombuffer(self.words, np.uint64)[2::2]) + 2:
            self.words[word] = 0

    def slot_lock(self, slot: int, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold the slot's lock, its version set to 0. Raises PublishBlocked after a second, with the pid inside."""
        return _Held(self, {slot: name}, empty=True)

    def slot_locks(self, slots: Iterable[tuple[int, str]]) -> contextlib.AbstractContextManager[None]:
        """``slot_lock`` of several (slot, name), all or none; everybody takes them in one order."""
        names = dict(slots)
        if len(names) == 1:
            return _Held(self, names, empty=True)
        # a name that is gone may have had the slot that another one has now
        order = sorted(names, key=lambda each: (each % _STRIPES, each))
        return _Held(self, {slot: names[slot] for slot in order}, empty=True)

    def ring_lock(self, slot: int, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the ring of records whose table has that slot. Raises as ``slot_lock``."""
        return _Held(self, {slot + _RINGS: name})

    def stripe(self, key: int) -> threading.RLock:
        """Keeps other threads of this process from a key: to the kernel all of them hold what one holds."""
        return self._stripes[key % _STRIPES + (_STRIPES if key >= _RINGS else 0)]

    def blocker(self, key: int) -> int:
        """Pid of the process inside the slot's lock, 0 when it is free or held by this process."""
        ask = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, key * SLOT_BYTES, SLOT_BYTES, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(self.fd, fcntl.F_GETLK, ask))
        return 0 if kind == fcntl.F_UNLCK else pid

    def lock(self, key: int, name: str, *, wait: bool) -> None:
        """Take the lock of a key from other processes. Raises PublishBlocked after a second, or at once."""
        tries, deadline_s, delay_s = _TRIES_AT_ONCE, 0.0, _RETRY_FIRST_S
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, key * SLOT_BYTES)
            except (BlockingIOError, PermissionError):
                tries -= 1
                if wait and tries > 0:
                    continue
                now_s = self._clock.monotonic_s()
                deadline_s = deadline_s or now_s + _BLOCKED_S
                if not wait or now_s > deadline_s:
                    pid = self.blocker(key)
                    raise errors.PublishBlocked(f"{name}: process {pid} is publishing it", name=name, pid=pid) from None
                blocking_sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
            else:
                return

    def unlock(self, key: int) -> None:
        """Release the lock of a key."""
        fcntl.lockf(self.fd, fcntl.LOCK_UN, SLOT_BYTES, key * SLOT_BYTES)


def _place_at(slot: int, version: int) -> int:
    return _PLACES_AT + (2 * slot + version % 2) * _PLACE.size


class _Taken:
    """The locks that a block has of some keys, in their order; ``empty``: of slots, whose versions become 0."""

    __slots__ = ("_acquired", "_empty", "_entered", "_keys", "_names", "_table", "_wait")

    def __init__(self, table: GenerationTable, names: Mapping[int, str], empty: bool, wait: bool) -> None:
        self._table, self._names, self._empty, self._wait = table, names, empty, wait
        self._keys, self._acquired, self._entered = list(names), list[bool](), set[int]()

    def take(self) -> None:
        for key in self._keys:
            self._take(key, self._names[key])

    def _take(self, key: int, name: str) -> None:
        table = self._table
        if self._wait:  # one call of C: no handler runs between the lock and its note
            self._acquired.extend(map(table.stripe(key).acquire, (True,)))
        else:
            before = len(self._acquired)
            self._acquired.extend(filter(None, map(table.stripe(key).acquire, (False,))))
            if len(self._acquired) == before:
                raise errors.PublishBlocked(f"{name}: another thread is publishing it", name=name, pid=os.getpid())
        if key in table.inside:  # by this very thread, which is in the handler of a signal
            raise errors.PublishBlocked(f"{name}: this thread is publishing it", name=name, pid=os.getpid())
        table.inside[key] = id(self)
        table.lock(key, name, wait=self._wait)
        if self._empty:
            left = table.words[2 * key + 1] & _INSIDE
            table.words[2 * key + 1] |= _INSIDE
            table.words[2 * key] = 0
            failpoint("slot-zero")
            if left:  # what the one before sent may still be done, and would undo what is done now
                table.settle()
            self._entered.add(key)

    def give_back(self, *, answered: bool = False) -> None:
        """All that is left of them; again after a handler has ended it in the middle. ``answered``: nothing that was
        sent under them is still on its way."""
        table = self._table
        while self._acquired:
            key = self._keys[len(self._acquired) - 1]
            if table.inside.get(key) == id(self):
                if answered and key in self._entered:
                    table.words[2 * key + 1] &= ~_INSIDE
                table.unlock(key)
                del table.inside[key]
            release = table.stripe(key).release
            try:  # two calls of C: no handler runs between them, and none before the second
                self._acquired.pop()
            finally:
                release()


class _Held:
    """Holds locks for a block.

    The handler of a signal may raise anywhere, so also between the end of the block and the first line of
    ``__exit__``: then the locks are given back with the last reference to this object, by the generator it has. It
    has no ``__del__``, which would run each time, and what a handler raises there is lost.
    """

    __slots__ = ("_at_end", "_taken")

    def __init__(
        self, table: GenerationTable, names: Mapping[int, str], *, empty: bool = False, wait: bool = True
    ) -> None:
        self._taken = _Taken(table, names, empty, wait)
        self._at_end = _give_back_at_end(self._taken)

    def __enter__(self) -> None:
        next(self._at_end)
        with undone_if_raised(self._taken.give_back):
            self._taken.take()

    def __exit__(self, kind: object, *_: object) -> None:
        self._taken.give_back(answered=kind is None)
        self._at_end.close()


def _give_back_at_end(taken: _Taken) -> Generator[None]:
    try:
        yield
    finally:
        taken.give_back()
