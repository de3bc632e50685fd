"""Streams of a namespace: bounded channels of records with tensors, and events of names.

A record is a group named ``<channel>/#<number>``, so leases, sweeps, quotas and recovery hold for it as for any name.
It is *taken* as long as a process leases it: when its consumer dies, the sweep ends the lease and the record is the
first again. No list can disagree with the records.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rota.runtime.clock import blocking_sleep
from rota.spec.errors import BadInput, RegistryUnavailable
from rota.tensors import errors
from rota.tensors.arrays import source_of
from rota.tensors.core import Json, Tensor, check_count, check_name
from rota.tensors.reader import ChannelRecord
from rota.tensors.registry import RedisMachine, ScriptRefused, refusal
from rota.tensors.session import Session
from rota.tensors.space import Space
from rota.tensors.writer import Life, PublishOrder

META_BYTES_MAX: Final = 64 << 10
_ITEMS_MAX: Final = 16_384
_RECHECK_S: Final = 0.1
_POLL_FIRST_S: Final = 0.0002
_POLL_MAX_S: Final = 0.02
_MARK: Final = "/#"


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
        self._prefix = name + _MARK
        check_name(f"{self._prefix}{0:020d}")
        self._session, self._space, self._order = session, session.space, order
        self._items_max, self._full, self._fenced = items_max, full, not (order.label and order.epoch)
        self.dropped: Counter[str] = Counter()

    def put(self, tensors: Mapping[str, Tensor], meta: Json = None, *, timeout_s: float = 0.0) -> int:
        """Append a record, waiting ``timeout_s`` for room; its number. Raises BackPressure, else as ``Plane.put``."""
        if len(json.dumps(meta)) > META_BYTES_MAX:
            raise BadInput(f"meta of a record takes over {META_BYTES_MAX} bytes; put it into a tensor")
        sources = {str(key): source_of(value) for key, value in tensors.items()}
        self._fence()
        number = self._space.retry(self._space.registry.next)
        name, life = f"{self._prefix}{number:020d}", Life(room=self._items_max)
        deadline_s, delay_s = self._space.deadline_s(timeout_s), _POLL_FIRST_S
        while True:
            try:
                self._session.writer.publish(name, "g", sources, self._order, life, meta)
                return number
            except errors.BackPressure:
                if self._full == "drop_oldest" and self._drop_oldest():
                    continue
                if self._space.clock.monotonic_s() >= deadline_s:
                    raise
            blocking_sleep(delay_s)
            delay_s = min(2 * delay_s, _POLL_MAX_S)

    def take(self, n_max: int = 1, *, timeout_s: float = 0.0, as_: str = "torch") -> list[ChannelRecord]:
        """The next records that no consumer has, at most ``n_max``; none when none came in time. Raises StaleEpoch."""
        space, order = self._space, self._order
        self._fence()
        deadline_s = space.deadline_s(timeout_s)
        check_count("n_max", n_max, 1)
        while True:
            seen = space.table.creations
            try:
                found = self._session.reader.take(self._prefix, n_max, order.label, order.epoch, as_)
            except ScriptRefused as refused:
                refusal(refused, self.name, epoch=order.epoch)
            left_s = deadline_s - space.clock.monotonic_s()
            if found or left_s <= 0:
                return found
            self._session.reader.wait_change(0, seen, min(left_s, _RECHECK_S))

    def ack(self, record: ChannelRecord) -> None:
        """The record is done with: it goes, and its bytes with its last view.

        Raises StaleEpoch when a later epoch took over from this process: the record is its successor's. Raises
        ProtocolBreach for a record that was given back or acknowledged before.
        """
        space, order = self._space, self._order
        if record.lease is None:
            text = f"{record.name} is not this consumer's any more: it was given back or acknowledged"
            raise errors.ProtocolBreach(text, rule="ack", name=record.name)
        try:
            space.delete(record.name, label=order.label, epoch=order.epoch)
        except ScriptRefused as refused:
            refusal(refused, record.name, epoch=order.epoch)
        record.lease = None

    def nack(self, record: ChannelRecord, reason: str = "") -> None:
        """Give a record back: it is the first again, for any consumer. Its tensors must not be used any more."""
        record.tensors.clear()
        record.lease = None
        self.dropped[f"nack: {reason}"] += 1
        self._session.release_ended()

    def depth(self) -> int:
        """Records that wait or are being worked on."""
        return sum(bool(row.version) for row in self._space.retry(lambda: self._space.registry.ls_all(self._prefix)))

    def drain(self, timeout_s: float) -> None:
        """Wait until every record was acknowledged. Raises WaitTimeout with how many are left."""
        deadline_s, delay_s = self._space.deadline_s(timeout_s), _POLL_FIRST_S
        while left := self.depth():
            if self._space.clock.monotonic_s() >= deadline_s:
                raise errors.WaitTimeout(f"{self.name}: {left} records were not acknowledged", name=self.name)
            blocking_sleep(delay_s)
            delay_s = min(2 * delay_s, _POLL_MAX_S)

    def _fence(self) -> None:
        if not self._fenced:
            self._session.fence(self._order.label, self._order.epoch)
            self._fenced = True

    def _drop_oldest(self) -> bool:
        for row in self._space.retry(lambda: self._space.registry.ls(self._prefix)):
            idle = row.name.startswith(self._prefix) and row.version and row.refs == 0
            if idle and self._space.delete(row.name, expected=row.version, idle=True):
                self.dropped["full"] += 1
                return True
        return False


_POLL_MS: Final = 200
_BATCH_MAX: Final = 500


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
        space: Space,
        machine: RedisMachine,
        prefix: str,
        after: str | None,
        callback: Callable[[TensorEvent], object] | None,
    ) -> None:
        self._space, self._machine, self._prefix = space, machine, prefix
        self._epoch = space.table.epoch
        self._at = machine.last_event() if after is None else "-".join(map(str, _order(after)))
        self._resumed = after is not None
        self._closed = threading.Event()
        self.failure: WatchGap | None = None
        if callback is not None:
            self._thread = threading.Thread(target=self._call, args=(callback,), name="rota-tensors-watch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[TensorEvent]:
        while not self._closed.is_set() and not self._space.closed:
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
