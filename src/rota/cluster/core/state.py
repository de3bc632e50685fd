"""State of the cluster for one decision: nodes, queues and jobs, written only through transactions."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.capacity import Cells, OverLimit, QueueTree, Vector, forest_of, in_cell_order
from rota.cluster.core.jobs import Allocation, Allocations, JobAsk, JobRow, LineKey, Shape, line_key
from rota.spec.ids import JobId, NodeId
from rota.spec.queue import Queue
from rota.spec.reasons import Reason
from rota.spec.resources import Health, Node, types_of

# -- transactions --


_ABSENT = object()
_INDEXED: Any = (np.ndarray, list)
K = TypeVar("K")
V = TypeVar("V")
Index = int | slice | tuple[int, int]
Value = int | NDArray[np.integer]


class _Scope:
    """A nested scope of a Txn; a class of its own because a generator costs three times as much."""

    __slots__ = ("_mark", "_outer", "_txn")

    def __init__(self, txn: Txn) -> None:
        self._txn = txn

    def __enter__(self) -> Txn:
        txn = self._txn
        self._mark, self._outer = txn.changes, txn.kept
        txn.kept = False
        return txn

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        txn = self._txn
        if kind is not None or not txn.kept:
            txn.undo(self._mark)
        txn.kept = self._outer


class Txn:
    """An undo log over arrays and mappings: every write records what it replaced.

    Only a Txn writes to a scheduling state. ``trial`` opens a nested scope that is undone unless ``keep`` was called in
    it, also when an exception leaves it. Undo is exact: every array element and mapping entry gets its old value back.
    A mapping may come back in another order, so nothing may depend on the order of a mapping.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, Any, Any]] = []
        self.kept = False
        self.notes: dict[tuple[object, ...], object] = {}
        """What was worked out and stays true until the Txn ends."""

    def set(self, array: NDArray[np.generic], index: Index, value: Value) -> None:
        """``array[index] = value``; ``index`` may be anything numpy accepts."""
        old: Any = array[index]
        # A slice or index list gives an array (a view for a slice), so it is copied; one element gives a scalar.
        self._undo.append((array, index, old.copy() if isinstance(old, _INDEXED) else old))
        array[index] = value

    def set_item(self, items: list[V], index: int, value: V) -> None:
        """``items[index] = value`` for a plain list."""
        self._undo.append((items, index, items[index]))
        items[index] = value

    def add(self, array: NDArray[np.integer], index: int | tuple[int, int], delta: int) -> None:
        """``array[index] += delta`` for an index without repeated elements."""
        self.set(array, index, array[index] + delta)

    def put(self, mapping: MutableMapping[K, V], key: K, value: V) -> None:
        """``mapping[key] = value``."""
        self._undo.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def drop(self, mapping: MutableMapping[K, V], key: K) -> None:
        """Remove a key that must be there. Raises KeyError."""
        self._undo.append((mapping, key, mapping.pop(key)))

    def did(self, undo: Callable[[], object]) -> None:
        """Record a change made elsewhere, with what takes it back."""
        self._undo.append((undo, None, None))

    def keep(self) -> None:
        """Keep the changes of the innermost open scope when it closes."""
        self.kept = True

    def trial(self) -> _Scope:
        """A nested scope, undone at its end unless ``keep`` was called in it."""
        return _Scope(self)

    @property
    def changes(self) -> int:
        """How many writes can be undone; also a mark for ``undo``."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back, newest first, every write after ``mark``."""
        while len(self._undo) > mark:
            target, key, old = self._undo.pop()
            if isinstance(target, _INDEXED):
                target[key] = old
            elif callable(target):
                target()
            elif old is _ABSENT:
                del target[key]
            else:
                target[key] = old


# -- verdicts --


VERDICTS_MAX = 50_000
"""Forgotten then, all at once: each is reached again when its line is tried."""


