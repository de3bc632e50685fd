"""Whom to evict so that another fits, at least cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from rota.cluster.core.plugins import Placer, Victim
from rota.cluster.core.reserve import Rooms
from rota.cluster.core.rows import Held, JobRow
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

EXACT_MAX = 12
"""Up to so many candidates the least-cost set is searched exactly."""
SETS_MAX = 600
"""Sets tried at most in the exact search; beyond, the inclusion-minimal set stands."""


def lost_gpu_s(state: State, job: JobId, now: float, restart_s: float = 0.0) -> float:
    """Device-seconds that stopping a job throws away: work since its last commit, and its restart."""
    row = state.jobs[job]
    unsaved_s = now - row.saved_at
    lost = row.ask.shape.gpu_milli / 1000 * ((unsaved_s if unsaved_s > 0.0 else 0.0) + restart_s)
    if job in state.parts:
        lost += sum(lost_gpu_s(state, part, now, restart_s) for part in state.whole(job)[1:])
    return lost


def choose_victims(
    state: State,
    txn: Txn,
    row: JobRow,
    placer: Placer,
    candidates: Sequence[tuple[JobRow, Reason]],
    now: float,
    *,
    restart_s: float = 60.0,
) -> tuple[Victim, ...] | None:
    """A set of these candidates whose release lets the job be placed, or None; the state stays as it was.

    Candidates are added in the given order until the job fits, then each is left out again, last first, if it still
    fits: no member of the set is superfluous. Of at most ``EXACT_MAX`` candidates the set of least cost is taken.
    Nobody is stopped as long as jobs that only become smaller make room.
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


def _place_without(
    state: State, txn: Txn, row: JobRow, placer: Placer, jobs: Sequence[JobId]
) -> tuple[Held, ...] | None:
    if state.parts:
        jobs = list(dict.fromkeys(one for job in jobs for one in state.whole(job)))
    with txn.trial():
        state.lift(txn, jobs)
        return placer.place(state, txn, row)


def enough_of(state: State, txn: Txn, row: JobRow, placer: Placer, order: Sequence[JobId]) -> list[JobId] | None:
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
    state: State, txn: Txn, row: JobRow, placer: Placer, order: Sequence[JobId]
) -> tuple[int, tuple[Held, ...]] | None:
    """How many of these must let go, the first ones, until the job has a place, and which; None: all are too few."""
    low = high = Rooms(state, row.ask.shape).too_few(order) + 1
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
    row: JobRow,
    placer: Placer,
    order: Sequence[JobId],
    cost: dict[JobId, float],
    known: list[JobId],
) -> list[JobId]:
    """Sets by rising cost until one fits; ``known`` fits and bounds the search."""
    limit, rooms = sum(cost[job] for job in known), Rooms(state, row.ask.shape)
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


# -- room by stopping and moving --


def make_room(
    state: State,
    txn: Txn,
    row: JobRow,
    placer: Placer,
    candidates: Iterable[JobRow],
    allowed: Callable[[Sequence[JobRow]], bool],
    reason: Reason,
    now: float,
    *,
    victims_max: int = 100,
) -> tuple[Victim, ...] | None:
    """Stop candidates one by one until the job fits and the rest is ``allowed``; who fits elsewhere is only moved.

    After each one more the job is placed and then the stopped ones are placed again in the same order, where they
    were if possible. Whoever comes to lie as before is no victim; who comes to lie elsewhere is one that may go on
    there at once (``Victim.to``); the others are stopped, and ``allowed`` judges them in the order in which they were
    taken. None if no such set of at most ``victims_max`` jobs was found; the state stays as it was.
    """
    pool = list(islice(candidates, victims_max))
    least = _least_prefix(state, txn, row, placer, [other.ask.id for other in pool])
    for count in range(least[0], len(pool) + 1) if least is not None else ():
        taken = pool[:count]
        places = _refit(state, txn, row, placer, taken)
        if places is not None and allowed([r for r in taken if r.ask.id not in places]):
            # Whoever stays on its nodes need not stop at all, if the job fits beside it device by device.
            moved = [r for r in taken if _nodes(places.get(r.ask.id, ())) != _nodes(r.held)]
            fewer = _refit(state, txn, row, placer, moved) if len(moved) < len(taken) else None
            if fewer is not None and allowed([r for r in moved if r.ask.id not in fewer]):
                taken, places = moved, fewer
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


def refit(
    state: State,
    txn: Txn,
    row: JobRow,
    placer: Placer,
    taken: Sequence[JobRow],
    again: Callable[[JobRow], tuple[Held, ...] | None],
) -> tuple[tuple[Held, ...], dict[JobId, tuple[Held, ...]]] | None:
    """In a trial: the place of the job with the taken released, and where ``again`` then puts each of those.

    None if the job has no place even so. The state is left with all of them at their places.
    """
    for other in taken:
        state.release(txn, other.ask.id)
    held = placer.place(state, txn, row)
    if held is None:
        return None
    take_all(state, txn, held)
    places: dict[JobId, tuple[Held, ...]] = {}
    for other in taken:
        to = again(other)
        if to is not None:
            take_all(state, txn, to)
            places[other.ask.id] = to
    return held, places


def _refit(
    state: State, txn: Txn, row: JobRow, placer: Placer, taken: Sequence[JobRow]
) -> dict[JobId, tuple[Held, ...]] | None:
    """Where each of the taken would lie again, where it was if possible; None if the job has no place."""

    def again(other: JobRow) -> tuple[Held, ...] | None:
        return other.held if _is_free(state, other.held) else placer.place(state, txn, other)

    with txn.trial():
        found = refit(state, txn, row, placer, taken, again)
    return None if found is None else found[1]


def _nodes(held: Sequence[Held]) -> list[int]:
    return [slot.node for slot in held]


def take_all(state: State, txn: Txn, held: Sequence[Held], sign: int = 1) -> None:
    """Take every slot, or with ``sign`` -1 give it back."""
    for slot in held:
        state.take(txn, slot, sign)


def _is_free(state: State, held: Sequence[Held]) -> bool:
    return all(
        int(state.cpu[slot.node]) >= slot.cpu_milli
        and int(state.mem[slot.node]) >= slot.mem
        and all(int(state.dev_milli[d]) >= (slot.milli or 1000) for d in slot.devices)
        for slot in held
    )
