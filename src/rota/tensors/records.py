"""Records of channels in shared memory: the rings that a process has open, their locks, and the blocks records lie in.

The table of a ring is the mutable tensor ``<channel>/#``, each block that records are written to is one, too:
``<channel>/#<number>``. So leases, quotas, labels, spill and recovery hold for them as for any name. The registry is
asked for a block the first time only: blocks are used again by later records.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeVar, cast

import numpy as np

from rota.runtime import futex
from rota.runtime.clock import blocking_sleep
from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, RotaError
from rota.tensors import core, errors
from rota.tensors.arrays import Bytes, Holder, Layout, TensorSource, source_of, view_of
from rota.tensors.core import Json, Tensor
from rota.tensors.errors import failpoint
from rota.tensors.leases import HeldBlock
from rota.tensors.locks import FORK_MARK, WORD, LockFile, clients_in, is_alive, shared
from rota.tensors.namespace import Namespace
from rota.tensors.reader import TensorReader
from rota.tensors.registry import PartBlock, ScriptRefused
from rota.tensors.ring import (
    BUSY,
    ITEMS,
    ITEMS_WANTED,
    MARK,
    OPEN,
    ROOM,
    ROOM_WANTED,
    Ring,
    RingRecord,
    clear,
    is_memory,
    words_of,
)
from rota.tensors.writer import MANIFEST_BYTES_MAX, Life, PublishOrder, TensorWriter, lay_out

META_BYTES_MAX: Final = 64 << 10
_ENTRIES_MIN: Final = 1024
_ENTRIES_SHARE: Final = 2
_BURY_S: Final = 0.1
_IDLE_S: Final = 1.0
_MOVED_TRIES_MAX: Final = 400
_MOVED_S: Final = 0.005
_SIZE_STEPS: Final = 4
_T = TypeVar("_T")
_json: Final = json.JSONEncoder(separators=(",", ":")).encode


class Moved(Exception):
    """The ring was ended, or a fence was set, since this process looked."""


class ChannelRecord:
    """One record of a channel, this consumer's until ``Channel.ack`` or ``nack``, or until this object is dropped.

    ``tries`` counts how often it was taken, this time included. Its tensors stay valid as long as any view lives.
    """

    __slots__ = ("id", "lease", "meta", "name", "place", "ring", "tensors", "tries")

    def __init__(
        self, name: str, ring: int, place: RingRecord, tensors: dict[str, Tensor], meta: Json, lease: Holder
    ) -> None:
        self.name, self.id, self.tries, self.tensors, self.meta = name, place.number, place.tries, tensors, meta
        self.ring, self.place, self.lease = ring, place, cast("Holder | None", lease)


class _View(weakref.ref[Holder]):
    """Reports the end of all views of a record, as the holders of leases do; keeps the block's lease until then."""

    __slots__ = ("block", "record")
    block: RecordBlock
    record: RingRecord


class RecordBlock:
    """Memory of records that this process leases, whatever version of the ring it belongs to."""

    def __init__(self, version: int, held: HeldBlock, where: PartBlock, start: int, capacity: int) -> None:
        self.version, self.held, self.where, self.start = version, held, where, start
        self.array = _bytes_of(held, start)[:capacity]