class VerdictCache:
    """Verdicts of "no" that hold as long as nothing was given back since they were reached.

    For the cluster (empty name) and for each queue it keeps what was taken since the last time that something was
    given back. A verdict is good on every continuation of the takings under which it was reached; the numbers behind it
    are not, so only the reason is kept.
    """

    def __init__(self) -> None:
        self._takings: dict[str, tuple[int, list[int]]] = {}
        self._verdicts: dict[tuple[str, LineKey], tuple[int, int, int, Reason]] = {}
        self._count = 0
        self.cut_short = 0
        """Passes in a row that had tried enough before all were tried; each of them tries twice as many as the last."""

    def took(self, txn: Txn, row: JobRow) -> None:
        """A job was given devices."""
        for name in ("", row.ask.queue):
            _, steps = self._of(name)
            steps.append(hash((steps[-1] if steps else 0, row.ask.id, row.held)))
            txn.did(steps.pop)

    def gave(self, txn: Txn, queue: str | None) -> None:
        """Devices of a queue, or anything at all (None), came back."""
        self._count += 1
        for name in ("", queue) if queue is not None else tuple(self._takings):
            txn.put(self._takings, name, (self._count, []))

    def _of(self, name: str) -> tuple[int, list[int]]:
        return self._takings.setdefault(name, (0, []))

    def learn(self, profile: str, key: LineKey, reason: Reason, *, local: bool) -> None:
        """Remember why a line could not start."""
        if len(self._verdicts) >= VERDICTS_MAX:
            self._verdicts.clear()
        epoch, steps = self._of(key.queue if local else "")
        self._verdicts[profile, key] = (epoch, len(steps), steps[-1] if steps else 0, reason)

    def recall(self, profile: str, key: LineKey, *, local: bool) -> Reason | None:
        """Why a line could not start, if that still holds. With ``local`` only its own queue matters."""
        known = self._verdicts.get((profile, key))
        if known is None:
            return None
        now, steps = self._of(key.queue if local else "")
        epoch, length, last, reason = known
        holds = epoch == now and len(steps) >= length and (length == 0 or steps[length - 1] == last)
        return reason if holds else None


# -- state --


class InvariantBroken(AssertionError):
    """A bug of the scheduler: the message names the rule and the numbers; ``job`` is that at which it was met."""

    def __init__(self, text: str, job: JobId | None = None) -> None:
        super().__init__(text)
        self.job = job


HEALTH_ROW: dict[Health, int] = {health: i for i, health in enumerate(Health)}
LOST = len(HEALTH_ROW)
"""Row value of a node that left; it keeps its row as long as a job holds something there."""

TENANT_LABEL = "rota.tenant"
"""Node label: path of the queue that owns the node, for policies that keep tenants on their own nodes."""

DATA_MAX = 8
"""Data sets remembered of a node, the last used first."""


class PolicyBook(Protocol):
    """What a policy keeps beside the state, in step with who holds what."""

    def hold(self, txn: Txn, state: State, row: JobRow) -> None:
        """A job was given ``row.held``."""
        ...

    def release(self, txn: Txn, state: State, row: JobRow) -> None:
        """A job gave ``row.held`` back."""
        ...

    def reserve(self, txn: Txn, state: State, row: JobRow) -> None:
        """A job waits for devices that others are giving back: no other job may be promised them."""
        ...


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
        self._state.open_txn = self._outer
        self._scope.__exit__(kind, error, trace)


