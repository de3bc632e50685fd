"""Channels of a namespace: bounded streams of records with tensors, and events of names.

The records of a channel lie in shared memory that its users lock in turn (``records.py``, ``ring.py``); neither put nor
take asks the registry. A record is *taken* as long as its consumer lives: when that dies, it is the first again.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rota.runtime.undo import undone_if_raised
from rota.spec.errors import BadInput, RegistryUnavailable
from rota.tensors import errors
from rota.tensors.arrays import TensorSource, source_of
from rota.tensors.core import Json, Tensor, check_count, check_name
from rota.tensors.errors import failpoint
from rota.tensors.namespace import Namespace
from rota.tensors.records import META_BYTES_MAX, ChannelRecord, Moved, OpenRing, repeated
from rota.tensors.registry import RedisMachine, ScriptRefused, refusal
from rota.tensors.ring import IDLE, ITEMS, ITEMS_WANTED, MARK, OPEN, ROOM, ROOM_WANTED, Ring, RingRecord
from rota.tensors.session import Session
from rota.tensors.writer import PublishOrder

_ITEMS_MAX: Final = 16_384
_RECHECK_S: Final = 0.1
_WAKE_SHARE, _WAKE_OF = 3, 4
"""A producer without room is woken when at most this share of it is taken: not at each record."""


class Channel:
    """One channel as this process uses it; producers and consumers may be any number of processes.

    ``full`` says what ``put`` does when ``items_max`` records wait or are being worked on: ``block``, or
    ``drop_oldest`` of those that no consumer has. ``dropped`` counts them. The first ``put`` or ``take`` fences the
    label of this process at its epoch: a process that it replaced can no longer put, take or acknowledge.
    """

    def __init__(self, session: Session, name: str, order: PublishOrder, *, items_max: int, full: str) -> None:
        if full not in ("block", "drop_oldest"):
            raise BadInput(f"full={full!r}: block or drop_oldest; records spill by themselves with ROTA_SPILL_DIR")
        check_count("items_max", items_max, 1, _ITEMS_MAX)
        self.name = check_name(name)
        check_name(f"{name}{MARK}{0:020d}")
        self._session, self._space, self._rings, self._order = session, session.space, session.rings, order
        self._items_max, self._full, self._fenced = items_max, full, not (order.label and order.epoch)
        self._fences: int | None = None
        self.dropped: Counter[str] = Counter()

    def put(self, tensors: Mapping[str, Tensor], meta: Json = None, *, timeout_s: float = 0.0) -> int:
        """Append a record, waiting ``timeout_s`` for room; its number. Tensors on a device are copied to the CPU, where
        consumers get them. Raises BackPressure, else as ``Plane.put``."""
        text = json.dumps(meta)
        if len(text) > META_BYTES_MAX:
            raise BadInput(f"meta of a record takes over {META_BYTES_MAX} bytes; put it into a tensor")
        sources = {str(key): source_of(value) for key, value in tensors.items()}
        self._fence()
        deadline_s = self._space.deadline_s(timeout_s)
        while True:
            found, number, seen = repeated(lambda: self._put(sources, text))
            if number is not None:
                self._space.counters["puts"] += 1
                return number
            left_s = deadline_s - self._space.clock.monotonic_s()
            if left_s <= 0:
                full = f"{self.name}: the channel holds {seen[1]} records"
                raise errors.BackPressure(full, name=self.name, depth=seen[1])
            found.wait(ROOM, seen[0], min(left_s, _RECHECK_S))

    def take(self, n_max: int = 1, *, timeout_s: float = 0.0, as_: str = "torch") -> list[ChannelRecord]:
        """The next records that no consumer has, at most ``n_max``; none when none came in time. Raises StaleEpoch."""
        space = self._space
        check_count("n_max", n_max, 1)
        self._fence()
        deadline_s = space.deadline_s(timeout_s)
        while True:
            created = space.table.creations
            ring, seen, found = repeated(lambda: self._take(n_max, as_))
            left_s = deadline_s - space.clock.monotonic_s()
            if found or left_s <= 0:
                return found
            if ring is None:
                self._session.reader.wait_change(0, created, min(left_s, _RECHECK_S))
            else:
                ring.wait(ITEMS, seen, min(left_s, _RECHECK_S))

    def ack(self, *records: ChannelRecord) -> None:
        """The records are done with: they go, and their bytes with their last views. Several at once cost little more
        than one.

        Raises StaleEpoch when a later epoch took over from this process: the records are its successor's. Raises
        ProtocolBreach for one that was given back or acknowledged before, when all others are acknowledged.
        """
        left = [record for record in records if record.lease is None]
        for record in repeated(lambda: self._ack([record for record in records if record.lease is not None])) + left:
            text = f"{record.name} is not this consumer's any more: it was given back or acknowledged"
            raise errors.ProtocolBreach(text, rule="ack", name=record.name)

    def nack(self, record: ChannelRecord, reason: str = "") -> None:
        """Give a record back: it is the first again, for any consumer. Its tensors must not be used any more."""
        record.tensors.clear()
        self.dropped[f"nack: {reason}"] += 1
        record.lease = None
        repeated(lambda: self._give_back([record.place], record.ring))

    def depth(self) -> int:
        """Records that wait or are being worked on."""
        return repeated(self._depth)[1]

    def drain(self, timeout_s: float) -> None:
        """Wait until every record was acknowledged. Raises WaitTimeout with how many are left."""
        deadline_s = self._space.deadline_s(timeout_s)
        while True:
            ring, left, seen = repeated(self._depth)
            left_s = deadline_s - self._space.clock.monotonic_s()
            if not left or ring is None:
                return
            if left_s <= 0:
                raise errors.WaitTimeout(f"{self.name}: {left} records were not acknowledged", name=self.name)
            ring.wait(ROOM, seen, min(left_s, _RECHECK_S))

    def _put(self, sources: Mapping[str, TensorSource], meta: str) -> tuple[OpenRing, int | None, tuple[int, int]]:
        """One try to put a record: the ring, its number or None, and what to wait on if it is full."""
        fences, rings = self._look(), self._rings
        if (found := rings.find(self.name)) is None:
            rings.make(self.name, self._order, self._items_max)
            raise Moved
        full = found.ring.words[OPEN] >= self._items_max  # a first look, before anything is copied
        entry = None if full else found.entry(fences)
        try:
            written = (0, 0) if entry is None else rings.write(found, entry, self.name, sources, meta, self._order)
            with found.locked(fences) as ring:
                idle = entry is not None or ring.words[IDLE] > 0
                full = entry is None or ring.words[OPEN] >= self._items_max
                if full and not (self._make_room(found, ring) and idle):
                    wanted = self._items_max * _WAKE_SHARE // _WAKE_OF + 1
                    ring.words[ROOM_WANTED] = max(ring.words[ROOM_WANTED], wanted)
                    return found, None, (ring.words[ROOM], ring.words[OPEN])
                if entry is None or (number := ring.commit(entry, *written)) is None:
                    raise Moved
                if (after := ring.begin()) is not None:
                    found.spare.add(after)
            failpoint("committed")
            return found, number, (0, 0)
        finally:
            if entry is not None and found.ring.writes(entry):
                found.spare.add(entry)

    def _make_room(self, found: OpenRing, ring: Ring) -> bool:
        """Whether there is room by now, maybe since dead consumers or the oldest records made it."""
        found.bury(ring)
        while ring.words[OPEN] >= self._items_max and self._full == "drop_oldest" and ring.drop_oldest():
            self.dropped["full"] += 1
        return ring.words[OPEN] < self._items_max

    def _take(self, n_max: int, as_: str) -> tuple[OpenRing | None, int, list[ChannelRecord]]:
        """One try to take records: the ring, what to wait on, and the records."""
        fences, taken = self._look(), list[RingRecord]()
        if (found := self._rings.find(self.name)) is None:
            return None, 0, []

        def give_back() -> None:
            with contextlib.suppress(Moved, errors.PublishBlocked), found.locked() as ring:
                ring.give_back(taken)

        with undone_if_raised(give_back):
            with found.locked(fences) as ring:
                found.bury(ring)
                ring.take(n_max, taken)
                if not taken:
                    ring.words[ITEMS_WANTED] = 1
                seen = ring.words[ITEMS]
            failpoint("leased")
            records = [self._rings.view(found, self.name, each, as_) for each in taken]
        self._space.counters["gets"] += len(records)
        return found, seen, records

    def _ack(self, records: list[ChannelRecord]) -> list[ChannelRecord]:
        """Acknowledge records; those that this process does not have."""
        fences, found = self._look(), self._rings.find(self.name)
        mine = [record for record in records if found is not None and record.ring == found.version]
        lost: list[ChannelRecord] = []
        if found is not None and mine:
            with found.locked(fences) as ring:
                lost = [record for record in mine if not ring.ack(record.place)]
        for record in records:  # those of another ring were deleted with it
            record.lease = None
        return lost

    def _give_back(self, records: list[RingRecord], ring_version: int) -> None:
        self._space.check()
        found = self._rings.find(self.name)
        if found is not None and found.version == ring_version:
            with found.locked() as ring:
                ring.give_back(records)

    def _depth(self) -> tuple[OpenRing | None, int, int]:
        self._space.check()
        if (found := self._rings.find(self.name)) is None:
            return None, 0, 0
        with found.locked() as ring:
            found.bury(ring)
            ring.words[ROOM_WANTED] = max(ring.words[ROOM_WANTED], 1)
            return found, ring.words[OPEN], ring.words[ROOM]

    def _fence(self) -> None:
        if not self._fenced:
            self._session.fence(self._order.label, self._order.epoch)
            self._fenced = True

    def _look(self) -> int:
        """The count of fences at which this process was not fenced. Raises StaleEpoch, ForkedClient, ClosedPlane."""
        space, order = self._space, self._order
        space.check()
        fences = space.table.fences
        if fences != self._fences:
            try:
                space.retry(lambda: space.registry.check(order.label, order.epoch))
            except ScriptRefused as refused:
                refusal(refused, self.name, epoch=order.epoch)
            self._fences = fences
        return fences


_POLL_MS: Final = 200
_BATCH_MAX: Final = 500
_WATCHED_MS: Final = 10_000
"""For this time after its last look a watch still makes every put commit at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEvent:
    """One fact: ``published deleted reclaimed left``. ``id`` orders events; ``at_s`` is the wall clock of its cause."""

    id: str
    kind: str
    name: str
    version: int
    step: int
    at_s: float


