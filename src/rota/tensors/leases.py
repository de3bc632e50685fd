"""Leases that views hold, each until its last view is gone; ``session`` reports the ends to the registry.

A leased version has one holder a block: a ctypes array over the mapping, or a read-only mmap of its own in sealed mode.
Every numpy array and torch tensor of that block keeps the holder alive. When the last holder dies, its weak reference
appends the lease to a deque, nothing more: a finalizer may run in the middle of anything, so it takes no lock and calls
nothing. ``take_ended`` hands the ended leases to the thread that reports to the registry.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rota.runtime.undo import undone_if_raised
from rota.tensors import errors
from rota.tensors.arrays import Holder
from rota.tensors.core import HEADER_BYTES
from rota.tensors.errors import failpoint
from rota.tensors.generation import GenerationTable
from rota.tensors.locks import ClientFile, fence
from rota.tensors.registry import PartBlock
from rota.tensors.ring import is_memory
from rota.tensors.segments import BlockHeader, Segments

_PAGE: Final = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block in this process: the object to build views on, and where the block begins in it."""

    holder: Holder
    base: int


class _HolderRef(weakref.ref[Holder]):
    """Reports the end of a holder by a call of the deque itself: no handler of a signal can come between."""

    __slots__ = ("lease",)
    lease: _Lease


class _Lease:
    """One version this process leases: its newest sequence number, where it lies, the holders that must still end."""

    __slots__ = ("bases", "blocks", "mirror", "open", "refs", "seq", "version")

    def __init__(self, version: int, seq: int, mirror: int, blocks: Sequence[PartBlock]) -> None:
        self.version, self.seq, self.mirror, self.blocks = version, seq, mirror, blocks
        self.refs: dict[int, _HolderRef] = {}
        self.bases: dict[int, int] = {}
        self.open: list[tuple[_HolderRef, int]] = []