class OpenRing:
    """A ring as this process has it open."""

    def __init__(self, space: Namespace, reader: TensorReader, name: str) -> None:
        self._space, self.name = space, name
        leased, held, start = reader.open_block(name)
        self.slot, self.version = leased.slot, leased.version
        raw = _bytes_of(held, start)
        words = raw[: raw.nbytes // WORD * WORD].data.cast("Q")
        self.ring = Ring(words, space.client)
        if not self.ring.sound:
            raise errors.Corrupt(f"{name}: not the table of a channel", file=name, field="mark")
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(held.holder, held.base + start))
        self.blocks: dict[int, RecordBlock] = {}
        self.spare: set[int] = set()
        """Entries that this process may write to, and that no thread of it has."""
        self.views: dict[int, _View] = {}
        self.ended: deque[_View] = deque()
        self.still: tuple[int, int, float] = (-1, -1, 0.0)
        self._bury_at_s = 0.0

    @contextlib.contextmanager
    def locked(self, fences: int | None = None) -> Iterator[Ring]:
        """Hold the ring's lock. Raises Moved when the channel has another one, or a fence came since ``fences``."""
        table, ring = self._space.table, self.ring
        words = ring.words
        with table.ring_lock(self.slot, self.name):
            if table.current(self.slot) != self.version or (fences is not None and table.fences != fences):
                raise Moved
            if words[BUSY]:
                ring.rebuild()
            words[BUSY] = 1
            if self.ended:
                ring.ended(self._drain())
            items, room = words[ITEMS], words[ROOM]
            failpoint("ring")
            yield ring
            words[BUSY] = 0
            wake_items = words[ITEMS] != items and words[ITEMS_WANTED] > 0
            wake_room = words[ROOM] != room and words[OPEN] < words[ROOM_WANTED]
            if wake_items:
                words[ITEMS_WANTED] = 0
            if wake_room:
                words[ROOM_WANTED] = 0
        for word, wanted in ((ITEMS, wake_items), (ROOM, wake_room)):
            if wanted:
                futex.wake(self._address + WORD * word)

    def wait(self, word: int, seen: int, limit_s: float) -> None:
        """Wait until a word is not what it was, or the ring is made anew."""
        if limit_s > 0 and self._space.table.current(self.slot) == self.version:
            futex.wait(self._address + WORD * word, seen & 0xFFFFFFFF, limit_s)

    def bury(self, ring: Ring, *, now: bool = False) -> bool:
        """Undo what dead clients began, looking now and then."""
        now_s = self._space.clock.monotonic_s()
        if not now and now_s < self._bury_at_s:
            return False
        self._bury_at_s = now_s + _BURY_S
        return ring.bury(self._is_dead)

    def entry(self, fences: int) -> int | None:
        """An entry to write to; None when none is free."""
        while self.spare:
            with contextlib.suppress(KeyError):  # another thread was faster
                if self.ring.writes(entry := self.spare.pop()):
                    return entry
        with self.locked(fences) as ring:
            return ring.begin()

    def settle(self) -> None:
        """Report the records whose views died."""
        if self.ended:
            with contextlib.suppress(Moved), self.locked():
                pass

    def watch(self, record: RingRecord, block: RecordBlock, holder: Holder) -> None:
        """Report when this holder, on which all views of a record are built, dies."""
        view = _View(holder, self.ended.append)
        view.record, view.block = record, block
        self.views[id(view)] = view

    def _drain(self) -> list[RingRecord]:
        found: list[RingRecord] = []
        while self.ended:
            view = self.ended.popleft()
            self.views.pop(id(view), None)
            found.append(view.record)
        return found

    def _is_dead(self, client: str) -> bool:
        folder = self._space.clients
        if client == self._space.client or is_alive(folder, client):
            return False
        holds = [each for each in clients_in(folder) if each.startswith(client + FORK_MARK)]
        return not any(is_alive(folder, each) for each in holds)


