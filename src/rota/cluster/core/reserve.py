"""Reservations, and what may run before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from rota.cluster.core.asks import Shape, Slot
from rota.cluster.core.placement import slots_that_fit
from rota.cluster.core.plugins import Placer
from rota.cluster.core.rows import Held, JobRow, LineKey, line_key, place_key
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """From ``at`` on these slots are kept for a job that could not start when its turn came."""

    job: JobId
    at: float
    held: tuple[Held, ...]


def earliest_start(state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> Reservation | None:
    """When the job fits, if running jobs end as estimated, and where; None if that cannot be told from estimates.

    Estimates only reserve; a job that runs on past its own is expected to end at any moment.
    """
    ends = state.ends
    low, high = Rooms(state, row.ask.shape).too_few(job for _, job in ends) + 1, len(ends)
    middle = low
    best: tuple[float, tuple[Held, ...]] | None = None
    while low <= high:
        with txn.trial():
            state.lift(txn, (job for _, job in ends[:middle]))
            held = placer.place(state, txn, row)
        if held is None:
            low = middle + 1
        else:
            best, high = (max(now, ends[middle - 1][0]), held), middle - 1
        middle = (low + high) // 2
    return None if best is None else Reservation(job=row.ask.id, at=best[0], held=best[1])


class Reservations:
    """Those of one pass: the first blocked job of a queue gets the earliest time at which it fits.

    That takes long to find, so it is put off until somebody fits and might be in the way; others may run until then.
    """

    def __init__(self, state: State, txn: Txn, placer: Placer, now: float) -> None:
        self._state, self._txn, self._placer, self._now = state, txn, placer, now
        self._first: dict[str, JobRow | None] = {}
        self._made: list[Reservation] = []

    def owe(self, row: JobRow) -> None:
        """The job was blocked when its turn came; of its queue only the first one counts."""
        self._first.setdefault(row.ask.queue, row)

    def make(self, aside: Callable[[JobRow], AbstractContextManager[object]]) -> list[JobRow]:
        """Find the times that are owed, each with what the job may not use ``aside``; who has none is returned."""
        found: dict[LineKey, Reservation | None] = {}
        unknown: list[JobRow] = []
        for queue, row in self._first.items():
            if row is not None:
                self._first[queue] = None
                key = place_key(line_key(row))
                if key not in found:
                    with aside(row):
                        found[key] = earliest_start(self._state, self._txn, row, self._placer, self._now)
                if (reservation := found[key]) is not None:
                    self._made.append(replace(reservation, job=row.ask.id))
                else:
                    unknown.append(row)
        return unknown

    def outlived_by(self, row: JobRow) -> list[Reservation]:
        """Those in the time of which the job would still run if it started now, or might."""
        return [one for one in self._made if row.left_s is None or self._now + row.left_s > one.at]


class Rooms:
    """How far the room that jobs give back falls short of a request; exact for equal slots of whole devices."""

    def __init__(self, state: State, shape: Shape) -> None:
        self._state = state
        self._slot = shape.slots[0] if shape.uniform and shape.slots[0].gpus else None
        if self._slot is None:
            able = (state.dev_health == 0) & state.usable[state.dev_node]
            self._missing = shape.gpu_milli - int(state.dev_milli[able].sum())
        else:
            self._missing = len(shape.slots) - int(slots_that_fit(state, self._slot, state.usable).sum())

    def too_few(self, jobs: Iterable[JobId]) -> int:
        """How many of these, the first ones, may let go and there is still not enough room: a lower bound."""
        state, missing, count = self._state, self._missing, -1
        nodes: dict[int, _Room] = {}
        for count, job in enumerate(jobs):
            for one in state.whole(job):
                for held in state.jobs[one].held:
                    missing -= self._more(nodes, held)
            if missing <= 0:
                return count
        return count + 1

    def _more(self, nodes: dict[int, _Room], held: Held) -> int:
        if self._slot is None:
            return len(held.devices) * 1000
        room = nodes.get(held.node)
        if room is None:
            room = nodes[held.node] = _Room(self._state, self._slot, held.node)
        return room.more(self._state, held)


class _Room:
    """How many slots fit on a node while those who hold something there end one after the other."""

    def __init__(self, state: State, slot: Slot, node: int) -> None:
        self._slot, self._able = slot, not state.node_health[node]
        self._free: list[int] = state.free[node].tolist()
        self._cpu, self._mem = int(state.cpu[node]), int(state.mem[node])
        self._count = self._fit(state)

    def more(self, state: State, held: Held) -> int:
        """How many more slots fit once this is given back; a share of a device counts as the whole."""
        for device in held.devices:
            self._free[int(state.dev_type[device])] += 1
        self._cpu += held.cpu_milli
        self._mem += held.mem
        before, self._count = self._count, self._fit(state)
        return self._count - before

    def _fit(self, state: State) -> int:
        slot = self._slot
        room = sum(self._free[kind] // slot.gpus for kind in state.type_rows(slot.type))
        room = min(room, self._cpu // slot.cpu_milli) if slot.cpu_milli else room
        room = min(room, self._mem // slot.mem) if slot.mem else room
        return max(room, 0) if self._able else 0