class Leases:
    """The leases of one process in one namespace; thread-safe."""

    def __init__(self, segments: Segments, mirror: ClientFile) -> None:
        self._segments = segments
        self._mirror = mirror
        self._lock = threading.RLock()  # a signal's handler may use the store in the middle of a call
        self._table: dict[int, _Lease] = {}
        self._ended: deque[_HolderRef] = deque()
        self._seq = 0
        self._getting: set[int] = set()
        self._idle: list[_Lease] = []

    def __len__(self) -> int:
        return len(self._table)

    @property
    def ended(self) -> int:
        """Holders that ended and were not taken yet."""
        return len(self._ended)

    @contextlib.contextmanager
    def get_number(self) -> Iterator[int]:
        """A sequence number above all before it, for one get from its call of the registry until it holds.

        Two threads may get one version in the other order than their numbers: the registry then has the higher one,
        and its release would end the lease of the get that is still under way. So it waits.
        """
        seq = 0
        try:
            with self._lock:
                self._seq += 1
                seq = self._seq
                self._getting.add(seq)
            yield seq
        finally:
            with self._lock:
                self._getting.discard(seq)

    def hold_shown(
        self, slot: int, block: PartBlock, table: GenerationTable, *, sealed: bool
    ) -> list[HeldBlock] | None:
        """Holders of the version that a slot shows, without the registry; None when the slot now shows another version.

        The lease is written to the client's file, then the slot is read again: who frees the block takes the version
        from the slot before it looks for notes, so one of the two sees the other.
        """
        with self._lock:
            lease = self._table.get(block.version)
            if lease is not None:  # leased by this process already: it cannot be freed, whatever the slot shows
                return self._open(lease, sealed)
            return self._hold_noted(block, sealed, lambda: table.current(slot) == block.version)

    def hold_own(self, block: PartBlock) -> list[HeldBlock]:
        """Holders of a version that this process is writing, and that the registry keeps meanwhile."""
        with self._lock:
            held = self._hold_noted(block, False, lambda: True)
            assert held is not None
            return held

    def _hold_noted(self, block: PartBlock, sealed: bool, shown: Callable[[], bool]) -> list[HeldBlock] | None:
        place, held = self._mirror.take(), None  # lost if a signal's handler raises here
        try:
            self._mirror.note(place, block.version, direct=True)
            lease = self._table[block.version] = _Lease(block.version, 0, place, (block,))
            failpoint("noted")
            fence()
            if shown():
                held = self._open(lease, sealed)
        finally:
            if held is None:
                self._table.pop(block.version, None)
                self._mirror.clear(place)
        return held

    def hold(
        self, version: int, seq: int, blocks: Sequence[PartBlock], known: Callable[[], bool], *, sealed: bool
    ) -> list[HeldBlock]:
        """Holders of a version the registry just leased to ``seq``; an open one that still lives is used again.

        Raises EpochChanged unless it is still ``known`` after the note: a registry that was rebuilt before freed it.
        """
        with self._lock, undone_if_raised(self._drop_unused, version):
            lease = self._table.get(version)
            if lease is None:
                lease = self._table[version] = _Lease(version, seq, self._mirror.add(version), blocks)
            fence()
            if not known():
                raise errors.EpochChanged("the registry was rebuilt during a get")
            if not lease.seq:
                self._mirror.settle(lease.mirror, version)
            lease.seq = max(lease.seq, seq)
            return self._open(lease, sealed)

    def _drop_unused(self, version: int) -> None:
        lease = self._table.get(version)
        if lease is not None and not lease.refs:
            self._mirror.clear(self._table.pop(version).mirror)

    def _open(self, lease: _Lease, sealed: bool) -> list[HeldBlock]:
        if not sealed and lease.open:
            alive = [HeldBlock(holder, base) for ref, base in lease.open if (holder := ref()) is not None]
            if len(alive) == len(lease.open):
                return alive
        held = [self.map_block(block, sealed) for block in lease.blocks]
        refs = [self._watch(lease, each) for each in held]
        if not sealed:
            lease.open = [(ref, each.base) for ref, each in zip(refs, held, strict=True)]
        return held

    def take_ended(self) -> list[tuple[int, int, int]]:
        """Leases that ended since the last call, as (version, seq, mirror place): the caller informs the registry,
        unless seq is 0, and clears the places then."""
        out: list[tuple[int, int, int]] = []
        with self._lock:
            while self._ended:
                ref = self._ended.popleft()
                lease = ref.lease
                lease.refs.pop(id(ref), None)
                lease.bases.pop(id(ref), None)
                if not lease.refs:
                    self._idle.append(lease)
            first = min(self._getting, default=self._seq + 1)
            idle, self._idle = self._idle, []
            for lease in idle:
                if lease.refs or self._table.get(lease.version) is not lease:
                    continue  # held again meanwhile, or ended already
                if lease.seq > first:
                    self._idle.append(lease)
                else:
                    del self._table[lease.version]
                    out.append((lease.version, lease.seq, lease.mirror))
        return out

    def has(self, version: int) -> bool:
        """True while this process leases the version."""
        return version in self._table

    def blocks_of(self, version: int) -> Sequence[PartBlock]:
        """Where a version lies that this process leases."""
        with self._lock:
            return self._table[version].blocks if version in self._table else ()

    def find(self, address: int) -> tuple[str, int] | None:
        """Name and version of the block that an address of this process lies in."""
        with self._lock:
            for lease in self._table.values():
                for ref in lease.refs.values():
                    holder = ref()
                    if holder is None:
                        continue
                    raw = np.frombuffer(holder, np.uint8)  # pyright: ignore[reportCallIssue, reportArgumentType]  # as view_of
                    start = raw.__array_interface__["data"][0]
                    if start <= address < start + raw.nbytes:
                        base = lease.bases.get(id(ref), 0)
                        header = BlockHeader.unpack(
                            raw[base : base + HEADER_BYTES].tobytes(), "a leased block", settled=False
                        )
                        return None if is_memory(header.name) else (header.name, lease.version)
        return None

    def live(self) -> list[tuple[int, int]]:
        """(version, seq) of every lease this process still has; seq is 0 where the registry was not asked."""
        with self._lock:
            return [(lease.version, lease.seq) for lease in self._table.values()]

    def map_block(self, block: PartBlock, sealed: bool) -> HeldBlock:
        """A leased block as an object to build views on: in sealed mode a mapping of its own."""
        mapping = self._segments.open(block.seg)
        if not sealed:
            array = (ctypes.c_ubyte * block.bytes).from_buffer(mapping.map, block.offset)
            return HeldBlock(array, 0)
        start = block.offset // _PAGE * _PAGE
        base = block.offset - start
        fd = os.open(self._segments.path(block.seg), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return HeldBlock(mmap.mmap(fd, base + block.bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start), base)
        finally:
            os.close(fd)

    def _watch(self, lease: _Lease, held: HeldBlock) -> _HolderRef:
        ref = _HolderRef(held.holder, self._ended.append)
        ref.lease = lease
        lease.bases[id(ref)] = held.base
        lease.refs[id(ref)] = ref
        return ref
