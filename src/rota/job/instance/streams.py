"""Streams in the process of the loop: sources, the pump of each path, batches; the shell around the ledgers.

Everything here runs in the control thread of the loop instance, so slow code of the user does not stop a stream. An
item is driven over the operations of its path one by one: a lost instance gives it back, an operation that raised on
two instances makes it bad data. The loop sees batches; a commit makes those it has taken trained.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rota.job.core.ledger import DropReason, Item, ItemState, Ledger, LedgerCut, Order, Uid
from rota.job.core.paths import Path, Stop, paths_of
from rota.job.health.heartbeat import ProgressMarks
from rota.job.inspect import import_target
from rota.job.rpc.client import Lost, RpcClient
from rota.job.rpc.payload import opened
from rota.job.rpc.peers import Peer
from rota.spec.codec import JsonObject
from rota.spec.errors import BadInput, DataError, TimedOut
from rota.spec.ids import Epoch, InstanceId
from rota.spec.job import JobSpec
from rota.spec.user_code import UserCode

if TYPE_CHECKING:
    from rota.job.instance.flow import Flow


class ItemSource(Protocol):
    """Where items come from: ``read(i)`` for growing ``i``. Raises IndexError behind the last one."""

    def read(self, index: int) -> object:
        """Item ``index``."""
        ...


class Dataset(Protocol):
    """What ``dataset[i]`` gives; a length, where there is one, is its end."""

    def __getitem__(self, index: int, /) -> object: ...


class Indexed:
    """A data set with ``dataset[i]``: every item may be read again."""

    def __init__(self, data: Dataset) -> None:
        self._data: Any = data

    def read(self, index: int) -> object:
        """``dataset[index]``; a length, where there is one, is the end.

        Raises DataError when an item before that end raises IndexError: that is a fault of the data set, not its end.
        """
        size = len(self._data) if hasattr(self._data, "__len__") else None
        if size is not None and index >= size:
            raise IndexError(index)
        try:
            return self._data[index]
        except IndexError as error:
            if size is None:
                raise
            raise DataError(
                f"item {index} of a data set of {size} raised IndexError: {error}",
                hint="repair the data set, or let its __len__ return the number of its items",
                traceback=traceback.format_exc(),
            ) from error


class Iterated:
    """An iterator, whose cursor is a count: made anew after a recovery, it is moved forward to the first item needed.

    It moves by ``seek(i)`` if it has that method, else by passing over items; so it must give the same items again.
    """

    def __init__(self, items: Iterable[object]) -> None:
        self._items, self._next = iter(items), 0
        self._seek: Callable[[int], None] | None = getattr(items, "seek", None)

    def read(self, index: int) -> object:
        """Item ``index``, which is not before the one read last."""
        if index > self._next and self._seek is not None:
            self._seek(index)
            self._next = index
        for value in self._items:
            self._next += 1
            if self._next == index + 1:
                return value
        raise IndexError(index)


def open_source(path: str, seed: int) -> ItemSource:
    """The source of an import path: a data set, an iterable, or what makes one (from ``seed``, if it takes that).

    Raises BadInput for anything else, and for an iterator that is not made here: opened again, it would lack items.
    """
    found: Any = import_target(path)
    made = callable(found)
    if made:
        found = found(seed=seed) if "seed" in inspect.signature(found).parameters else found()
    if hasattr(found, "__getitem__") and not isinstance(found, Mapping):
        return Indexed(found)
    if hasattr(found, "__iter__"):
        if not made and iter(found) is found:
            raise BadInput(
                f"source {path!r} is a {type(found).__name__}: an iterator can be read once, and a stream reads again",
                hint="give the function that makes it",
            )
        return Iterated(found)
    raise BadInput(
        f"source {path!r} is a {type(found).__name__}, neither a data set nor an iterator",
        hint="give dataset[i], an iterable, or a function that returns one",
    )


BAD_INSTANCES = 2
"""An item whose operation raised on this number of instances (or on all there are) is bad data."""
Offload = Callable[..., Awaitable[Any]]
"""Calls a function that may block somewhere else (in virtual time: at once)."""
STREAM_COMMIT_S = 1.0
"""The default loop commits this often."""


class Batch(list[Any]):
    """Items of a stream in the order in which they were admitted, for the loop to use and commit.

    ``uids`` are their indices in the source, or the keys under which they were put; ``ages`` the versions by which the
    model has moved on since each was begun.
    """

    def __init__(self, values: Iterable[object], uids: list[Uid], ages: list[int]) -> None:
        super().__init__(values)
        self.uids, self.ages = uids, ages


@dataclass(slots=True)
class _Held:
    """State of an open item in the pump: what came in, and what stages ``done`` of its path made of it."""

    raw: object
    value: object
    done: int = 0


class Pump:
    """Drives the items of one path and makes batches of them. Belongs to the control thread."""

    def __init__(self, path: Path, ledger: Ledger, streams: Streams) -> None:
        self.path, self.ledger, self._streams = path, ledger, streams
        self.closed = False
        self._batch = path.micro
        self._held: dict[Uid, _Held] = {}
        self._work: dict[Uid, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._opened = self._ended = False
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def next_batch(self, size: int, order: Order) -> Batch | None:
        """The next ``size`` items; fewer at the end of the source, None behind it.

        Raises BadInput when the loop holds batches that it must commit first, DataError when too much data is bad.
        """
        if not 1 <= size <= self.ledger.spec.cap:
            raise BadInput(
                f"batches({size}) of stream {self.ledger.spec.name}, which holds {self.ledger.spec.cap} items",
                hint=f"ask for 1 to {self.ledger.spec.cap}, or raise its cap",
            )
        self._batch = size
        self._begin()
        while True:
            if self._failure is not None:
                raise self._failure
            self.refresh()
            found = self.ledger.lease(
                size, self._streams.holder, self._streams.epoch, self._streams.version, final=self._final, order=order
            )
            if found:
                return self._as_batch(found)
            if self._final and self.ledger.open == self.ledger.count(ItemState.LEASED):
                return None
            if self.must_commit(size):
                raise BadInput(
                    f"stream {self.ledger.spec.name}: {self.ledger.count(ItemState.LEASED)} items are taken and not"
                    f" committed, which leaves no room for a batch of {size}",
                    hint="commit before the next batch, or raise cap or stale.versions",
                )
            with self._waits(self._streams.marks.quiet(f"stream {self.ledger.spec.name} waits for items to come in")):
                await self._changed.wait()

    def must_commit(self, size: int) -> bool:
        """True when no further batch can be complete before a commit."""
        waiting = self.ledger.open - self.ledger.count(ItemState.LEASED)
        return not self._final and waiting + max(0, self.ledger.room(size)) < size and waiting < self.ledger.open

    async def put(self, value: object) -> Uid:
        """Queue an item of the loop, once there is room.

        Raises BadInput if the stream has a source or the uid, or is closed; DataError as ``next_batch``.
        """
        spec = self.path.head
        if not self.path.put:
            raise BadInput(f"stream {spec.name} is fed by its source {spec.source}; nothing can be put into it")
        self._begin()
        while True:
            if self._failure is not None:
                raise self._failure
            if self.closed:
                raise BadInput(
                    f"stream {spec.name} is closed: nothing can be put into it", hint="put before end_input()"
                )
            if self.ledger.room(self._batch) > 0:
                break
            rpc, name = self._streams.rpc, self.ledger.spec.name
            with self._waits(rpc.waiting.on(self._streams.holder.role, "stream", name)):
                await self._changed.wait()
        key = value.get(spec.key) if isinstance(value, Mapping) else None
        uid = str(key) if key is not None else f"#{self.ledger.admitted + 1}"
        if self.ledger.find(uid) is not None:
            raise BadInput(f"stream {spec.name}: an item with {spec.key}={uid!r} is open already")
        self._take(uid, value)
        return uid

    def end_input(self) -> None:
        """Nothing more is put in: the last batch may be short."""
        self.closed = True
        self.wake()

    def _waits(self, idle: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Wait for what holds the stream up: the holder of the item that moved longest ago, or its next role.

        With nothing under way there is none: the wait is ``idle``.
        """
        item = self.ledger.stillest() if self._opened and self.path.stops else None
        if item is None:
            return idle
        target = str(item.holder or self.path.stops[self._held[item.uid].done].role.name)
        return self._streams.rpc.waiting.on(target, "stream", self.ledger.spec.name)

    @property
    def _final(self) -> bool:
        return self._ended or self.closed

    def _as_batch(self, items: tuple[Item, ...]) -> Batch:
        version = self._streams.version
        return Batch(
            [self._held[item.uid].value for item in items],
            [item.uid for item in items],
            [version - (item.version or 0) for item in items],
        )

    def committed(self, numbers: Iterable[int]) -> None:
        """The commit whose cut had items ``numbers`` leased is durable; the version has moved on."""
        for uid in self.ledger.committed(numbers):
            self._held.pop(uid, None)
        self.refresh()
        self.wake()

    def refresh(self) -> None:
        """Drop items that have become too old."""
        for uid in self.ledger.refresh(self._streams.version):
            self._cancel(uid)
            if self.ledger.find(uid) is None:
                self._held.pop(uid, None)
        self._pump_pending()

    def kept(self) -> list[list[object]]:
        """[uid, version, value] of the items that only the loop could put in again."""
        if not self.path.put:
            return []
        items = (self.ledger.find(uid) for uid in self._held)
        return [
            [item.uid, item.version or 0, opened(self._held[item.uid].raw)]
            for item in items
            if item is not None and item.place is not ItemState.LEASED
        ]

    def restore(self, kept: Iterable[Sequence[Any]]) -> None:
        """After a recovery: items that were put in before the commit wait as they did."""
        for uid, version, value in kept:
            if self.ledger.find(uid) is not None:
                self._held[uid] = _Held(raw=value, value=value)
                if not self.path.stops:
                    self.ledger.queue(uid, version)

    def wake(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> list[asyncio.Task[None]]:
        """End all work and begin no more; what is open is in the last cut. The tasks, which are about to end."""
        self._opened = False
        tasks = [*self._work.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        return tasks

    def give_up(self, peer: Peer) -> None:
        """``peer`` runs under a newer epoch: what its older one held goes to another instance."""
        for uid in self.ledger.release_holder(peer.id, peer.epoch):
            self._cancel(uid)
        self._pump_pending()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._guarded(self._feed))

    async def _guarded(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """A failure of a pump is raised to the loop when it asks for the next batch."""
        with UserCode() as source:
            await work(*args)
        if source.failed:
            self._failure = self._failure or source.take()
            self.wake()

    async def _feed(self) -> None:
        """1 open the source  2 read again what was open at the last commit  3 admit while there is room."""
        if self.path.head.source is None:
            self._opened = True
            self._pump_pending()
            return
        offload = self._streams.offload
        source: ItemSource = await offload(open_source, self.path.head.source, self._streams.spec.seed)
        for uid in self.ledger.uids():
            raw = await offload(source.read, int(uid))
            self._held[uid] = _Held(raw=raw, value=raw)
        self._opened = True
        self._pump_pending()
        while True:
            while self.ledger.room(self._batch) <= 0:
                await self._changed.wait()
            try:
                raw = await offload(source.read, self.ledger.cursor)
            except IndexError:
                self._ended = True
                self.wake()
                return
            self._take(self.ledger.cursor, raw)

    def _take(self, uid: Uid, raw: object) -> None:
        self._held[uid] = _Held(raw=raw, value=raw)
        self.ledger.admit(uid)
        self._pump_pending()

    def _pump_pending(self) -> None:
        """Begin the work on every item that waits; the client runs no more of them than instances have room for."""
        for item in self.ledger.claim() if self._opened else ():
            held = self._held[item.uid]
            self._cancel(item.uid)
            if item.version is None:
                held.value, held.done = held.raw, 0
            if self.path.stops:
                task = asyncio.create_task(self._guarded(self._carry, item.uid, held))
                self._work[item.uid] = task
                task.add_done_callback(lambda done, uid=item.uid: self._forget(uid, done))
            else:
                self.ledger.queue(item.uid, self._streams.version)
        self.wake()

    def _forget(self, uid: Uid, task: asyncio.Task[None]) -> None:
        if self._work.get(uid) is task:
            del self._work[uid]
        if self.ledger.find(uid) is None:
            self._held.pop(uid, None)
        self._pump_pending()

    def _cancel(self, uid: Uid) -> None:
        task = self._work.pop(uid, None)
        if task is not None:
            task.cancel()

    async def _carry(self, uid: Uid, held: _Held) -> None:
        """Over the stages that are left; ends early when the item must wait again, or is gone."""
        while held.done < len(self.path.stops):
            stop = self.path.stops[held.done]
            holder = await self._stage(uid, stop, held)
            last = held.done == len(self.path.stops)
            if holder is None or not self.ledger.produce(uid, holder.id, holder.epoch, last=last):
                return
            self._streams.marks.mark()
        self.wake()

    async def _stage(self, uid: Uid, stop: Stop, held: _Held) -> Peer | None:
        taken: list[Peer] = []

        def began(peer: Peer) -> bool:
            taken.append(peer)
            self.wake()  # whoever waits names the holder from now on
            return self.ledger.start(uid, peer.id, peer.epoch, self._streams.version_of(self.path))

        item = self.ledger.find(uid)
        avoid = item.failed_on if item is not None else frozenset[InstanceId]()
        text = trace = ""
        try:
            found = await self._streams.rpc.offer(
                stop.role, stop.op, held.value, loop_epoch=self._streams.epoch, avoid=avoid, began=began
            )
            if not isinstance(found, Lost):
                held.value, held.done = found, held.done + 1
                return taken[-1]
            text, trace = found.text if found.traceback else "", found.traceback
        except TimedOut as error:
            text = str(error)
        failures = self.ledger.release(uid, failed=bool(text), keep=held.done > 0)
        if text and failures >= min(BAD_INSTANCES, len(self._streams.rpc.table.of_role(stop.role.name)) or 1):
            self._bad(uid, stop, text, trace)
        return None

    def _bad(self, uid: Uid, stop: Stop, text: str, trace: str) -> None:
        self.ledger.drop(uid, DropReason.BAD_DATA)
        bad, most = self.ledger.dropped[DropReason.BAD_DATA], stop.role.fail.bad_data
        where = f"item {uid} of stream {self.path.head.name}: {stop.role.name}.{stop.op.name} raised {text}"
        self._streams.say(f"{where}; dropped, {bad} of {most} allowed")
        if bad > most:
            raise DataError(
                f"{where}; {bad} bad items, {most} allowed",
                hint=f"repair the data, or raise bad_data in the fail contract of {stop.role.name}",
                traceback=trace,
            )


class Streams:
    """All pumps of a job under one epoch of its loop. ``cut`` is what the last commit said of them."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        rpc: RpcClient,
        marks: ProgressMarks,
        holder: InstanceId,
        epoch: Epoch,
        version: int,
        cut: Mapping[str, LedgerCut],
        say: Callable[[str], None],
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self.offload = offload
        self.spec, self.rpc, self.marks, self.holder, self.epoch = spec, rpc, marks, holder, epoch
        self.version, self.say = version, say
        self.pumps: dict[str, Pump] = {}
        for path in paths_of(spec):
            ledger = Ledger.restored(
                path.ledger,
                cut.get(path.ledger.name),
                every=path.every,
                produced=bool(path.stops) or not path.put,
            )
            pump = Pump(path, ledger, self)
            self.pumps.update({path.ledger.name: pump, path.head.name: pump})
        self._watcher: asyncio.Task[None] | None = None

    def version_of(self, path: Path) -> int:
        """The model version that a call of the operations of a path gets now."""
        if not path.weights or not path.stops:
            return self.version
        table = self.rpc.table.weights
        return min(table[edge.name][1] if edge.name in table else 0 for edge in path.weights)

    def find(self, name: str) -> Pump:
        """The pump of a stream. Raises AttributeError for a name that the job has not."""
        if name not in self.pumps:
            raise AttributeError(f"the job has no stream {name!r}; it has {', '.join(self.pumps) or 'none'}")
        return self.pumps[name]

    def each(self) -> Iterator[Pump]:
        """Every pump once."""
        return iter(dict.fromkeys(self.pumps.values()))

    def begin(self) -> None:
        """Watch for instances that come back under a newer epoch."""
        if self.pumps:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        seen = -1
        while True:
            await self.rpc.changed()
            if seen == self.rpc.table.version:
                continue  # what changed is who has room
            seen = self.rpc.table.version
            for pump in self.each():
                for stop in pump.path.stops:
                    for peer in self.rpc.table.of_role(stop.role.name):
                        pump.give_up(peer)

    def cut(self) -> dict[str, LedgerCut]:
        """What the next commit says of every stream."""
        return {pump.ledger.spec.name: pump.ledger.cut() for pump in self.each()}

    def kept(self) -> dict[str, list[list[object]]]:
        """Values that must survive with the commit: those that no source gives again."""
        found = {pump.ledger.spec.name: pump.kept() for pump in self.each() if pump.path.put}
        return {name: items for name, items in found.items() if items}

    def restore(self, kept: Mapping[str, list[list[object]]]) -> None:
        """Inverse of ``kept``, after a recovery."""
        for name, items in kept.items():
            self.find(name).restore(items)

    def leased(self) -> dict[str, tuple[int, ...]]:
        """What a commit that carries the cut of this moment trains: for ``committed``."""
        return {pump.ledger.spec.name: pump.ledger.leased() for pump in self.each()}

    def committed(self, n: int, taken: Mapping[str, tuple[int, ...]]) -> None:
        """Commit ``n`` is durable; ``taken`` was leased at its cut."""
        self.version = n
        for pump in self.each():
            pump.committed(taken[pump.ledger.spec.name])

    async def close(self) -> None:
        """End everything, at once: whoever waits here may be cancelled again, and nothing may run then."""
        if self._watcher is not None:
            self._watcher.cancel()
        tasks = [task for pump in self.each() for task in pump.cancel()]
        await asyncio.gather(*tasks, *([self._watcher] if self._watcher else []), return_exceptions=True)


async def stream_loop(f: Flow) -> None:
    """The loop of a job that has streams and none of its own: each batch to the last operation of its path."""
    (path,) = paths_of(f.spec)
    stream, clock = f.streams[path.ledger.name], asyncio.get_running_loop()
    metrics: JsonObject = {}
    since_s = clock.time()
    batches: AsyncIterator[Batch] = stream.batches(path.micro)
    async for batch in batches:
        if path.sink is not None:
            answer = await getattr(f.roles[path.sink.role.name], path.sink.op.name)(batch)
            metrics = answer if isinstance(answer, dict) else metrics
        if clock.time() - since_s >= STREAM_COMMIT_S or stream.must_commit(path.micro):
            await f.commit(metrics)
            since_s = clock.time()
    await f.commit(metrics)