class State:
    """The arrays and rows that one decision reads. Trial writes go through ``txn`` and are undone exactly.

    ``lines`` has who waits by kind of request, ``asking`` by queue, highest priority and longest queued first.
    ``running`` has who runs by queue and priority, ``ends`` the expected ends of who holds devices, soonest first,
    ``parts`` what jobs hold or ask for beside their admission,
    ``undone`` the kinds of jobs that did not gain by sharing devices, ``data`` the data sets that jobs of a node read,
    ``used_by`` what users hold in queues that limit them, ``shrunk`` the nodes that came back with fewer cores or less
    memory than their jobs hold.

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
        self.queues = QueueTree(queues, self.types)
        self.jobs: dict[JobId, JobRow] = {}
        self.lines: dict[LineKey, list[tuple[float, JobId]]] = {}
        self.asking: dict[str, list[tuple[int, float, JobId]]] = {}
        self.fresh: dict[JobId, None] = {}
        self.stopping: dict[JobId, None] = {}
        self.running: dict[tuple[str, int], dict[JobId, None]] = {}
        self.ends: list[tuple[float, JobId]] = []
        self.parts: dict[JobId, dict[JobId, None]] = {}
        self.undone: dict[tuple[str, str], None] = {}
        self.data: dict[NodeId, tuple[str, ...]] = {}
        self.books: list[PolicyBook] = []
        self.memory = VerdictCache()
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
        self.used = np.zeros((len(self.queues.rows), len(self.queues.dims)), dtype=np.int64)

    # -- transactions ------------------------------------------------------------------------------------------------

    def txn(self) -> _StateScope:
        """A scope in which the state may change; undone at its end unless ``keep`` was called. Scopes nest."""
        return _StateScope(self)

    @property
    def arrays(self) -> tuple[NDArray[np.integer], ...]:
        """Everything that a Txn may change, the mapping of jobs aside."""
        return (self.free, self.cpu, self.mem, self.node_health, self.dev_milli, self.dev_health, self.used)

    def digest(self) -> str:
        """A hash of everything that decisions depend on; equal states have equal digests."""
        h = hashlib.sha256()
        for array in self.arrays:
            h.update(array.tobytes())
        for job in sorted(self.jobs):
            h.update(repr(self.jobs[job]).encode())
        parts = {job: sorted(parts) for job, parts in self.parts.items() if parts}
        by_user = {key: used.tolist() for key, used in self.used_by.items() if used.any()}
        for mapping in (self.data, parts, by_user):
            h.update(repr(sorted(mapping.items())).encode())
        return h.hexdigest()[:16]

    def _tenant(self, node: Node) -> int:
        return self.queues.row.get(dict(node.labels).get(TENANT_LABEL, ""), -1)

    # -- nodes -------------------------------------------------------------------------------------------------------

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

    # -- jobs --------------------------------------------------------------------------------------------------------

    def put(self, txn: Txn, row: JobRow) -> None:
        """Set the row of a job, and keep the lines of waiting jobs in step; what it holds must not change by this."""
        job = row.ask.id
        old = self.jobs.get(job)
        txn.put(self.jobs, job, row)
        self._index(txn, job, old, row)

    def _index(self, txn: Txn, job: JobId, old: JobRow | None, new: JobRow | None) -> None:
        waited = old if old is not None and old.phase == "queued" else None
        waits = new if new is not None and new.phase == "queued" else None
        if waited is None or waits is None or waited.ask is not waits.ask or waited.back_at != waits.back_at:
            if waited is not None:
                self._leave(txn, line_key(waited), (waited.ask.queued_at, job))
            if waits is not None:
                self._join(txn, line_key(waits), (waits.ask.queued_at, job))
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
        if old is None and new is not None and new.ask.part_of is not None:
            txn.put(self.parts.setdefault(new.ask.part_of, {}), job, None)
        elif new is None and old is not None and old.ask.part_of is not None:
            txn.drop(self.parts[old.ask.part_of], job)
        for index, member in (
            (self.fresh, waits is not None and waits.wait is None),
            (self.stopping, new is not None and new.phase == "stopping"),
        ):
            if member and job not in index:
                txn.put(index, job, None)
            elif not member and job in index:
                txn.drop(index, job)

    def _unlist_end(self, end: tuple[float, JobId]) -> None:
        del self.ends[bisect_left(self.ends, end)]

    def _join(self, txn: Txn, key: LineKey, entry: tuple[float, JobId]) -> None:
        self._into(key, entry)
        txn.did(lambda: self._out_of(key, entry))

    def _leave(self, txn: Txn, key: LineKey, entry: tuple[float, JobId]) -> None:
        self._out_of(key, entry)
        txn.did(lambda: self._into(key, entry))

    def _into(self, key: LineKey, entry: tuple[float, JobId]) -> None:
        insort(self.lines.setdefault(key, []), entry)
        insort(self.asking.setdefault(key.queue, []), (-key.priority, *entry))

    def _out_of(self, key: LineKey, entry: tuple[float, JobId]) -> None:
        asking = self.asking[key.queue]
        del asking[bisect_left(asking, (-key.priority, *entry))]
        if not asking:
            del self.asking[key.queue]
        line = self.lines[key]
        del line[bisect_left(line, entry)]
        if not line:
            del self.lines[key]

    def hold(self, txn: Txn, job: JobId, held: Allocations, *, now: float) -> None:
        """Give a job its slots and start it."""
        row = self.jobs[job]
        for slot in held:
            self.take(txn, slot, 1)
        self.charge(txn, row, 1)
        attempt = row.attempt + 1
        row = replace(
            row, phase="running", held=held, attempt=attempt, wait=None, rate=None, started_at=now, saved_at=now
        )
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
        self.put(txn, replace(row, phase="queued", held=(), **changes))

    def _give_back(self, txn: Txn, row: JobRow) -> None:
        if row.held:
            for slot in row.held:
                self.take(txn, slot, -1)
            self.charge(txn, row, -1)
            self.memory.gave(txn, row.ask.queue)
            for book in self.books:
                book.release(txn, self, row)

    def lift(self, txn: Txn, jobs: Iterable[JobId]) -> None:
        """Take what these jobs hold off the nodes, for a trial placement; queues and rows stay as they are."""
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
        self.put(txn, replace(row, held=held))

    def drop(self, txn: Txn, job: JobId) -> None:
        """Forget a job that ended, releasing what it held."""
        row = self.jobs[job]
        self._give_back(txn, row)
        self._index(txn, job, row, None)
        txn.drop(self.jobs, job)

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

    def charge(self, txn: Txn, row: JobRow, sign: int) -> None:
        """Add (sign 1) what a job asks to the use of its queue and of all above it, or take it off (sign -1)."""
        need = self.queues.need(row.ask.shape)
        for queue in self.queues.line_of(row.ask.queue):
            txn.set(self.used, queue, self.used[queue] + sign * need)
            if self.queues.user_limited[queue]:
                key = (queue, row.ask.user)
                txn.put(self.used_by, key, self.used_by.get(key, 0) + sign * need)

    def over_limit(self, queue: str, user: str, shape: Shape) -> OverLimit | None:
        """The first limit that a shape would pass: of the queue or one above it, then of the user there."""
        return self.queues.over_limit(self.used, self.used_by, queue, user, self.queues.need(shape))

    def waiting_jobs(self) -> list[JobRow]:
        """Jobs that wait for devices, in no order."""
        return [row for row in self.jobs.values() if row.phase == "queued"]

    def holds_data(self, ask: JobAsk) -> NDArray[np.bool_]:
        """Per node, whether a job that reads the same data ran there lately."""
        return np.array([not set(ask.data).isdisjoint(self.data.get(node.id, ())) for node in self.nodes])

    def spares(self, count: int) -> list[int]:
        """The last nodes in order, at most ``count``, that hold no work but opportunistic one."""
        if not count:
            return []
        busy = {slot.node for row in self.jobs.values() if not row.ask.opportunistic for slot in row.held}
        return [row for row in np.flatnonzero(self.usable).tolist() if row not in busy][-count:]

    def whole(self, job: JobId) -> list[JobId]:
        """What holds devices and stops when this one is stopped: itself, and what its job holds beside."""
        if job not in self.parts:
            return [job]
        return [job, *(part for part in sorted(self.parts[job]) if self.jobs[part].held)]

    def holders(self) -> list[JobRow]:
        """Jobs that hold devices, in the order of their ids."""
        return [self.jobs[job] for job in sorted(self.jobs) if self.jobs[job].held]

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
        new.jobs, new.fresh, new.stopping = dict(self.jobs), dict(self.fresh), dict(self.stopping)
        new.lines = {key: list(line) for key, line in self.lines.items()}
        new.asking = {queue: list(jobs) for queue, jobs in self.asking.items()}
        new.running = {group: dict(jobs) for group, jobs in self.running.items()}
        new.parts = {job: dict(parts) for job, parts in self.parts.items()}
        new.used_by = dict(self.used_by)
        new.undone, new.data = dict(self.undone), dict(self.data)
        new.ends, new.books, new.memory, new.open_txn = list(self.ends), [], VerdictCache(), None
        return new

    def with_cluster(self, nodes: Sequence[Node], queues: Sequence[Queue]) -> State:
        """The same jobs on another set of nodes and queues; holdings follow node ids and device indices.

        A slot on a node that is no longer there holds nothing any more.
        """
        new = State(nodes, queues)
        new.version = self.version + 1
        new.data = {node: names for node, names in self.data.items() if node in new.node_row}
        with new.txn() as txn:
            for job in sorted(self.jobs):
                new.adopt(txn, self, self.jobs[job])
            txn.keep()
        new.shrunk = frozenset(np.flatnonzero((new.cpu < 0) | (new.mem < 0)).tolist())
        return new

    def adopt(self, txn: Txn, old: State, row: JobRow) -> None:
        """Take over the row of a job from another state of the cluster."""
        held = tuple(moved for slot in row.held if (moved := self._moved(old, slot)) is not None)
        self.put(txn, replace(row, held=()))
        if held:
            for slot in held:
                self.take(txn, slot, 1)
            self.charge(txn, row, 1)
            self.put(txn, replace(row, held=held))

    def _moved(self, old: State, held: Allocation) -> Allocation | None:
        node = self.node_row.get(old.nodes[held.node].id)
        if node is None:
            return None
        devices = self.device_rows(node, [int(old.dev_index[d]) for d in held.devices])
        return Allocation(node, devices, held.milli, held.cpu_milli, held.mem)


def _end_of(row: JobRow | None) -> tuple[float, JobId] | None:
    if row is None or not row.held or (left_s := row.left_s) is None:
        return None
    return (row.started_at + left_s, row.ask.id)


def _group_of(row: JobRow | None) -> tuple[str, int] | None:
    return (row.ask.queue, row.ask.priority) if row is not None and row.phase == "running" else None
