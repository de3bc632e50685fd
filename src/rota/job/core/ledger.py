"""The ledger of a stream: every item from its admission to the commit that trained on it, or the reason it went.

An item is ``pending`` (admitted, without a producer), ``running`` (leased to a producer under its epoch), ``queued``
(produced, waits for a batch) or ``leased`` (in a batch of the loop). It ends as trained, at a commit, or as dropped,
with a reason. Conservation, which holds after every step:
``admitted = pending + running + queued + leased + trained + dropped``.

The age of an item is the model version at its lease minus the version its producer began with; ``Bound(versions, by)``
keeps it within ``versions``:

- ``pace`` admits only while fewer than ``(versions + 1) * batch`` items are open. With batches in admission order and a
  batch a version this is ``accepted < (versions + v + 1) * batch`` of Fu et al. 2025, "AReaL" (arXiv 2505.24298),
  section 5.1, with the counters of what was consumed subtracted on both sides, so it also holds when the loop commits
  without a batch and after a recovery. What got too old nevertheless is produced again.
- ``drop`` admits up to ``cap`` and drops what is too old when a batch is made; ``abort`` also gives up work under way
  as soon as a new version makes it too old.

A cut of the ledger is part of each commit. An item that is open in a cut is produced again after a recovery, so what a
producer or the loop held when it died is neither lost nor counted twice.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypedDict

from rota.spec.codec import JsonObject
from rota.spec.ids import NO_EPOCH, Epoch, InstanceId
from rota.spec.job import StreamSpec

Uid = int | str
"""Index in the source of the stream, or the key under which the loop put the item."""
Order = Literal["admission", "arrival"]


class ItemState(StrEnum):
    """Where an open item is."""

    PENDING = "pending"
    RUNNING = "running"
    QUEUED = "queued"
    LEASED = "leased"


class DropReason(StrEnum):
    """Why an item left without being trained on."""

    STALE = "stale"
    ABORTED = "aborted"
    BAD_DATA = "bad_data"
    OVERFLOW = "overflow"


Runs = list[int | str | list[int]]
"""Uids in order, runs of following numbers as ``[first, last]``."""


class LedgerCut(TypedDict):
    """A ledger as JSON, part of the cursor of a commit."""

    admitted: int
    cursor: int
    trained: int
    dropped: dict[str, int]
    again: int
    age: int
    pending: int
    running: int
    queued: int
    open: Runs


class FlowCut(TypedDict, total=False):
    """What a commit says of its loop, part of the cursor; what is empty is left out."""

    streams: dict[str, LedgerCut]
    kept: JsonObject
    """The JSON values of the loop: ``Flow.kept``."""
    keeps: bool
    """Items that no source gives again are part of the saved state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One open item. ``number`` counts admissions.

    ``version`` is the model version that its producer began with; None when no part of it has been produced.
    """

    uid: Uid
    number: int
    place: ItemState = ItemState.PENDING
    version: int | None = None
    holder: InstanceId | None = None
    epoch: Epoch = NO_EPOCH
    failed_on: frozenset[InstanceId] = frozenset()


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The ledger of one stream; changed by its methods only. ``every`` is the cadence of the weights edge in commits.

    Each method costs O(items it changes), but for ``lease``, which passes over those leased already.
    """

    spec: StreamSpec
    every: int = 1
    produced: bool = True
    """A path produces the items, so one may be produced again; False when the loop puts them in."""
    admitted: int = 0
    cursor: int = 0
    """How many items of the source were admitted: the next index."""
    trained: int = 0
    again: int = 0
    """Productions that were begun anew: holder lost, operation raised, too old, or open at a recovery."""
    age_max: int = 0
    """Oldest item of the batches since the last commit, in versions."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    _open: dict[int, Item] = field(default_factory=dict[int, Item])
    _numbers: dict[Uid, int] = field(default_factory=dict[Uid, int])
    _places: dict[ItemState, dict[int, None]] = field(default_factory=lambda: {place: {} for place in ItemState})
    _pending: list[int] = field(default_factory=list[int])
    _versions: dict[int, dict[int, None]] = field(default_factory=dict[int, dict[int, None]])

    def count(self, place: ItemState) -> int:
        """Open items at one place."""
        return len(self._places[place])

    @property
    def open(self) -> int:
        """Items that are neither trained nor dropped."""
        return len(self._open)

    def find(self, uid: Uid) -> Item | None:
        """The open item of that uid."""
        number = self._numbers.get(uid)
        return None if number is None else self._open[number]

    def uids(self) -> tuple[Uid, ...]:
        """The open items in the order of their admission."""
        return tuple(item.uid for item in self._open.values())

    def stillest(self) -> Item | None:
        """Of the items that are being produced, or else of those that wait for it, the one that moved longest ago."""
        numbers = self._places[ItemState.RUNNING] or self._places[ItemState.PENDING]
        return self._open[next(iter(numbers))] if numbers else None

    def room(self, batch: int) -> int:
        """How many items may be admitted now, for a consumer that takes ``batch`` at once; may be negative."""
        bound = self.spec.stale
        most = self.spec.cap + (self.count(ItemState.QUEUED) if self.spec.full == "drop_oldest" else 0)
        if bound is not None and bound.by == "pace":
            most = min(most, (bound.versions + 2 - self.every) * batch)
        return most - self.open

    def claim(self) -> Iterator[Item]:
        """Items that wait and were not claimed since they began to, in the order of their admission."""
        while self._pending:
            number = heapq.heappop(self._pending)
            while self._pending and self._pending[0] == number:
                heapq.heappop(self._pending)
            item = self._open.get(number)
            if item is not None and item.place is ItemState.PENDING:
                yield item

    def check(self) -> None:
        """Count everything anew. Raises AssertionError when an item was lost or counted twice."""
        ended = self.trained + self.dropped.total()
        assert self.admitted == self.open + ended, f"{self.admitted} admitted, {self.open} open, {ended} ended"
        held = Counter(item.place for item in self._open.values())
        assert all(held[place] == self.count(place) for place in ItemState), (held, self._places)
        assert len(self._numbers) == self.open and all(
            number == item.number == self._numbers[item.uid] for number, item in self._open.items()
        )

    def admit(self, uid: Uid) -> Item:
        """Take in a new item. The oldest queued one goes for it when the stream is full and ``full: drop_oldest``.

        Raises ValueError for a uid that is open.
        """
        if uid in self._numbers:
            raise ValueError(f"{self.spec.name}: item {uid!r} is open already")
        if self.open >= self.spec.cap and self.spec.full == "drop_oldest" and self._places[ItemState.QUEUED]:
            self._end(self._open[min(self._places[ItemState.QUEUED])], DropReason.OVERFLOW)
        self.admitted += 1
        item = Item(uid=uid, number=self.admitted)
        self._numbers[uid] = item.number
        self._move(item, ItemState.PENDING)
        if isinstance(uid, int):
            self.cursor = max(self.cursor, uid + 1)
        return item

    def start(self, uid: Uid, holder: InstanceId, epoch: Epoch, version: int) -> bool:
        """Lease an item to a producer that has model ``version``; a further stage keeps the oldest version.

        False when the item is neither pending nor running: it went meanwhile, and no work should be begun.
        """
        item = self.find(uid)
        if item is None or item.place not in (ItemState.PENDING, ItemState.RUNNING):
            return False
        oldest = version if item.version is None else min(item.version, version)
        self._move(replace(item, holder=holder, epoch=epoch, version=oldest), ItemState.RUNNING)
        return True

    def produce(self, uid: Uid, holder: InstanceId, epoch: Epoch, *, last: bool = True) -> bool:
        """The producer finished its stage; behind the ``last`` one the item waits for a batch.

        False for a report of an instance that no longer holds the item: it is ignored.
        """
        item = self.find(uid)
        if item is None or item.place is not ItemState.RUNNING or (item.holder, item.epoch) != (holder, epoch):
            return False
        self._move(replace(item, holder=None, epoch=NO_EPOCH), ItemState.QUEUED if last else ItemState.RUNNING)
        return True

    def queue(self, uid: Uid, version: int) -> None:
        """A pending item that needs no producer, made at model ``version``, waits for a batch."""
        item = self.find(uid)
        assert item is not None and item.place is ItemState.PENDING, f"{self.spec.name}: {uid!r} is not pending"
        self._move(replace(item, version=version), ItemState.QUEUED)

    def release(self, uid: Uid, *, failed: bool = False, keep: bool = False) -> int:
        """The holder is lost, or its operation ``failed``: the item waits again.

        ``keep``: an earlier stage is done, and the item continues from there. Returns the number of different instances
        whose operation has failed on it.
        """
        item = self.find(uid)
        if item is None or item.place is not ItemState.RUNNING:
            return 0
        failed_on = item.failed_on | {item.holder} if failed and item.holder else item.failed_on
        self._again(replace(item, failed_on=failed_on), version=item.version if keep else None)
        return len(failed_on)

    def release_holder(self, holder: InstanceId, epoch: Epoch) -> tuple[Uid, ...]:
        """Every item that ``holder`` runs under an epoch before ``epoch`` waits again: that process is gone."""
        gone = [self._open[number] for number in self._places[ItemState.RUNNING]]
        lost = [item for item in gone if item.holder == holder and item.epoch < epoch]
        for item in lost:
            self._again(item)
        return tuple(item.uid for item in lost)

    def drop(self, uid: Uid, reason: DropReason) -> bool:
        """End an item for a reason. False when it has ended before."""
        item = self.find(uid)
        if item is not None:
            self._end(item, reason)
        return item is not None

    def refresh(self, version: int) -> tuple[Uid, ...]:
        """A new model ``version``: what has become too old goes or waits again. Their uids: work on them is in vain."""
        bound = self.spec.stale
        if bound is None:
            return ()
        too_old: list[Uid] = []
        for item in list(self._older_than(version - bound.versions)):
            if item.place is ItemState.RUNNING and bound.by == "drop":
                continue
            too_old.append(item.uid)
            if bound.by == "pace" and self.produced:
                self._again(item)
            else:
                self._end(item, DropReason.ABORTED if item.place is ItemState.RUNNING else DropReason.STALE)
        return tuple(too_old)

    def lease(
        self, size: int, holder: InstanceId, epoch: Epoch, version: int, *, final: bool, order: Order = "admission"
    ) -> tuple[Item, ...]:
        """The next batch, leased to the loop: ``size`` items, fewer only if ``final`` (no more will be admitted).

        Empty while the batch is not complete: in admission order the first ``size`` items must all be queued. Call
        ``refresh`` before, so that none is too old.
        """
        queued = self._places[ItemState.QUEUED]
        waiting = self.open - self.count(ItemState.LEASED)
        wanted = min(size, waiting) if final else size
        if wanted == 0 or len(queued) < wanted:
            return ()
        if order == "arrival":
            chosen = [self._open[number] for number, _ in zip(queued, range(wanted))]
        else:
            chosen = list(self._first(wanted))
            if any(item.place is not ItemState.QUEUED for item in chosen):
                return ()
        leased = [replace(item, holder=holder, epoch=epoch) for item in chosen]
        for item in leased:
            self._move(item, ItemState.LEASED)
            self.age_max = max(self.age_max, version - (item.version or 0))
        return tuple(leased)

    def leased(self) -> tuple[int, ...]:
        """The numbers of the leased items; with a ``cut`` of the same moment, what its commit trains."""
        return tuple(self._places[ItemState.LEASED])

    def committed(self, numbers: Iterable[int]) -> tuple[Uid, ...]:
        """A commit is durable: the items that were leased at its cut are trained, exactly once. Their uids."""
        done = [self._open[number] for number in numbers]
        for item in done:
            self._close(item)
        self.trained += len(done)
        if not self.count(ItemState.LEASED):
            self.age_max = 0
        return tuple(item.uid for item in done)

    def cut(self) -> LedgerCut:
        """The ledger as JSON as it will be once the commit that carries it is durable."""
        left = [item for item in self._open.values() if item.place is not ItemState.LEASED]
        return {
            "admitted": self.admitted,
            "cursor": self.cursor,
            "trained": self.trained + self.count(ItemState.LEASED),
            "dropped": dict(sorted(self.dropped.items())),
            "again": self.again,
            "age": self.age_max,
            "pending": self.count(ItemState.PENDING),
            "running": self.count(ItemState.RUNNING),
            "queued": self.count(ItemState.QUEUED),
            "open": ranges(item.uid for item in left),
        }

    @staticmethod
    def restored(spec: StreamSpec, cut: LedgerCut | None, *, every: int = 1, produced: bool = True) -> Ledger:
        """The ledger of a cut: every open item waits to be produced again, in the order of its admission."""
        made = Ledger(spec=spec, every=every, produced=produced)
        if not cut:
            return made
        for uid in uids_of(cut["open"]):
            made.admit(uid)
        made.trained, made.dropped = cut["trained"], Counter(cut["dropped"])
        made.admitted = made.trained + made.dropped.total() + made.open
        made.again = cut["again"] + made.open
        made.cursor = cut["cursor"]
        # Numbers continue after those of the open items; they only give the order.
        made._renumber()
        assert made.admitted == cut["admitted"], f"{spec.name}: a cut that does not add up: {cut}"
        return made

    def _move(self, item: Item, to: ItemState) -> None:
        before = self._open.get(item.number)
        if before is not None:
            del self._places[before.place][item.number]
            self._forget_version(before)
        moved = replace(item, place=to)
        self._open[item.number] = moved
        self._places[to][item.number] = None
        if to in (ItemState.RUNNING, ItemState.QUEUED) and item.version is not None:
            self._versions.setdefault(item.version, {})[item.number] = None
        elif to is ItemState.PENDING:
            heapq.heappush(self._pending, item.number)

    def _close(self, item: Item) -> None:
        del self._open[item.number], self._places[item.place][item.number], self._numbers[item.uid]
        self._forget_version(item)

    def _end(self, item: Item, reason: DropReason) -> None:
        self._close(item)
        self.dropped[reason.value] += 1

    def _again(self, item: Item, version: int | None = None) -> None:
        self.again += 1
        self._move(replace(item, holder=None, epoch=NO_EPOCH, version=version), ItemState.PENDING)

    def _forget_version(self, item: Item) -> None:
        if item.version is not None and (numbers := self._versions.get(item.version)) is not None:
            numbers.pop(item.number, None)
            if not numbers:
                del self._versions[item.version]

    def _older_than(self, version: int) -> Iterator[Item]:
        for old in [one for one in self._versions if one < version]:
            yield from [self._open[number] for number in self._versions[old]]

    def _first(self, size: int) -> Iterator[Item]:
        """The first admitted items that no batch holds."""
        for item in self._open.values():
            if item.place is not ItemState.LEASED:
                yield item
                size -= 1
                if size == 0:
                    return

    def _renumber(self) -> None:
        shift = self.admitted - self.open
        items = [replace(item, number=item.number + shift) for item in self._open.values()]
        self._open, self._pending = {}, []
        self._places = {place: {} for place in ItemState}
        for item in items:
            self._numbers[item.uid] = item.number
            self._move(item, ItemState.PENDING)


def ranges(uids: Iterable[Uid]) -> Runs:
    """Uids in order with runs of following numbers as ``[first, last]``: a cut stays small."""
    found: Runs = []
    for uid in uids:
        last = found[-1] if found else None
        if isinstance(uid, int) and isinstance(last, list) and last[1] == uid - 1:
            last[1] = uid
        else:
            found.append([uid, uid] if isinstance(uid, int) else uid)
    return found


def uids_of(found: Runs) -> Iterator[Uid]:
    """Inverse of ``ranges``."""
    for one in found:
        if isinstance(one, list):
            yield from range(one[0], one[1] + 1)
        else:
            yield one