class WatchGap(errors.TensorError):
    """Events were dropped before they were read (about 10,000 are kept), or the registry was rebuilt: list again."""

    code = "TENSOR_WATCH_GAP"


class Watch:
    """Events of names with a prefix, from now on or from behind ``after``, until ``close()``.

    Iterate it, or give a callback, which is called on one thread of its own. Raises WatchGap from the iteration.
    """

    def __init__(
        self,
        space: Namespace,
        machine: RedisMachine,
        prefix: str,
        after: str | None,
        callback: Callable[[TensorEvent], object] | None,
    ) -> None:
        self._space, self._machine, self._prefix = space, machine, prefix
        self._epoch = space.table.epoch
        self._look()
        self._at = machine.last_event() if after is None else "-".join(map(str, _order(after)))
        self._resumed = after is not None
        self._closed = threading.Event()
        self.failure: WatchGap | None = None
        if callback is not None:
            self._thread = threading.Thread(target=self._call, args=(callback,), name="rota-tensors-watch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[TensorEvent]:
        while not self._closed.is_set() and not self._space.closed:
            self._look()
            self._check_gap()
            try:
                found = self._machine.events(self._at, _POLL_MS, _BATCH_MAX)
            except RegistryUnavailable as error:
                raise WatchGap("the registry went away during a watch", hint="list the names again") from error
            self._resumed = len(found) == _BATCH_MAX  # so far behind that events may be dropped before they are read
            for at, fields in found:
                self._at = at
                if fields["name"].startswith(self._prefix):
                    yield TensorEvent(
                        id=at, kind=fields["kind"], name=fields["name"], version=int(fields["version"]),
                        step=int(fields["step"]), at_s=int(fields["at"]) / 1000,
                    )  # fmt: skip

    def close(self) -> None:
        """End the watch; an iteration ends within a fraction of a second."""
        self._closed.set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _look(self) -> None:
        """Let every put commit from now on, and settle those that did not."""
        watched = self._space.table.watched
        self._space.table.watch(_WATCHED_MS)
        if not watched:
            self._space.retry(self._space.settle_all)

    def _check_gap(self) -> None:
        if self._space.table.epoch != self._epoch:
            raise WatchGap("the registry was rebuilt during a watch", hint="list the names again")
        if self._resumed:
            first = self._machine.last_event(first=True)
            if self._at != "0" and _order(first) > _order(self._at) and self._machine.last_event() != self._at:
                raise WatchGap(f"events behind {self._at} were dropped", hint="list the names again")
            self._resumed = False

    def _call(self, callback: Callable[[TensorEvent], object]) -> None:
        try:
            for event in self:
                callback(event)
        except WatchGap as gap:
            self.failure = gap


def _order(event_id: str) -> tuple[int, int]:
    first, _, second = event_id.partition("-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise BadInput(f"after={event_id!r}: the id of an event") from None
