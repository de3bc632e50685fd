"""State of the cluster for one decision: nodes, queues and jobs, written only through transactions."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.capacity import Cells, OverLimit, QueueTable, Vector, forest_of, in_cell_order
from rota.cluster.core.jobs import Allocation, Allocations, Choice, JobAsk, LineKey, LiveJob, Shape, line_key
from rota.cluster.core.run_time import Book, expected, predicted_s
from rota.cluster.core.txn import Txn
from rota.cluster.core.verdicts import VerdictCache
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.resources import Device, Health, Node, types_of

EVENTS_KEPT = 200
"""Events that a state remembers for the message of an internal error."""
EVENTS_SHOWN = 10
STEPS_KEPT = 10_000
"""Changes of ``ranked`` that are remembered."""


class InvariantBroken(AssertionError):
    """A bug of the scheduler: the message names the rule and the numbers; ``job`` is that at which it was met.

    ``events`` are the last of that job, or of all, in order.
    """

    def __init__(self, text: str, job: JobId | None = None, events: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.text, self.job, self.events = text, job, events

    def __str__(self) -> str:
        last = "last events" if self.job is None else "last events of the job"
        return f"{self.text}; {last}: {', '.join(self.events)}" if self.events else self.text


HEALTH_ROW: dict[Health, int] = {health: i for i, health in enumerate(Health)}
LOST = len(HEALTH_ROW)
"""Row value of a node that left; it keeps its row as long as a job holds something there."""

TENANT_LABEL = "rota.tenant"
"""Node label: path of the queue that owns the node, for policies that keep tenants on their own nodes."""

DATA_MAX = 8
"""Data sets remembered of a node, the last used first."""


class PolicyBook(Protocol):
    """Records of a policy beside the state, updated with each allocation."""

    def hold(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job was given ``row.held``."""
        ...

    def release(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job gave ``row.held`` back."""
        ...

    def reserve(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job waits for devices that others are giving back: no other job may be promised them."""
        ...


class Answers:
    """Cached results derived from the state; none of it is state, and no Txn writes it.

    Each answer has in its key, or beside it, the change that it follows from (``State.ranked_at``, ``State.marks``).
    No two changes share a number: when a write is undone the answers of before are found again, and those of after it
    never are. ``steps`` has by change of ``ranked`` the one before it of that queue, and the job that came or left.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.steps: dict[int, tuple[int, QueueEntry, bool]] = {}
        self.promised: dict[tuple[str, QueueEntry, Shape], tuple[int, int]] = {}
        self.leaf_uses: dict[tuple[str, int], LeafUse] = {}
        self.next_level: dict[str, tuple[int, JobAsk, int]] = {}
        self.beyond: dict[tuple[str, int], set[JobId]] = {}
        self.empty_fits: dict[tuple[int, LineKey], bool] = {}

    def step(self, before: int, entry: QueueEntry, member: bool) -> int:
        """The number of a change of ``ranked``, which is remembered with the one before it of that queue."""
        change = self.changes
        self.changes += 1
        self.steps.pop(change - STEPS_KEPT, None)
        self.steps[change] = (before, entry, member)
        return change


class _StateScope:
    """A scope of the Txn of a state, which is made for the outermost one."""

    __slots__ = ("_outer", "_scope", "_state")

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> Txn:
        state = self._state
        self._outer = state.open_txn
        txn = state.open_txn = self._outer or Txn()
        self._scope = txn.trial()
        return self._scope.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        state, outermost = self._state, self._outer is None
        state.open_txn = self._outer
        state.version += outermost and kind is None and self._scope.kept
        self._scope.__exit__(kind, error, trace)


class State:
    """The arrays and rows that one decision reads. Trial writes go through ``txn`` and are undone exactly.

    - ``lines``: queued jobs by kind of request; ``waiting``: by queue, highest priority and longest queued first
    - ``started``: jobs started in the current pass; ``claimed``: jobs that wait there for devices being given back
    - ``running``: running jobs by queue and priority
    - ``ranked``: by queue, in its order, jobs that run or are in ``claimed``, without opportunistic ones;
      ``ranked_at``: the number of its last change, or of the last one below a top queue; an undo restores it
    - ``ends``: expected ends of jobs that hold devices, soonest first
    - ``parts``: gangs that jobs hold or request beside their admission
    - ``stopped_for``: (preempted job, job it was preempted for) and when, since the last event from outside
    - ``undone``: kinds of jobs that did not gain by sharing devices; ``data``: data sets that jobs of a node read
    - ``taken``: shares of the requested time that ended jobs took
    - ``used_by``: use of users in queues that limit users; ``users``: by queue and user the number of lines with jobs
      of that user, plus one while the user holds something that is limited
    - ``shrunk``: nodes that came back with fewer cores or less memory than their jobs hold
    - ``events``: time, job or node, and name of the last events; ``happened``: number of events that are no decisions
    - ``version``: number of kept transactions

    Per node: wholly free healthy devices by type ``free[node, type]``, free cores in thousandths, free memory in bytes,
    health, enclosing cell. Per device: free thousandths, type, node, health, socket. Per queue: use by dimension.
    ``capacity`` is what there is of devices, cores and memory.
    """

    def __init__(self, nodes: Sequence[Node], queues: Sequence[Queue] = ()) -> None:
        self.nodes: tuple[Node, ...] = in_cell_order(nodes)
        self.node_row: dict[NodeId, int] = {node.id: i for i, node in enumerate(self.nodes)}
        self.types: tuple[str, ...] = tuple(dict.fromkeys(d.type for node in self.nodes for d in node.devices)) or ("",)
        self._type_rows: dict[str | None, list[int]] = {}
        self.cells = Cells(forest_of(self.nodes))
        self.queues = QueueTable(queues, self.types)
        self.jobs: dict[JobId, LiveJob] = {}
        self.lines: dict[LineKey, list[tuple[float, JobId]]] = {}
        self.waiting: dict[str, list[tuple[int, float, JobId]]] = {}
        self.arrivals: dict[JobId, None] = {}
        self.stopping: dict[JobId, None] = {}
        self.started: dict[JobId, None] = {}
        self.claimed: dict[JobId, None] = {}
        self.running: dict[tuple[str, int], dict[JobId, None]] = {}
        self.ranked: dict[str, list[QueueEntry]] = {}
        self.ranked_at: dict[str, int] = {}
        self.answers = Answers()
        self.ends: list[tuple[float, JobId]] = []
        self.parts: dict[JobId, dict[JobId, None]] = {}
        self.stopped_for: dict[tuple[JobId, JobId], float] = {}
        self.undone: dict[tuple[str, str], None] = {}
        self.data: dict[NodeId, tuple[str, ...]] = {}
        self.taken: Book = {}
        self.books: list[PolicyBook] = []
        self.memory = VerdictCache()
        self.events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)
        self.happened = 0
        self.version = 0
        self.marks = 0
        self.open_txn: Txn | None = None
        self.shrunk: frozenset[int] = frozenset()
        type_row = {name: i for i, name in enumerate(self.types)}
        devices = [(i, device) for i, node in enumerate(self.nodes) for device in node.devices]
        self.dev0 = np.cumsum([0, *(len(node.devices) for node in self.nodes)]).astype(np.int32)
        self.dev_index = np.array([device.index for _, device in devices], dtype=np.int32)
        self.dev_node = np.array([i for i, _ in devices], dtype=np.int32)
        self.dev_type = np.array([type_row[device.type] for _, device in devices], dtype=np.int16)
        self.dev_health = np.array([HEALTH_ROW[device.health] for _, device in devices], dtype=np.int8)
        self.dev_milli = np.full(len(devices), 1000, dtype=np.int32)
        self.dev_socket = self.cells.socket_of_leaves()
        self.domain: NDArray[np.int64] = np.unique(self.cells.domain_of_nodes(), return_inverse=True)[1]
        self.cpu = np.array([round(node.cpus * 1000) for node in self.nodes], dtype=np.int64)
        self.mem = np.array([node.memory_bytes for node in self.nodes], dtype=np.int64)
        self.capacity = np.array([1000 * len(devices), self.cpu.sum(), self.mem.sum()], dtype=np.float64)
        self.node_health = np.array([HEALTH_ROW[node.health] for node in self.nodes], dtype=np.int8)
        self.tenant = np.array([self._tenant(node) for node in self.nodes], dtype=np.int32)
        self.free = np.zeros((len(self.nodes), len(self.types)), dtype=np.int32)
        for row in range(len(self.nodes)):
            self.free[row] = self._count_free(row)
        self.used_by: dict[tuple[int, str], Vector] = {}
        self.users: dict[str, dict[str, int]] = {}
        self.used = np.zeros((len(self.queues.rows), len(self.queues.dims)), dtype=np.int64)

    def txn(self) -> _StateScope:
        """A scope in which the state may change; undone at its end unless ``keep`` was called. Scopes nest."""
        return _StateScope(self)

    @property
    def arrays(self) -> tuple[NDArray[np.integer], ...]:
        """Everything that a Txn may change, the mapping of jobs aside."""
        return (self.free, self.cpu, self.mem, self.node_health, self.dev_milli, self.dev_health, self.used)

    def broken(self, text: str, job: JobId | None = None) -> InvariantBroken:
        """The error for a broken invariant, with the last events of the job, or of all."""
        of_job = [one for one in self.events if job in (None, one[1])][-EVENTS_SHOWN:]
        return InvariantBroken(text, job, tuple(f"{name} {what} at {at:g}" for at, what, name in of_job))

    @contextmanager
    def without_memory(self) -> Generator[None]:
        """Passes made meanwhile recall no verdict of others, and leave none."""
        memory, self.memory = self.memory, VerdictCache()
        try:
            yield
        finally:
            self.memory = memory

    def digest(self) -> str:
        """A hash of all that decisions follow from, but for what passes have learned (``memory``)."""
        h = hashlib.sha256()
        for array in (*self.arrays, self.queues.limit, self.queues.user_limit):
            h.update(array.tobytes())
        for job in sorted(self.jobs):
            h.update(repr(self.jobs[job]).encode())
        parts = {job: sorted(parts) for job, parts in self.parts.items() if parts}
        by_user = {key: used.tolist() for key, used in self.used_by.items() if used.any()}
        for mapping in (self.data, self.taken, parts, by_user, self.stopped_for, self.undone):
            h.update(repr(sorted(mapping.items())).encode())
        return h.hexdigest()[:16]

    def _tenant(self, node: Node) -> int:
        return self.queues.row.get(dict(node.labels).get(TENANT_LABEL, ""), -1)

    def type_rows(self, asked: str | None) -> list[int]:
        """The rows of ``types`` that serve a slot of this type; one that no device has gives none."""
        rows = self._type_rows.get(asked)
        if rows is None:
            names = types_of(asked)
            known = [self.types.index(name) for name in names if name in self.types]
            rows = self._type_rows[asked] = known if names else list(range(len(self.types)))
        return rows

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Nodes that may take new work."""
        return self.node_health == 0

    def _count_free(self, node: int) -> NDArray[np.int32]:
        rows = slice(int(self.dev0[node]), int(self.dev0[node + 1]))
        whole = (self.dev_milli[rows] == 1000) & (self.dev_health[rows] == 0)
        return np.bincount(self.dev_type[rows][whole], minlength=len(self.types)).astype(np.int32)

    def mark(self, txn: Txn, node: NodeId, health: Health | None, devices: Sequence[int] = ()) -> None:
        """Change the fitness of a node, or of the devices with these indices; None = it left."""
        row = self.node_row.get(node)
        if row is None:
            return
        value = LOST if health is None else HEALTH_ROW[health]
        self.marks += 1
        txn.did(self._unmark)
        self.memory.gave(txn, None)
        if not devices:
            txn.set(self.node_health, row, value)
            return
        for dev in range(int(self.dev0[row]), int(self.dev0[row + 1])):
            if int(self.dev_index[dev]) in devices:
                txn.set(self.dev_health, dev, value)
        txn.set(self.free, row, self._count_free(row))

    def _unmark(self) -> None:
        """Undoing a change of health is one as well: ``marks`` only grows, so a book that watches it sees both."""
        self.marks += 1

    def device_rows(self, node: int, indices: Sequence[int]) -> tuple[int, ...]:
        """Device rows of device indices on a node, in that order; indices that the node lacks are left out."""
        rows = {int(self.dev_index[d]): d for d in range(int(self.dev0[node]), int(self.dev0[node + 1]))}
        return tuple(rows[i] for i in indices if i in rows)

    def put(self, txn: Txn, row: LiveJob) -> None:
        """Set the row of a job, and keep the lines of waiting jobs in step; what it holds must not change by this.

        Raises InvariantBroken for a change of phase that ``PHASE_CHANGES`` does not have.
        """
        job = row.ask.id
        old = self.jobs.get(job)
        if old is not None and not old.may_become(row.phase):
            raise self.broken(f"{job} is {old.phase} and would be {row.phase}, which PHASE_CHANGES does not have", job)
        txn.put(self.jobs, job, row)
        self._index(txn, job, old, row)

    def _index(self, txn: Txn, job: JobId, old: LiveJob | None, new: LiveJob | None) -> None:
        waited = old if old is not None and old.phase == "queued" else None
        waits = new if new is not None and new.phase == "queued" else None
        if waited is None or waits is None or waited.ask is not waits.ask or waited.back_at != waits.back_at:
            if waited is not None:
                self._leave(txn, self.line_of(waited), (waited.ask.queued_at, job))
            if waits is not None:
                self._join(txn, self.line_of(waits), (waits.ask.queued_at, job))
        if old is not waited or new is not waits:
            self._index_running(txn, job, old, new)
        if old is None and new is not None and new.ask.part_of is not None:
            txn.put(self.parts.setdefault(new.ask.part_of, {}), job, None)
        elif new is None and old is not None and old.ask.part_of is not None:
            txn.drop(self.parts[old.ask.part_of], job)
        _list(txn, self.arrivals, job, waits is not None and waits.wait is None)
        _list(txn, self.stopping, job, new is not None and new.phase == "stopping")

    def _index_running(self, txn: Txn, job: JobId, old: LiveJob | None, new: LiveJob | None) -> None:
        if (was := _end_of(old)) != (ends := _end_of(new)):
            if was is not None:
                self._unlist_end(was)
                txn.did(partial(insort, self.ends, was))
            if ends is not None:
                insort(self.ends, ends)
                txn.did(partial(self._unlist_end, ends))
        if (ran := _group_of(old)) != (runs := _group_of(new)):
            if ran is not None:
                txn.drop(self.running[ran], job)
            if runs is not None:
                txn.put(self.running.setdefault(runs, {}), job, None)
        if (before := _ranked_of(old)) != (after := _ranked_of(new)):
            if before is not None:
                self.unrank(txn, *before)
            if after is not None:
                self.rank(txn, *after)

    def rank(self, txn: Txn, queue: str, entry: QueueEntry) -> None:
        """Count a job among those that run, or will with what others give back."""
        self._ranked(txn, queue, entry, True)

    def unrank(self, txn: Txn, queue: str, entry: QueueEntry) -> None:
        """Count it no longer."""
        self._ranked(txn, queue, entry, False)

    def _ranked(self, txn: Txn, queue: str, entry: QueueEntry, member: bool) -> None:
        self._list_rank(queue, entry, member)
        txn.did(partial(self._list_rank, queue, entry, not member))
        change = self.answers.step(self.ranked_at.get(queue, -1), entry, member)
        top = queue.partition("/")[0]
        for path in (queue,) if queue == top else (queue, top):
            txn.put(self.ranked_at, path, change)

    def _list_rank(self, queue: str, entry: QueueEntry, member: bool) -> None:
        entries = self.ranked.setdefault(queue, [])
        if member:
            insort(entries, entry)
        else:
            del entries[bisect_left(entries, entry)]

    def line_of(self, row: LiveJob) -> LineKey:
        """The line in which a job waits; users share lines where no queue limits them."""
        return line_key(row, row.ask.user if row.ask.queue in self.queues.limits_users else "")

    def _unlist_end(self, end: tuple[float, JobId]) -> None:
        del self.ends[bisect_left(self.ends, end)]

    def _join(self, txn: Txn, key: LineKey, entry: tuple[float, JobId]) -> None:
        self._into(key, entry)
        txn.did(lambda: self._out_of(key, entry))

    def _leave(self, txn: Txn, key: LineKey, entry: tuple[float, JobId]) -> None:
        self._out_of(key, entry)
        txn.did(lambda: self._into(key, entry))

    def _into(self, key: LineKey, entry: tuple[float, JobId]) -> None:
        if (line := self.lines.get(key)) is None:
            line = self.lines[key] = []
            self._count_user(key.queue, key.user, 1)
        insort(line, entry)
        insort(self.waiting.setdefault(key.queue, []), (-key.priority, *entry))

    def _out_of(self, key: LineKey, entry: tuple[float, JobId]) -> None:
        asking = self.waiting[key.queue]
        del asking[bisect_left(asking, (-key.priority, *entry))]
        if not asking:
            del self.waiting[key.queue]
        line = self.lines[key]
        del line[bisect_left(line, entry)]
        if not line:
            del self.lines[key]
            self._count_user(key.queue, key.user, -1)

    def _count_user(self, queue: str, user: str, sign: int) -> None:
        counts = self.users.setdefault(queue, {})
        counts[user] = counts.get(user, 0) + sign
        if not counts[user]:
            del counts[user]

    def hold(self, txn: Txn, job: JobId, held: Allocations, *, now: float, choice: Choice | None = None) -> None:
        """Give a job its slots and start it, with one of its choices if it has some."""
        row = self.jobs[job]
        ask = row.ask.having(choice)
        likely_s, late_s = expected(self.taken, ask)
        row = row._replace(
            ask=ask,
            phase="running",
            held=held,
            attempt=row.attempt + 1,
            wait=None,
            rate=None,
            started_at=now,
            saved_at=now,
            likely_s=likely_s,
            late_s=late_s,
            reported_s=row.reported_s or predicted_s(ask),
            pace=None,
        )
        for slot in held:
            self.take(txn, slot, 1)
        self.charge(txn, row, 1)
        if (whole := self.jobs.get(row.ask.part_of or job)) is not None and whole.pace is not None:
            self.put(txn, whole._replace(pace=None))  # it has another size from now on
        self.put(txn, row)
        for slot in held if row.ask.data else ():
            node = self.nodes[slot.node].id
            txn.put(self.data, node, tuple(dict.fromkeys((*row.ask.data, *self.data.get(node, ()))))[:DATA_MAX])
        self.memory.took(txn, row)
        for book in self.books:
            book.hold(txn, self, row)

    def release(self, txn: Txn, job: JobId, **changes: float) -> None:
        """Take back what a job holds, if anything; it is queued again with its old queue time, and with ``changes``."""
        row = self.jobs[job]
        self._give_back(txn, row)
        self.put(txn, row._replace(ask=row.ask.having(None), phase="queued", final=False, held=(), **changes))

    def _give_back(self, txn: Txn, row: LiveJob) -> None:
        if row.held:
            for slot in row.held:
                self.take(txn, slot, -1)
            self.charge(txn, row, -1)
            self.memory.gave(txn, row.ask.queue)
            for book in self.books:
                book.release(txn, self, row)

    def lift(self, txn: Txn, jobs: Iterable[JobId]) -> None:
        """Temporarily free the allocations of these jobs, for a trial placement; queues and rows stay as they are."""
        rows = [self.jobs[job] for job in jobs]
        slots = [slot for row in rows for slot in row.held]
        devices = np.array([d for slot in slots for d in slot.devices], dtype=np.int32)
        milli = [slot.milli or 1000 for slot in slots for _ in slot.devices]
        nodes = np.array([slot.node for slot in slots], dtype=np.int32)
        for array, at, what in (
            (self.dev_milli, devices, milli),
            (self.cpu, nodes, [slot.cpu_milli for slot in slots]),
            (self.mem, nodes, [slot.mem for slot in slots]),
        ):
            if any(what):
                more = array.copy()
                np.add.at(more, at, np.array(what, dtype=array.dtype))
                txn.set(array, slice(None), more)
        devices = np.array(list(set(devices.tolist())), dtype=np.int32)
        whole = devices[(self.dev_milli[devices] == 1000) & (self.dev_health[devices] == 0)]
        free = self.free.copy()
        np.add.at(free, (self.dev_node[whole], self.dev_type[whole]), 1)
        txn.set(self.free, slice(None), free)
        for book in self.books:
            for row in rows:
                book.release(txn, self, row)

    def resize(self, txn: Txn, job: JobId, held: Allocations) -> None:
        """A running job has these slots from now on, more than it asked for; its queue is charged what it asked."""
        row = self.jobs[job]
        for slot in row.held:
            self.take(txn, slot, -1)
        for slot in held:
            self.take(txn, slot, 1)
        if len(held) < len(row.held):
            self.memory.gave(txn, None)
        self.put(txn, row._replace(held=held))

    def drop(self, txn: Txn, job: JobId) -> None:
        """Forget a job that ended, releasing what it held."""
        row = self.jobs[job]
        self._give_back(txn, row)
        self._index(txn, job, row, None)
        txn.drop(self.jobs, job)
        self.memory.forget(job)

    def take(self, txn: Txn, held: Allocation, sign: int) -> None:
        """Take (sign 1) or give back (sign -1) one slot; never more than there is."""
        if held.cpu_milli:
            txn.add(self.cpu, held.node, -sign * held.cpu_milli)
        if held.mem:
            txn.add(self.mem, held.node, -sign * held.mem)
        need = sign * (held.milli or 1000)
        changes: dict[int, int] = {}
        for dev in held.devices:
            old = int(self.dev_milli[dev])
            txn.set(self.dev_milli, dev, old - need)
            change = (old - need == 1000) - (old == 1000)
            if change and not self.dev_health[dev]:
                kind = int(self.dev_type[dev])
                changes[kind] = changes.get(kind, 0) + change
        for kind, change in changes.items():
            txn.add(self.free, (held.node, kind), change)

    def charge(self, txn: Txn, row: LiveJob, sign: int) -> None:
        """Add (sign 1) what a job asks to the use of its queue and of all above it, or take it off (sign -1)."""
        need = self.queues.need(row.ask.shape)
        for queue in self.queues.line_of(row.ask.queue):
            txn.set(self.used, queue, self.used[queue] + sign * need)
            if self.queues.user_limited[queue]:
                key = (queue, row.ask.user)
                old = self.used_by.get(key)
                new = sign * need if old is None else old + sign * need
                txn.put(self.used_by, key, new)
                if (change := int(new.any()) - int(old is not None and old.any())) != 0:
                    path = self.queues.rows[queue].path
                    self._count_user(path, row.ask.user, change)
                    txn.did(partial(self._count_user, path, row.ask.user, -change))

    def over_limit(self, queue: str, user: str, shape: Shape) -> OverLimit | None:
        """The first limit that a shape would pass: of the queue or one above it, then of the user there."""
        return self.queues.over_limit(self.used, self.used_by, queue, user, self.queues.need(shape))

    def limits_below(self) -> dict[JobId, OverLimit]:
        """Waiting jobs that alone ask more than a limit of their queue or user, which was lowered since they came."""
        nothing, found = np.zeros_like(self.used), dict[JobId, OverLimit]()
        for key, line in self.lines.items():  # by line: thousands of jobs wait in few
            need = self.queues.need(key.shape)
            if (over := self.queues.over_limit(nothing, {}, key.queue, key.user, need)) is not None:
                found.update((job, over) for _, job in line)
        return found

    def waiting_jobs(self) -> list[LiveJob]:
        """Jobs that wait for devices, in no order."""
        return [row for row in self.jobs.values() if row.phase == "queued"]

    def holds_data(self, ask: JobAsk) -> NDArray[np.bool_]:
        """Per node, whether a job that reads the same data ran there lately."""
        return np.array([not set(ask.data).isdisjoint(self.data.get(node.id, ())) for node in self.nodes])

    def spares(self, count: int) -> list[int]:
        """The last nodes in order, at most ``count``, that run nothing or only opportunistic jobs."""
        if not count:
            return []
        busy = {slot.node for row in self.jobs.values() if not row.ask.opportunistic for slot in row.held}
        return [row for row in np.flatnonzero(self.usable).tolist() if row not in busy][-count:]

    def whole(self, job: JobId) -> list[JobId]:
        """What holds devices and stops when this one is stopped: itself, and what its job holds beside."""
        if job not in self.parts:
            return [job]
        return [job, *(part for part in sorted(self.parts[job]) if self.jobs[part].held)]

    def holders(self) -> list[LiveJob]:
        """Jobs that hold devices, in the order of their ids."""
        return [self.jobs[job] for job in sorted(self.jobs) if self.jobs[job].held]

    def held_devices(self) -> dict[NodeId, dict[int, Device]]:
        """Devices that jobs hold, by node and index; of a node of which only cores or memory are held none."""
        found: dict[NodeId, dict[int, Device]] = {}
        for slot in (slot for row in self.jobs.values() for slot in row.held):
            node, first = self.nodes[slot.node], int(self.dev0[slot.node])
            devices = (node.devices[d - first] for d in slot.devices)
            found.setdefault(node.id, {}).update((device.index, device) for device in devices)
        return found

    def level_of(self, held: Sequence[Allocation]) -> str:
        """The smallest level that encloses a holding: device, node, rack or cluster."""
        nodes = {slot.node for slot in held}
        if len(nodes) == 1:
            return "device" if sum(len(slot.devices) for slot in held) <= 1 else "node"
        return "rack" if len({int(self.domain[node]) for node in nodes}) == 1 else "cluster"

    def copy(self) -> State:
        """The same state in arrays and rows of its own; books of policies are made anew when they are asked for."""
        new = copy(self)
        new.free, new.cpu, new.mem = self.free.copy(), self.cpu.copy(), self.mem.copy()
        new.node_health, new.dev_health = self.node_health.copy(), self.dev_health.copy()
        new.dev_milli, new.used = self.dev_milli.copy(), self.used.copy()
        new.queues = copy(self.queues)
        new.queues.limit, new.queues.user_limit = self.queues.limit.copy(), self.queues.user_limit.copy()
        new.jobs, new.arrivals, new.stopping = dict(self.jobs), dict(self.arrivals), dict(self.stopping)
        new.started, new.claimed = {}, {}
        new.lines = {key: list(line) for key, line in self.lines.items()}
        new.waiting = {queue: list(jobs) for queue, jobs in self.waiting.items()}
        new.running = {group: dict(jobs) for group, jobs in self.running.items()}
        new.parts = {job: dict(parts) for job, parts in self.parts.items()}
        new.ranked = {queue: list(entries) for queue, entries in self.ranked.items()}
        new.ranked_at, new.answers = {}, Answers()
        new.used_by, new.stopped_for = dict(self.used_by), dict(self.stopped_for)
        new.users = {queue: dict(counts) for queue, counts in self.users.items()}
        new.undone, new.data, new.taken = dict(self.undone), dict(self.data), dict(self.taken)
        new.ends, new.books, new.memory, new.open_txn = list(self.ends), [], VerdictCache(), None
        new.events = self.events.copy()
        return new

    def with_cluster(self, nodes: Sequence[Node], queues: Sequence[Queue]) -> State:
        """The same jobs on another set of nodes and queues; holdings follow node ids and device indices.

        A slot on a node that has left holds nothing.
        """
        new = State(nodes, queues)
        new.version, new.events = self.version, self.events.copy()
        new.data = {node: names for node, names in self.data.items() if node in new.node_row}
        new.taken = dict(self.taken)
        with new.txn() as txn:
            for job in sorted(self.jobs):
                new.adopt(txn, self, self.jobs[job])
            new.note_shrunk(txn)
            txn.keep()
        return new

    def note_shrunk(self, txn: Txn) -> None:
        """Let what jobs hold of nodes count as held, though these have less by now."""
        txn.did(partial(setattr, self, "shrunk", self.shrunk))
        self.shrunk = frozenset(np.flatnonzero((self.cpu < 0) | (self.mem < 0)).tolist())

    def adopt(self, txn: Txn, old: State, row: LiveJob) -> None:
        """Take over the row of a job from another state of the cluster."""
        held = tuple(moved for slot in row.held if (moved := self._moved(old, slot)) is not None)
        self.put(txn, row._replace(held=()))
        if held:
            for slot in held:
                self.take(txn, slot, 1)
            self.charge(txn, row, 1)
            self.put(txn, row._replace(held=held))

    def _moved(self, old: State, held: Allocation) -> Allocation | None:
        node = self.node_row.get(old.nodes[held.node].id)
        if node is None:
            return None
        devices = self.device_rows(node, [int(old.dev_index[d]) for d in held.devices])
        return Allocation(node, devices, held.milli, held.cpu_milli, held.mem)


def _list(txn: Txn, index: dict[JobId, None], job: JobId, member: bool) -> None:
    """Put a job among those of an index, or take it out."""
    if member is (job in index):
        return
    if member:
        txn.put(index, job, None)
    else:
        txn.drop(index, job)


def _end_of(row: LiveJob | None) -> tuple[float, JobId] | None:
    if row is None or not row.held or (left_s := row.left_s) is None:
        return None
    return (row.started_at + left_s, row.ask.id)


QueueEntry = tuple[int, float, JobId]
"""Place of a job in the order of its queue: minus its priority, when it was queued, its id."""


Need = tuple[int, ...]
"""Thousandths of devices: in all, then, where a type is promised, by type."""


@dataclass(frozen=True, slots=True)
class LeafUse:
    """Running jobs of a leaf that may be preempted, in order, with what each needs.

    ``before`` has what covered jobs before each use, and at its end what all of them do; ``rest`` those not covered.
    """

    entries: list[QueueEntry]
    needs: list[Need]
    before: list[Need]
    rest: list[tuple[QueueEntry, Need]]


def entry_of(row: LiveJob) -> QueueEntry:
    """The place of a job in the order of its queue."""
    return (-row.ask.priority, row.ask.queued_at, row.ask.id)


def _ranked_of(row: LiveJob | None) -> tuple[str, QueueEntry] | None:
    able = row is not None and row.phase == "running" and not row.ask.opportunistic
    return (row.ask.queue, entry_of(row)) if row is not None and able else None


def _group_of(row: LiveJob | None) -> tuple[str, int] | None:
    return (row.ask.queue, row.ask.priority) if row is not None and row.phase == "running" else None
