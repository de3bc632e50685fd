"""Preemption and backfill: jobs to stop at least cost, reservations of blocked jobs, and tentative holdings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from rota.cluster.core.jobs import Allocation, Allocations, LineKey, LiveJob, Shape, Slot, line_key, place_key
from rota.cluster.core.placement import slots_that_fit
from rota.cluster.core.profile import Placer, Victim
from rota.cluster.core.promises import promise_level, waits_for
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

EXACT_MAX = 12
"""Maximum number of candidates of which the least-cost set is searched exactly."""
VICTIMS_MAX = 100
"""Maximum number of jobs that are stopped or moved for one."""
SETS_MAX = 600
"""Sets tried at most in the exact search; beyond, the inclusion-minimal set is taken."""


def lost_gpu_s(state: State, job: JobId, now: float, restart_s: float = 0.0) -> float:
    """Device-seconds that stopping a job throws away: work since its last commit, and its restart."""
    row = state.jobs[job]
    unsaved_s = now - row.saved_at
    lost = row.ask.shape.gpu_milli / 1000 * ((unsaved_s if unsaved_s > 0.0 else 0.0) + restart_s)
    if job in state.parts:
        lost += sum(lost_gpu_s(state, part, now, restart_s) for part in state.whole(job)[1:])
    return lost


def lower_in_queue(state: State, row: LiveJob, now: float) -> list[LiveJob]:
    """Jobs of lower priority that run in the queue of a job and may be stopped: the lowest and cheapest first."""
    rows = [
        state.jobs[job]
        for (queue, priority), jobs in state.running.items()
        if queue == row.ask.queue and priority < row.ask.priority
        for job in jobs
    ]
    able = [other for other in rows if other.ask.may_stop]
    able.sort(
        key=lambda r: (r.ask.priority, not r.ask.spare, lost_gpu_s(state, r.ask.id, now), -r.started_at, r.ask.id)
    )
    return able


def choose_victims(
    state: State,
    txn: Txn,
    row: LiveJob,
    placer: Placer,
    candidates: Sequence[tuple[LiveJob, Reason]],
    now: float,
    *,
    restart_s: float = 60.0,
) -> tuple[Victim, ...] | None:
    """A set of these candidates whose release lets the job be placed, or None; the state stays as it was.

    Candidates are added in the given order until the job fits, then each is left out again, last first, if it still
    fits: no member of the set is superfluous. Of at most ``EXACT_MAX`` candidates the set of least cost is taken.
    No job is stopped as long as jobs that only become smaller make room.
    """
    spare = [one for one in candidates if one[0].ask.spare]
    if 0 < len(spare) < len(candidates):
        found = choose_victims(state, txn, row, placer, spare, now, restart_s=restart_s)
        if found is not None:
            return found
    reasons = {other.ask.id: reason for other, reason in candidates}
    chosen = enough_of(state, txn, row, placer, list(reasons))
    if chosen is None:
        return None
    cost = {job: lost_gpu_s(state, job, now, restart_s) for job in (reasons if len(reasons) <= EXACT_MAX else chosen)}
    if len(reasons) <= EXACT_MAX:
        chosen = _cheapest(state, txn, row, placer, sorted(cost, key=lambda job: (cost[job], job)), cost, chosen)
    return tuple(Victim(job=job, reason=reasons[job], lost_gpu_s=cost[job]) for job in chosen)


def _place_without(state: State, txn: Txn, row: LiveJob, placer: Placer, jobs: Sequence[JobId]) -> Allocations | None:
    if state.parts:
        jobs = list(dict.fromkeys(one for job in jobs for one in state.whole(job)))
    over = state.over_limit(row.ask.queue, row.ask.user, row.ask.shape)
    with txn.trial():
        state.lift(txn, jobs)
        for job in jobs if over else ():
            state.charge(txn, state.jobs[job], -1)
        if over and state.over_limit(row.ask.queue, row.ask.user, row.ask.shape):
            return None
        return placer.place(state, txn, row)


def enough_of(state: State, txn: Txn, row: LiveJob, placer: Placer, order: Sequence[JobId]) -> list[JobId] | None:
    """The first of these whose release lets the job be placed, without those that are superfluous, or None."""
    found = _least_prefix(state, txn, row, placer, order)
    if found is None:
        return None
    least, held = found
    # Only those on the nodes that it would get can matter to that placement.
    nodes = {slot.node for slot in held}
    chosen = [job for job in order[:least] if not nodes.isdisjoint(_nodes_of(state, job))]
    if _place_without(state, txn, row, placer, chosen) is None:
        chosen = list(order[:least])
    for job in reversed(chosen):
        rest = [other for other in chosen if other != job]
        if rest and _place_without(state, txn, row, placer, rest) is not None:
            chosen = rest
    return chosen


def _nodes_of(state: State, job: JobId) -> list[int]:
    return [slot.node for one in state.whole(job) for slot in state.jobs[one].held]


def _least_prefix(
    state: State, txn: Txn, row: LiveJob, placer: Placer, order: Sequence[JobId]
) -> tuple[int, Allocations] | None:
    """How many of these must let go, the first ones, until the job has a place, and which; None: all are too few."""
    low = high = RoomBound(state, row.ask.shape).too_few(order) + 1
    if high > len(order):
        return None
    while (held := _place_without(state, txn, row, placer, order[:high])) is None:
        if high == len(order):
            return None
        low, high = high + 1, min(2 * high, len(order))
    while low < high:
        middle = (low + high) // 2
        found = _place_without(state, txn, row, placer, order[:middle])
        low, high, held = (low, middle, found) if found is not None else (middle + 1, high, held)
    return high, held


def _cheapest(
    state: State,
    txn: Txn,
    row: LiveJob,
    placer: Placer,
    order: Sequence[JobId],
    cost: dict[JobId, float],
    known: list[JobId],
) -> list[JobId]:
    """Sets by rising cost until one fits; ``known`` fits and bounds the search."""
    limit, rooms = sum(cost[job] for job in known), RoomBound(state, row.ask.shape)
    heap: list[tuple[float, int, tuple[int, ...]]] = [(cost[order[0]], 1, (0,))]
    for _ in range(SETS_MAX):
        if not heap:
            break
        total, _, members = heappop(heap)
        if total >= limit:
            break
        jobs = [order[i] for i in members]
        if rooms.too_few(jobs) < len(jobs) and _place_without(state, txn, row, placer, jobs) is not None:
            return jobs
        last = members[-1]
        if last + 1 < len(order):
            step = cost[order[last + 1]]
            heappush(heap, (total + step, len(members) + 1, (*members, last + 1)))
            heappush(heap, (total - cost[order[last]] + step, len(members), (*members[:-1], last + 1)))
    return known


def make_room(
    state: State,
    txn: Txn,
    row: LiveJob,
    placer: Placer,
    candidates: Iterable[LiveJob],
    allowed: Callable[[Sequence[LiveJob]], bool],
    reason: Reason,
    now: float,
    *,
    may_stop: Callable[[LiveJob], bool] | None = lambda _: True,
) -> tuple[Victim, ...] | None:
    """Stop candidates one by one until the job fits and the rest is ``allowed``; who fits elsewhere is only moved.

    After each one more the job is placed and then the stopped ones are placed again in the same order, where they
    were if possible. A job that lies as before is not a victim; one that lies elsewhere is a victim that may continue
    there at once (``Victim.to``); the others are stopped, and ``allowed`` judges them in the order in which they were
    taken. Each victim is left out again, last first, if the job still fits: none is superfluous. None if no such set
    of at most ``VICTIMS_MAX`` jobs was found; the state stays as it was. Who ``may_stop`` is False for is never
    allowed to, whoever else stops, nor is any without it: moves alone free no more devices.
    """
    missing, pool = missing_milli(state, row.ask.shape), list[LiveJob]()
    if missing > 0 and may_stop is None:
        return None
    enough = 0 if missing <= 0 else None
    for other in islice(candidates, VICTIMS_MAX):
        pool.append(other)
        if enough is None and may_stop is not None and may_stop(other):
            missing -= sum(len(held.devices) * (held.milli or 1000) for held in other.held)
            enough = len(pool) if missing <= 0 else None
    if enough is None:
        return None
    least = _least_prefix(state, txn, row, placer, [other.ask.id for other in pool])
    for count in range(max(least[0], enough), len(pool) + 1) if least is not None else ():
        taken = pool[:count]
        places = _refit(state, txn, row, placer, taken)
        if places is not None and allowed([r for r in taken if r.ask.id not in places]):
            # A job that stays on its nodes need not stop at all, if the new one fits beside it device by device.
            moved = [r for r in taken if _nodes(places.get(r.ask.id, ())) != _nodes(r.held)]
            fewer = _refit(state, txn, row, placer, moved) if len(moved) < len(taken) else None
            if fewer is not None and allowed([r for r in moved if r.ask.id not in fewer]):
                taken, places = moved, fewer
            for other in [r for r in reversed(taken) if places.get(r.ask.id) != r.held]:
                rest = [r for r in taken if r is not other]
                fewer = _refit(state, txn, row, placer, rest) if rest else None
                stopped = rest if fewer is None else [r for r in rest if r.ask.id not in fewer]
                if fewer is not None and allowed(stopped) and not any(r.ask.id in places for r in stopped):
                    taken, places = rest, fewer
            return tuple(
                Victim(
                    job=r.ask.id,
                    reason=reason,
                    lost_gpu_s=lost_gpu_s(state, r.ask.id, now),
                    to=places.get(r.ask.id, ()),
                )
                for r in taken
                if places.get(r.ask.id) != r.held
            )
    return None


def missing_milli(state: State, shape: Shape) -> int:
    """Thousandths of devices that a shape asks beyond those that are free now: moving jobs leaves this as it is."""
    able = (state.dev_health == 0) & state.usable[state.dev_node]
    return shape.gpu_milli - int(state.dev_milli[able].sum())


def refit(
    state: State,
    txn: Txn,
    row: LiveJob,
    placer: Placer,
    taken: Sequence[LiveJob],
    again: Callable[[LiveJob], Allocations | None],
) -> tuple[Allocations, dict[JobId, Allocations]] | None:
    """In a trial: the place of the job with the taken released, and where ``again`` then puts each of those.

    None if the job has no place even so. The state is left with all of them at their places.
    """
    for other in taken:
        state.release(txn, other.ask.id)
    held = placer.place(state, txn, row)
    if held is None:
        return None
    take_all(state, txn, held)
    places: dict[JobId, Allocations] = {}
    for other in taken:
        to = again(other)
        if to is not None:
            take_all(state, txn, to)
            places[other.ask.id] = to
    return held, places


def _refit(
    state: State, txn: Txn, row: LiveJob, placer: Placer, taken: Sequence[LiveJob]
) -> dict[JobId, Allocations] | None:
    """Where each of the taken would lie again, where it was if possible; None if the job has no place.

    One that would pass a limit together with the job lies nowhere.
    """
    places: dict[JobId, Allocations] = {}
    with txn.trial():
        for other in taken:
            take_all(state, txn, other.held, -1)
            state.charge(txn, other, -1)
            for book in state.books:
                book.release(txn, state, other)
        over = state.over_limit(row.ask.queue, row.ask.user, row.ask.shape)
        held = None if over else placer.place(state, txn, row)
        if held is None:
            return None
        take_all(state, txn, held)
        state.charge(txn, row, 1)
        for other in taken:
            if state.over_limit(other.ask.queue, other.ask.user, other.ask.shape):
                continue
            to = other.held if _is_free(state, other.held) else placer.place(state, txn, other)
            if to is not None:
                take_all(state, txn, to)
                state.charge(txn, other, 1)
                places[other.ask.id] = to
    return places


def _nodes(held: Sequence[Allocation]) -> list[int]:
    return [slot.node for slot in held]


def take_all(state: State, txn: Txn, held: Sequence[Allocation], sign: int = 1) -> None:
    """Take every slot, or with ``sign`` -1 give it back."""
    for slot in held:
        state.take(txn, slot, sign)


def _is_free(state: State, held: Sequence[Allocation]) -> bool:
    return all(
        int(state.cpu[slot.node]) >= slot.cpu_milli
        and int(state.mem[slot.node]) >= slot.mem
        and all(int(state.dev_milli[d]) >= (slot.milli or 1000) for d in slot.devices)
        for slot in held
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillReservation:
    """From ``at`` on these slots are kept for a job that could not start when its turn came."""

    job: JobId
    at: float
    held: Allocations
    level: int = 0
    """Which promise covers the job."""


def earliest_start(state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> BackfillReservation | None:
    """When the job fits, if running jobs end as estimated, and where; None if the estimates do not say it.

    Estimates only reserve; a job that runs on past its own is expected to end at any moment.
    """
    ends = state.ends
    low, high = RoomBound(state, row.ask.shape).too_few(job for _, job in ends) + 1, len(ends)
    middle = low
    best: tuple[float, Allocations] | None = None
    while low <= high:
        with txn.trial():
            state.lift(txn, (job for _, job in ends[:middle]))
            held = placer.place(state, txn, row)
        if held is None:
            low = middle + 1
        else:
            best, high = (max(now, ends[middle - 1][0]), held), middle - 1
        middle = (low + high) // 2
    return None if best is None else BackfillReservation(job=row.ask.id, at=best[0], held=best[1])


class BackfillReservations:
    """Those of one pass: the first blocked job of a queue gets the earliest time at which it fits.

    That takes long to find, so it is put off until another job fits and might be in the way; others may run until then.
    """

    def __init__(self, state: State, txn: Txn, placer: Placer, now: float) -> None:
        self._state, self._txn, self._placer, self._now = state, txn, placer, now
        self._first: dict[str, LiveJob | None] = {}
        self._made: list[BackfillReservation] = []

    def owe(self, row: LiveJob) -> None:
        """The job was blocked when its turn came; of its queue only the first one counts."""
        self._first.setdefault(row.ask.queue, row)

    def make(self, excluding: Callable[[LiveJob], AbstractContextManager[object]]) -> None:
        """Find the times that are owed, each with what the job may not use ``excluding``."""
        found: dict[LineKey, BackfillReservation | None] = {}
        for queue, row in self._first.items():
            if row is not None:
                self._first[queue] = None
                key = place_key(line_key(row))
                if key not in found:
                    with excluding(row):
                        found[key] = earliest_start(self._state, self._txn, row, self._placer, self._now)
                if (reservation := found[key]) is not None:
                    level = promise_level(self._state, row)
                    self._made.append(replace(reservation, job=row.ask.id, level=level))

    def outlived_by(self, row: LiveJob) -> list[BackfillReservation]:
        """Those that the job keeps out of the way of, and that it would still run in if it started now, or might."""
        left_s = row.left_late_s
        late = [one for one in self._made if left_s is None or self._now + left_s > one.at]
        level = promise_level(self._state, row) if late else 0
        return [one for one in late if waits_for(row, level, self._state.jobs[one.job], one.level)]


class RoomBound:
    """How far the room that jobs give back falls short of a request; exact for equal slots of whole devices."""

    def __init__(self, state: State, shape: Shape) -> None:
        self._state = state
        self._slot = shape.slots[0] if shape.uniform and shape.slots[0].gpus else None
        if self._slot is None:
            self._missing = missing_milli(state, shape)
        else:
            self._missing = len(shape.slots) - int(slots_that_fit(state, self._slot, state.usable).sum())

    def too_few(self, jobs: Iterable[JobId]) -> int:
        """How many of these, the first ones, may let go and there is still not enough room: a lower bound."""
        state, missing, count = self._state, self._missing, -1
        nodes: dict[int, _NodeRoom] = {}
        for count, job in enumerate(jobs):
            for one in state.whole(job):
                for held in state.jobs[one].held:
                    missing -= self._more(nodes, held)
            if missing <= 0:
                return count
        return count + 1

    def _more(self, nodes: dict[int, _NodeRoom], held: Allocation) -> int:
        if self._slot is None:
            return len(held.devices) * 1000
        room = nodes.get(held.node)
        if room is None:
            room = nodes[held.node] = _NodeRoom(self._state, self._slot, held.node)
        return room.more(self._state, held)


class _NodeRoom:
    """How many slots fit on a node while those who hold something there end one after the other."""

    def __init__(self, state: State, slot: Slot, node: int) -> None:
        self._slot, self._able = slot, not state.node_health[node]
        self._free: list[int] = state.free[node].tolist()
        self._cpu, self._mem = int(state.cpu[node]), int(state.mem[node])
        self._count = self._fit(state)

    def more(self, state: State, held: Allocation) -> int:
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


class TentativeAllocations:
    """The holdings that claimants will get; what is free of them is taken for the rest of the pass.

    ``jobs`` are the claimants, oldest claim first.
    """

    def __init__(self, state: State, txn: Txn) -> None:
        self._state, self._txn = state, txn
        self._claims: list[tuple[Allocation, Allocation]] = []
        self._back: tuple[tuple[int, int, int], int] = ((-1, 0, 0), 0)
        self.jobs: list[JobId] = []

    def __bool__(self) -> bool:
        return bool(self._claims)

    def given_back(self, stopping: Sequence[JobId]) -> int:
        """Thousandths of devices at most, free ones and what these jobs give back, that no job has claimed yet."""
        as_of = (self._txn.changes, len(stopping), len(self._claims))
        if self._back[0] != as_of:
            self._back = (as_of, self._count_back(stopping))
        return self._back[1]

    def _count_back(self, stopping: Sequence[JobId]) -> int:
        back = sum(_milli(slot) for job in stopping for slot in self._state.jobs[job].held)
        owed = sum(_milli(claim) - _milli(part) for claim, part in self._claims)
        return int(self._state.dev_milli.sum()) + back - owed

    def release_all(self, stopping: Iterable[JobId]) -> None:
        """In a trial: the state as it will be once these jobs have let go, less what is claimed of it."""
        for job in stopping:
            self._state.release(self._txn, job)
        for claim, part in self._claims:
            self._state.take(self._txn, part, -1)
            self._state.take(self._txn, claim, 1)

    def keep(self, held: Iterable[Allocation]) -> None:
        """Claim a holding."""
        for slot in held:
            self._claims.append((slot, take_what_is_free(self._state, self._txn, slot)))


def take_what_is_free(state: State, txn: Txn, slot: Allocation) -> Allocation:
    """Take what is free of a slot, and say what that was."""
    need = slot.milli or 1000
    devices = tuple(d for d in slot.devices if int(state.dev_milli[d]) >= need)
    cpu = min(slot.cpu_milli, int(state.cpu[slot.node]))
    mem = min(slot.mem, int(state.mem[slot.node]))
    part = Allocation(slot.node, devices, slot.milli, cpu, mem)
    state.take(txn, part, 1)
    return part


def _milli(slot: Allocation) -> int:
    return len(slot.devices) * (slot.milli or 1000)
