"""Whom to evict so that another fits, at least cost."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from rota.cluster.core.plugins import Placer, Victim
from rota.cluster.core.snapshot import JobRow, State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

EXACT_MAX = 12
"""Up to so many candidates the least-cost set is searched exactly."""
SETS_MAX = 600
"""Sets tried at most in the exact search; beyond, the inclusion-minimal set stands."""


def lost_gpu_s(row: JobRow, now: float, restart_s: float = 0.0) -> float:
    """Device-seconds that stopping a job throws away: work since its last commit, and its restart."""
    return row.ask.shape.gpu_milli / 1000 * (max(0.0, now - row.saved_at) + restart_s)


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
    """
    cost = {other.ask.id: lost_gpu_s(other, now, restart_s) for other, _ in candidates}
    reasons = {other.ask.id: reason for other, reason in candidates}
    chosen = _greedy(state, txn, row, placer, [other.ask.id for other, _ in candidates])
    if chosen is None:
        return None
    if len(candidates) <= EXACT_MAX:
        chosen = _cheapest(state, txn, row, placer, sorted(cost, key=lambda job: (cost[job], job)), cost, chosen)
    return tuple(Victim(job=job, reason=reasons[job], lost_gpu_s=cost[job]) for job in chosen)


def _fits_without(state: State, txn: Txn, row: JobRow, placer: Placer, jobs: Sequence[JobId]) -> bool:
    with txn.trial():
        for job in jobs:
            state.release(txn, job)
        return placer.place(state, txn, row) is not None


def _greedy(state: State, txn: Txn, row: JobRow, placer: Placer, order: Sequence[JobId]) -> list[JobId] | None:
    low, high = 1, len(order)
    if not order or not _fits_without(state, txn, row, placer, order):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_without(state, txn, row, placer, order[:middle]) else (middle + 1, high)
    chosen = list(order[:high])
    for job in reversed(order[:high]):
        rest = [other for other in chosen if other != job]
        if rest and _fits_without(state, txn, row, placer, rest):
            chosen = rest
    return chosen


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
    limit = sum(cost[job] for job in known)
    heap: list[tuple[float, int, tuple[int, ...]]] = [(cost[order[0]], 1, (0,))]
    for _ in range(SETS_MAX):
        if not heap:
            break
        total, _, members = heappop(heap)
        if total >= limit:
            break
        if _fits_without(state, txn, row, placer, [order[i] for i in members]):
            return [order[i] for i in members]
        last = members[-1]
        if last + 1 < len(order):
            step = cost[order[last + 1]]
            heappush(heap, (total + step, len(members) + 1, (*members, last + 1)))
            heappush(heap, (total - cost[order[last]] + step, len(members), (*members[:-1], last + 1)))
    return known