class Rings:
    """The rings of one process in one namespace, and their memory."""

    def __init__(self, space: Namespace, reader: TensorReader, writer: TensorWriter, *, check: bool) -> None:
        self._space, self._reader, self._writer, self._check = space, reader, writer, check
        self._open: dict[str, OpenRing] = {}
        self._ended: list[tuple[deque[_View], dict[int, _View]]] = []
        self._lock_file = shared(space.folder / "rings.lock", LockFile, LockFile)

    def find(self, channel: str) -> OpenRing | None:
        """The ring of a channel, None when it has none. Raises Moved when that cannot be said yet."""
        name = channel + MARK
        found = self._open.get(name)
        table = self._space.table
        if found is not None and table.current(found.slot) == found.version:
            return found
        row = self._space.retry(lambda: self._space.find_row(name))
        if row is None or not row.version:
            self._forget(name)
            return None
        if found is None or found.version != row.version:
            self._forget(name)
            try:
                found = self._open[name] = OpenRing(self._space, self._reader, name)
            except ScriptRefused:
                raise Moved from None
        if not table.current(found.slot):
            table.restore(found.slot, name, lambda: self._version_in(found.slot, name))
        return found

    def make(self, channel: str, order: PublishOrder, items_max: int) -> None:
        """Make the ring of a channel, unless another did meanwhile."""
        name = channel + MARK
        entries = max(_ENTRIES_MIN, _ENTRIES_SHARE * items_max)
        with self._lock_file.locked():
            row = self._space.retry(lambda: self._space.find_row(name))
            if row is None or not row.version:
                raw = bytearray(words_of(entries) * WORD)
                clear(memoryview(raw).cast("Q"), entries, int(self._space.clock.wall_s() * 1e6))
                life = Life(mutable=True)
                self._writer.publish(name, "t", {name: source_of(np.frombuffer(raw, np.uint8))}, order, life, None)

    def write(
        self,
        found: OpenRing,
        entry: int,
        channel: str,
        sources: Mapping[str, TensorSource],
        meta: str,
        order: PublishOrder,
    ) -> tuple[int, int]:
        """Write a record to the block of an entry that this client writes; bytes of its manifest and its CRC."""
        rows, layouts, payload = _layout(tuple((key, each.dtype, each.shape) for key, each in sources.items()))
        manifest = f"{rows}\n{meta}".encode()
        if len(manifest) > MANIFEST_BYTES_MAX:
            raise BadInput(f"the names of a record take {len(manifest)} bytes, the limit is {MANIFEST_BYTES_MAX}")
        start = core.round_up(len(manifest), core.ALIGN_BYTES)
        memory = self._memory(found, entry, channel, start + payload, order).array
        memory[: len(manifest)] = np.frombuffer(manifest, np.uint8)
        failpoint("copying")
        places = [memory[start + each.offset : start + each.offset + each.bytes] for each in layouts]
        if payload <= core.SMALL_BYTES_MAX:
            for to, each in zip(places, sources.values(), strict=True):
                to[:] = each.data
        else:
            self._writer.copier.copy([(to, each.data) for to, each in zip(places, sources.values(), strict=True)])
        failpoint("copied")
        crc = (zlib.crc32(memory[start : start + payload].data) or 1) if self._check else 0
        return len(manifest), crc

    def view(self, found: OpenRing, channel: str, record: RingRecord, as_: str) -> ChannelRecord:
        """A record that was taken, as views of its memory."""
        block = self._lease(found, channel, record.entry, record.block, record.version)
        raw = block.array[: record.manifest_bytes].tobytes()
        rows, _, meta = raw.partition(b"\n")
        start = core.round_up(record.manifest_bytes, core.ALIGN_BYTES)
        layouts, size = _layouts_of(rows, start)
        name = f"{channel}{MARK}{record.number:020d}"
        if self._check and record.crc and (zlib.crc32(block.array[start:size].data) or 1) != record.crc:
            raise errors.TornRead(f"{name}: the bytes are not those that were put", name=name, version=record.number)
        if self._reader.sealed:
            held = self._space.leases.map_block(block.where, True)
            holder, base = held.holder, held.base + block.start
        else:
            holder = (ctypes.c_ubyte * max(size, 1)).from_buffer(block.held.holder, block.held.base + block.start)
            base = 0
        found.watch(record, block, holder)
        tensors = {each.name: view_of(_moved(each, base), holder, 0, as_) for each in layouts}
        return ChannelRecord(name, found.version, record, tensors, json.loads(meta), holder)

    def settle(self) -> None:
        """Report the records whose views died, and forget ended rings without views."""
        for found in list(self._open.values()):
            found.settle()
        for ended, views in self._ended:
            while ended:
                views.pop(id(ended.popleft()), None)
        self._ended = [each for each in self._ended if each[1]]

    def end_idle(self) -> None:
        """End the rings that have been empty and still for a second."""
        now_s = self._space.clock.monotonic_s()
        for name, found in list(self._open.items()):
            words = found.ring.words
            if self._space.table.current(found.slot) != found.version:  # another process ended it
                with contextlib.suppress(Moved):
                    self.find(name.removesuffix(MARK))
            elif (words[ITEMS], words[ROOM]) != found.still[:2]:
                found.still = (words[ITEMS], words[ROOM], now_s)
            elif not words[OPEN] and now_s >= found.still[2] + _IDLE_S:
                if words[ITEMS_WANTED] == 1:  # who still waits says so again within a second
                    words[ITEMS_WANTED] = 2
                    found.still = (*found.still[:2], now_s)
                else:
                    self.end(name.removesuffix(MARK))

    def end_all(self) -> None:
        """End every ring of the namespace without a record, also those whose users are gone."""
        rows = self._space.retry(lambda: self._space.registry.ls_all())
        names = {row.name for row in rows if row.mutable and is_memory(row.name)} | set(self._open)
        for channel in {name.rpartition(MARK)[0] for name in names}:
            self.end(channel)

    def end(self, channel: str) -> bool:
        """Give the memory of a channel back unless it has records; False when it has. Views keep what they show."""
        with self._lock_file.locked():
            try:
                found = self.find(channel)
                if found is not None:
                    with found.locked() as ring:
                        found.bury(ring, now=True)
                        if ring.words[OPEN]:
                            return False
                        self._space.delete(found.name, expected=found.version)
                        ring.words[ITEMS] += 1  # who waits looks for the next ring
            except (Moved, errors.Corrupt):
                return False
            self._forget(channel + MARK)
            for row in self._space.retry(lambda: self._space.registry.ls_all(channel + MARK)):
                if row.mutable and is_memory(row.name):
                    self._space.delete(row.name)
        return True

    def close(self) -> None:
        """End what is empty, and let go of all but what views show."""
        for name in list(self._open):
            with contextlib.suppress(RotaError, ScriptRefused):
                self.end(name.removesuffix(MARK))
            self._forget(name)

    def before_fork(self) -> None:
        """What is taken or viewed now may be viewed by the child as long as it lives."""
        for found in self._open.values():
            for view in list(found.views.values()):
                found.ring.abandon_block(view.record)

    def _version_in(self, slot: int, name: str) -> int:
        row = self._space.retry(lambda: self._space.find_row(name))
        return row.version if row is not None and row.slot == slot else 0

    def _forget(self, name: str) -> None:
        found = self._open.pop(name, None)
        if found is not None and found.views:  # not its table, whose memory goes
            self._ended.append((found.ended, found.views))

    def _memory(self, found: OpenRing, entry: int, channel: str, size: int, order: PublishOrder) -> RecordBlock:
        """The block of an entry, of at least ``size`` bytes; another one when it has none or a smaller one."""
        before, version, capacity = found.ring.block(entry)
        if version and capacity >= size:
            with contextlib.suppress(Moved, errors.Corrupt):
                return self._lease(found, channel, entry, before, version)
        with found.locked() as ring:
            number = ring.number()
        wanted = core.stepped(size, _SIZE_STEPS, core.ALIGN_BYTES)
        name, life = _block_name(channel, number), Life(mutable=True)
        pending = self._writer.reserve(name, "t", lay_out([(name, "uint8", (wanted,))], order, life, None), order, life)
        with undone_if_raised(self._writer.abort, pending):
            made = self._writer.commit(pending)
        failpoint("block")
        found.ring.set_block(entry, number, made.id, wanted)
        if version:
            found.blocks.pop(entry, None)
            self._space.delete(_block_name(channel, before))
        return self._lease(found, channel, entry, number, made.id)

    def _lease(self, found: OpenRing, channel: str, entry: int, block: int, version: int) -> RecordBlock:
        """The memory of an entry, leased by this process. Raises Moved when it was deleted."""
        known = found.blocks.get(entry)
        if known is None or known.version != version:
            try:
                leased, held, start = self._reader.open_block(_block_name(channel, block), f"v{version}")
            except ScriptRefused as refused:
                raise Moved from refused
            payload = leased.blocks[0].bytes - start
            known = found.blocks[entry] = RecordBlock(version, held, leased.blocks[0], start, payload)
        return known


