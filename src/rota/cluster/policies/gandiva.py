"""Gandiva: nodes for one size of job, moves, and turns in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.jobs import Allocation, Allocations, LiveJob
from rota.cluster.core.placement import best_fit, place
from rota.cluster.core.preemption import enough_of, missing_milli, refit, take_all
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import LimitsOnly
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

MOVE_S = 30.0
"""Seconds of a device that saving a job and restoring it elsewhere take."""
ROUND_S = 20 * MOVE_S
"""Seconds of a round: preemption costs at most 5 % of the devices. Gandiva (OSDI'18) suspends a job in a second, in
rounds of one minute; here a job saves, ends its processes and starts anew."""
LEVELS = ("device", "node", "rack", "cluster")
"""From close to far."""
SETS_MAX = 16
"""Jobs that are tried one by one as the only one to move."""
MOVED_MAX = 8
"""Jobs that move at most so that one fits."""


class SizeBook:
    """Which sizes of jobs each node has, which jobs can use more than they ask, and who could share devices with whom.

    ``nodes[size]`` counts the bundles of that many devices by node, ``all`` those of any size.
    """

    def __init__(self, state: State) -> None:
        self.all = np.zeros(len(state.nodes), dtype=np.int32)
        self.nodes: dict[int, NDArray[np.int32]] = {}
        self.elastic: dict[JobId, None] = {}
        self.single: dict[int, dict[JobId, None]] = {}
        txn = Txn()
        for row in state.holders():
            self.hold(txn, state, row)

    def hold(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job was given its slots."""
        self._count(txn, row, 1)
        if row.ask.slots_max and row.ask.shape.uniform:
            txn.put(self.elastic, row.ask.id, None)
        if len(row.ask.shape.slots) == 1:
            txn.put(self.single.setdefault(row.ask.shape.slots[0].gpus, {}), row.ask.id, None)

    def release(self, txn: Txn, state: State, row: LiveJob) -> None:
        """A job gave its slots back."""
        self._count(txn, row, -1)
        for index in (self.elastic, *self.single.values()):
            if row.ask.id in index:
                txn.drop(index, row.ask.id)

    def reserve(self, txn: Txn, state: State, row: LiveJob) -> None:
        """No-op: a queued job has no allocation."""

    def _count(self, txn: Txn, row: LiveJob, sign: int) -> None:
        for slot, held in zip(row.ask.shape.slots, row.held):
            of_size = self.nodes.setdefault(slot.gpus, np.zeros_like(self.all))
            txn.add(of_size, held.node, sign)
            txn.add(self.all, held.node, sign)

    def kinship(self, nodes: NDArray[np.int32], size: int) -> NDArray[np.int64]:
        """Affinity rank of each node for a job of this size: 0 has jobs of that size, 1 is empty, 2 has others."""
        same = self.nodes.get(size)
        strange = np.where(self.all[nodes] > 0, 2, 1).astype(np.int64)
        return strange if same is None else np.where(same[nodes] > 0, 0, strange)


def book_of(state: State) -> SizeBook:
    """The book of a state; one that is made outside of ``_prepare`` is not kept, as a trial may be undone."""
    return next((book for book in state.books if isinstance(book, SizeBook)), None) or SizeBook(state)


def _prepare(state: State) -> None:
    if not any(isinstance(book, SizeBook) for book in state.books):
        state.books.append(SizeBook(state))


@dataclass(frozen=True, slots=True)
class LongestWithout:
    """Who has been without devices longest: since it was submitted, or since it last gave them back."""

    by_job = True

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """The time since which the job has no devices, in seconds of the clock of the state."""
        return (max(row.ask.queued_at, row.left_at),)


@dataclass(frozen=True, slots=True)
class ByAffinity:
    """Nodes with jobs of the same size first, then empty ones, then others; the fullest of equal ones."""

    def place(self, state: State, txn: Txn, row: LiveJob) -> Allocations | None:
        """A place by the size of the largest bundle of the job; None if none fits."""
        size = max(slot.gpus for slot in row.ask.shape.slots)

        def strange(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
            fullest = best_fit(state, nodes)
            return book_of(state).kinship(nodes, size) * (int(fullest.max(initial=0)) + 1) + fullest

        return place(state, txn, row.ask.shape, prefer=strange)


@dataclass(frozen=True, slots=True)
class MoveThenTurns:
    """Move running jobs so that one fits; where that does not help, the job that ran longest gives way for a round.

    Only jobs that ran before this round began are taken, so no job is moved or stopped twice in one. A move lowers the
    potential, does not increase the distance between devices of a job, and costs less device time than it gives:
    ``move_s`` is what saving and restoring take, ``horizon_s`` is taken as the length of a job without an estimate. A
    job that asks and fits nowhere causes moves; idle nodes and departures alone cause none.
    Source: Gandiva (OSDI'18), sections 3.2 and 3.3.
    """

    round_s: float
    move_s: float = MOVE_S
    horizon_s: float = 3600.0
    turns: bool = True

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """Jobs to move, each with its new place (``to``); else those whose turn is over; None if neither makes room."""
        able = self._able(state, txn, now)
        places = self._moves(state, txn, row, placer, able, now)
        if places:
            return tuple(self._victim(state, job, Reason.MIGRATED_AFFINITY, to) for job, to in places.items())
        if not self.turns:
            return None
        order = [other.ask.id for other in able]  # in the order of their turns
        chosen = enough_of(state, txn, row, placer, order)
        return tuple(self._victim(state, job, Reason.TIME_SLICE) for job in chosen or ()) or None

    def _able(self, state: State, txn: Txn, now: float) -> list[LiveJob]:
        """Who may be moved or stopped, in the order of their turns; put in order once for a pass."""
        known = cast("list[LiveJob] | None", txn.notes.get((self, now)))
        if known is None:
            running = (state.jobs[job] for jobs in state.running.values() for job in jobs)
            before = now // self.round_s
            able = (r for r in running if r.ask.may_stop and not r.ask.avoid and r.started_at // self.round_s < before)
            known = txn.notes[self, now] = sorted(able, key=_turn)
        return [row for row in known if row.ask.id in state.jobs and state.jobs[row.ask.id].phase == "running"]

    def _victim(self, state: State, job: JobId, reason: Reason, to: Allocations = ()) -> Victim:
        lost_gpu_s = self.move_s * state.jobs[job].ask.shape.gpu_milli / 1000
        return Victim(job=job, reason=reason, lost_gpu_s=lost_gpu_s, to=to)

    def _moves(
        self, state: State, txn: Txn, row: LiveJob, placer: Placer, able: Sequence[LiveJob], now: float
    ) -> dict[JobId, Allocations] | None:
        """One job if one is enough, else the first of those on the emptiest nodes, none of them superfluous."""
        if missing_milli(state, row.ask.shape) > 0:
            return None
        free = state.free.sum(axis=1).tolist()
        worth = [other for other in able if _rest_s(other, now, self.horizon_s) > self.move_s]
        worth.sort(key=lambda r: (-free[r.held[0].node], r.ask.shape.gpu_milli, r.ask.id))
        sets = [[other] for other in worth[:SETS_MAX]]
        sets += [worth[:count] for count in range(2, min(MOVED_MAX, len(worth)) + 1)]
        for moved in sets:
            places = self._plan(state, txn, row, placer, moved)
            if places is None:
                continue
            for other in moved:
                rest = [one for one in moved if one is not other and one.ask.id in places]
                fewer = self._plan(state, txn, row, placer, rest) if rest else None
                places = fewer or places
            return places
        return None

    def _plan(
        self, state: State, txn: Txn, row: LiveJob, placer: Placer, moved: Sequence[LiveJob]
    ) -> dict[JobId, Allocations] | None:
        """New allocations of these jobs after the job is placed, as the next passes will find them; None: no gain."""
        cost_gpu_s = self.move_s * sum(other.ask.shape.gpu_milli for other in moved)
        if cost_gpu_s >= (row.ask.est_s or self.horizon_s) * row.ask.shape.gpu_milli:
            return None
        before = potential(state.free.sum(axis=1).tolist())
        in_turn = sorted(moved, key=lambda other: (other.ask.queued_at, other.ask.id))

        def nearby(other: LiveJob) -> Allocations | None:
            to = placer.place(state, txn, other)
            return None if to is None or _distance(state, to) > _distance(state, other.held) else to

        with txn.trial():
            found = refit(state, txn, row, placer, in_turn, nearby)
            if found is None or len(found[1]) < len(moved):
                return None
            take_all(state, txn, found[0], -1)
            return found[1] if potential(state.free.sum(axis=1).tolist()) < before else None


def _turn(row: LiveJob) -> tuple[bool, float, JobId]:
    """Who gives way first: what its job can do without, then who ran longest."""
    return (not row.ask.spare, row.started_at, row.ask.id)


def _rest_s(row: LiveJob, now: float, horizon_s: float) -> float:
    return horizon_s if row.left_s is None else row.left_s - (now - row.started_at)


def _distance(state: State, held: Sequence[Allocation]) -> int:
    return LEVELS.index(state.level_of(held))


def gandiva(round_s: float = ROUND_S) -> Profile:
    """Nodes by size of job; waiting jobs make running ones move, or take turns with them in rounds."""
    return Profile(
        name="gandiva",
        order=LongestWithout(),
        division=LimitsOnly(),
        placer=ByAffinity(),
        victims=MoveThenTurns(round_s),
        remember=False,
        prepare=_prepare,
        victim_sets_max=1,
        vain_max=4,
        round_s=round_s,
    )


def gandiva_pack(round_s: float = ROUND_S) -> Profile:
    """The same; a simulation also gives two jobs the same devices while both together gain by it."""
    return replace(gandiva(round_s), name="gandiva-pack")


def potential(free: Sequence[int]) -> int:
    """Minus the sum of the squares of what is free on each node: lowest where free devices lie together.

    Moving ``g`` devices from a node with ``s`` free to one with ``t`` changes it by ``2 g (t - s - g)``. It is a whole
    number with a least value, so moves that lower it come to an end.
    """
    return -sum(devices * devices for devices in free)
