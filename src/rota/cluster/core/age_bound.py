"""Age bound: devices are kept free for a job that waited too long, whoever the order puts before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rota.cluster.core.jobs import LiveJob, Wait, line_key, place_key
from rota.cluster.core.preemption import BackfillReservation, earliest_start
from rota.cluster.core.profile import Profile
from rota.cluster.core.promises import promise_level, waits_for
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.spec.ids import JobId
from rota.spec.reasons import Reason


class AgeBound:
    """The rule in one pass: of the first jobs of their queues, the one that waited longest beyond the bound goes first.

    It holds for a job that would run if all running ones ended, so that what is kept free is used in the end.
    """

    def __init__(
        self,
        state: State,
        txn: Txn,
        profile: Profile,
        now: float,
        excluding: Callable[[LiveJob], AbstractContextManager[object]],
    ) -> None:
        self._state, self._txn, self._profile, self._now, self._excluding = state, txn, profile, now, excluding
        self._aged: list[JobId] | None = None
        self._reservations: dict[JobId, BackfillReservation | None] = {}

    def verdict(self, row: LiveJob, claimants: Sequence[JobId]) -> Wait | None:
        """Why a job has to wait for an older one, or None; ``claimants`` have their devices already.

        Who has a higher priority than that job, or is promised what it asks, need not wait for it. For as long again
        also who is over before that job can start by the estimates; beyond that estimates have proved wrong.
        """
        first = self._first(claimants) if self._profile.starve_s < math.inf else None
        if first is None or first.ask.id == row.ask.id or not self._waits_for(first, row):
            return None
        waited_s, until = self._now - _waits_since(first), self._now
        if row.left_late_s is not None and waited_s < 2 * self._profile.starve_s:
            reservation = self._reservation_of(first)
            until = self._now if reservation is None else reservation.at
            if self._now + row.left_late_s <= until:
                return None
        text = f"Free devices are kept for {first.ask.id}, which has waited for {waited_s / 3600:.1f} h."
        return Wait(reason=Reason.RESERVED_FOR_OTHER, text=text, fields={"for": [first.ask.id], "until": until})

    def _reservation_of(self, first: LiveJob) -> BackfillReservation | None:
        if first.ask.id not in self._reservations:
            with self._excluding(first):
                made = earliest_start(self._state, self._txn, first, self._profile.placer, self._now)
            self._reservations[first.ask.id] = made
        return self._reservations[first.ask.id]

    def _waits_for(self, first: LiveJob, row: LiveJob) -> bool:
        if row.ask.priority > first.ask.priority or row.ask.failover:
            return False
        if not self._profile.promises:
            return True
        return waits_for(row, promise_level(self._state, row), first, promise_level(self._state, first))

    def _first(self, claimants: Sequence[JobId]) -> LiveJob | None:
        if self._aged is None:
            heads = map(self._head_of, self._state.waiting.values())
            aged = [row for row in heads if row and self._now - _waits_since(row) >= self._profile.starve_s]
            aged.sort(key=lambda row: (-row.ask.priority, _waits_since(row), row.ask.id))
            self._aged = [row.ask.id for row in aged if self._could_run(row)]
        waiting = (self._state.jobs[job] for job in self._aged if job not in claimants)
        return next((row for row in waiting if row.phase == "queued"), None)

    def _head_of(self, waiting: Sequence[tuple[int, float, JobId]]) -> LiveJob | None:
        for *_, job in waiting:
            row = self._state.jobs[job]
            # What a job can do without holds up no other.
            if row.begins_at <= self._now and not row.ask.opportunistic and not row.ask.spare:
                return row
        return None

    def _could_run(self, row: LiveJob) -> bool:
        """Whether nothing but running jobs keeps a job from its place: it would fit if all of them ended."""
        state, tree = self._state, self._state.queues
        line = tree.line_of(row.ask.queue)
        if not line or not all(tree.rows[queue].starts_jobs for queue in line):
            return False
        if self._profile.division.verdict(state, row) is not None:
            return False
        key = (state.marks, place_key(line_key(row)))
        if key not in state.answers.empty_fits:
            with self._excluding(row), self._txn.trial():
                state.lift(self._txn, [other.ask.id for other in state.holders()])
                state.answers.empty_fits[key] = self._profile.placer.place(state, self._txn, row) is not None
        return state.answers.empty_fits[key]


def _waits_since(row: LiveJob) -> float:
    return max(row.ask.queued_at, row.left_at)