def repeated(act: Callable[[], _T]) -> _T:
    """Do something with a ring, again while it is made anew or the registry finds it. Raises PublishBlocked."""
    for attempt in range(_MOVED_TRIES_MAX):
        try:
            return act()
        except Moved:
            if attempt:
                blocking_sleep(_MOVED_S)
    raise errors.PublishBlocked("the channel is made anew without end", name="", pid=0)


def _bytes_of(held: HeldBlock, start: int) -> Bytes:
    """The bytes of a block behind ``start``."""
    raw = np.frombuffer(held.holder, np.uint8)  # pyright: ignore[reportCallIssue, reportArgumentType]  # ctypes arrays are buffers
    return raw[held.base + start :]


def _block_name(channel: str, number: int) -> str:
    return f"{channel}{MARK}{number:020d}"


def _moved(layout: Layout, by: int) -> Layout:
    if not by:
        return layout
    return Layout(layout.name, layout.dtype, layout.shape, layout.offset + by, layout.bytes)


@lru_cache(256)
def _layout(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[str, Sequence[Layout], int]:
    """The tensors of a record as JSON, their places from the begin of the payload, and its bytes."""
    sizes = [core.payload_bytes(dtype, shape) for _, dtype, shape in tensors]
    offsets, total = core.pack(sizes)
    layouts = [Layout(*each, offset, size) for each, offset, size in zip(tensors, offsets, sizes, strict=True)]
    return (
        _json([[*each, offset, size] for each, offset, size in zip(tensors, offsets, sizes, strict=True)]),
        layouts,
        total,
    )


@lru_cache(256)
def _layouts_of(rows: bytes, start: int) -> tuple[Sequence[Layout], int]:
    found: list[Json] = json.loads(rows)
    layouts = [Layout(name, dtype, tuple(shape), start + off, size) for name, dtype, shape, off, size in found]
    return layouts, max((each.offset + each.bytes for each in layouts), default=start)
