"""Keep nodes for one size of job, move jobs until a waiting one fits, and take turns when there is no room at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.cluster.core.placement import best_fit, place
from rota.cluster.core.plugins import Placer, Profile, Victim
from rota.cluster.core.preemption import enough_of, refit, take_all
from rota.cluster.core.rows import Held, JobRow
from rota.cluster.core.slicing import kinship, potential
from rota.cluster.core.snapshot import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.fifo import LimitsOnly
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

PACK_GAIN = 0.05
"""What two jobs on the same devices must run more than one alone."""
LEVELS = ("device", "node", "rack", "cluster")
"""From close to far."""
SETS_MAX = 64
"""Jobs that are tried one by one as the only one to move."""
MOVED_MAX = 8
"""Jobs that move at most so that one fits."""


@dataclass(frozen=True, slots=True)
class LongestWithout:
    """Who has been without devices longest: since it was submitted, or since it last gave them back."""

    by_job = True

    def rank(self, state: State, row: JobRow, now: float) -> tuple[Any, ...]:
        return (max(row.ask.queued_at, row.left_at),)


@dataclass(frozen=True, slots=True)
class ByAffinity:
    """Nodes with jobs of the same size first, then empty ones, then others; the fullest of equal ones."""

    def place(self, state: State, txn: Txn, row: JobRow) -> tuple[Held, ...] | None:
        size = max(slot.gpus for slot in row.ask.shape.slots)
        sizes: dict[int, set[int]] = defaultdict(set)
        for other in state.jobs.values():
            for slot, held in zip(other.ask.shape.slots, other.held):
                sizes[held.node].add(slot.gpus)

        def strange(state: State, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
            fullest = best_fit(state, nodes)
            rank = np.array([kinship(sizes.get(int(node), ()), size) for node in nodes], dtype=np.int64)
            return rank * (int(fullest.max(initial=0)) + 1) + fullest

        return place(state, txn, row.ask.shape, prefer=strange)


@dataclass(frozen=True, slots=True)
class MoveThenTurns:
    """Move running jobs so that one fits; where that does not help, whoever ran longest gives way for a round.

    Only jobs that ran before this round began are taken, so nobody is moved or stopped twice in one. A move lowers the
    potential, takes no job further apart, and costs less device time than it gives: ``move_s`` is what saving and
    restoring take, ``horizon_s`` stands in for the length of a job without an estimate. Who just asks and fits nowhere
    causes moves; idle nodes and departures alone cause none. Source: Gandiva (OSDI'18), sections 3.2 and 3.3.
    """

    round_s: float
    move_s: float = 30.0
    horizon_s: float = 3600.0
    turns: bool = True

    def victims(self, state: State, txn: Txn, row: JobRow, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        able = [
            other
            for other in state.jobs.values()
            if other.phase == "running"
            and other.ask.may_stop
            and not other.ask.avoid
            and other.started_at // self.round_s < now // self.round_s
        ]
        places = self._moves(state, txn, row, placer, able, now)
        if places:
            return tuple(self._victim(state, job, Reason.MIGRATED_AFFINITY, to) for job, to in places.items())
        if not self.turns:
            return None
        order = [other.ask.id for other in sorted(able, key=_turn)]
        chosen = enough_of(state, txn, row, placer, order)
        return tuple(self._victim(state, job, Reason.TIME_SLICE) for job in chosen or ()) or None

    def _victim(self, state: State, job: JobId, reason: Reason, to: tuple[Held, ...] = ()) -> Victim:
        lost_gpu_s = self.move_s * state.jobs[job].ask.shape.gpu_milli / 1000
        return Victim(job=job, reason=reason, lost_gpu_s=lost_gpu_s, to=to)

    def _moves(
        self, state: State, txn: Txn, row: JobRow, placer: Placer, able: Sequence[JobRow], now: float
    ) -> dict[JobId, tuple[Held, ...]] | None:
        """One job if one is enough, else the first of those on the emptiest nodes, none of them superfluous."""
        worth = [other for other in able if _rest_s(other, now, self.horizon_s) > self.move_s]
        worth.sort(key=lambda r: (-int(state.free[r.held[0].node].sum()), r.ask.shape.gpu_milli, r.ask.id))
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
        self, state: State, txn: Txn, row: JobRow, placer: Placer, moved: Sequence[JobRow]
    ) -> dict[JobId, tuple[Held, ...]] | None:
        """Where these come to lie once the job has its place, just as the next passes will find it; None: no gain."""
        cost_gpu_s = self.move_s * sum(other.ask.shape.gpu_milli for other in moved)
        if cost_gpu_s >= (row.ask.est_s or self.horizon_s) * row.ask.shape.gpu_milli:
            return None
        before = potential(state.free.sum(axis=1).tolist())
        in_turn = sorted(moved, key=lambda other: (other.ask.queued_at, other.ask.id))

        def nearby(other: JobRow) -> tuple[Held, ...] | None:
            to = placer.place(state, txn, other)
            return None if to is None or _distance(state, to) > _distance(state, other.held) else to

        with txn.trial():
            found = refit(state, txn, row, placer, in_turn, nearby)
            if found is None or len(found[1]) < len(moved):
                return None
            take_all(state, txn, found[0], -1)
            return found[1] if potential(state.free.sum(axis=1).tolist()) < before else None


def _turn(row: JobRow) -> tuple[Any, ...]:
    """Who gives way first: what its job can do without, then who ran longest."""
    return (not row.ask.spare, row.started_at, row.ask.id)


def _rest_s(row: JobRow, now: float, horizon_s: float) -> float:
    return horizon_s if row.left_s is None else row.left_s - (now - row.started_at)


def _distance(state: State, held: Sequence[Held]) -> int:
    return LEVELS.index(state.level_of(held))


def gandiva(round_s: float = 60.0, pack_gain: float | None = None) -> Profile:
    """Nodes by size of job; waiting jobs make running ones move, or take turns with them in rounds."""
    return Profile(
        name="gandiva" if pack_gain is None else "gandiva-pack",
        order=LongestWithout(),
        division=LimitsOnly(),
        placer=ByAffinity(),
        victims=MoveThenTurns(round_s),
        remember=False,
        round_s=round_s,
        grows=True,
        pack_gain=pack_gain,
    )


def gandiva_pack() -> Profile:
    """The same, with two jobs on the same devices while both together gain by it."""
    return gandiva(pack_gain=PACK_GAIN)
