"""Order of waiting jobs: which one is tried next, and which verdict holds for those behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, NamedTuple

from rota.cluster.core.admission import too_few_free
from rota.cluster.core.jobs import JobRow, LineKey, Wait, line_key
from rota.cluster.core.preemption import Reservations
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.spec.ids import JobId
from rota.spec.reasons import INFO, Reason

PASSED_BY = frozenset({Reason.NOT_BEFORE, Reason.COOL_DOWN, Reason.USER_LIMIT})
"""Reasons that lie in the job or its user: those behind it in its queue need not wait with it."""

FOR_ONE_JOB = frozenset({Reason.AWAITING_PREEMPTION, Reason.RESERVED_FOR_OTHER})
"""Reasons that hold for one job of a line only: the next one may be shorter, or find victims of its own."""

BY_PLACE = {Reason.NO_FREE_DEVICES, Reason.FRAGMENTED, Reason.WRONG_TYPE, Reason.CPU_OR_MEMORY, Reason.TOPOLOGY}
"""Reasons of jobs whose queue might start them, and that find no place."""


class Turn(NamedTuple):
    """A job that is to be tried: its place in the order, its line or queue, how far down, and the starts until then."""

    place: tuple[Any, ...]
    track: Any
    depth: int
    starts: int


@dataclass(frozen=True, slots=True)
class Known:
    """A "no" that was reached before: its numbers are found when a job gets it as its reason."""

    reason: Reason


class Turns:
    """The first job of every line of equal jobs, or of every queue, in the order of the policy; then who is behind it.

    ``starts`` counts starts and claims so far: ranks stay as they are until there is one more.
    """

    def __init__(
        self, state: State, profile: Profile, now: float, reservations: Reservations, starts: Callable[[], int]
    ) -> None:
        self._state, self._profile, self._now, self._starts = state, profile, now, starts
        self._reservations = reservations
        self._by_job, self._by_queue = profile.order.by_job, profile.block == "queue"
        self._tracks: Mapping[Any, Sequence[tuple[Any, ...]]] = state.asking if self._by_queue else state.lines
        self._heap = [
            self._at(track, depth)
            for track, jobs in self._tracks.items()
            for depth in range(len(jobs) if self._by_job else 1)
        ]
        heapify(self._heap)

    def next(self) -> tuple[Turn, JobRow, LineKey] | None:
        """The turn that comes first, with its job and the line of that."""
        heap = self._heap
        while heap:
            turn = heap[0]
            row = self._state.jobs[turn.place[-1]]
            if turn.starts != self._starts():
                again = self._turn(row, turn.track, turn.depth)
                if again.place > turn.place:
                    heapreplace(heap, again)
                    continue
            heappop(heap)
            return turn, row, line_key(row) if self._by_queue else turn.track
        return None

    def after(self, turn: Turn, wait: Wait | Known | None) -> None:
        """Who of the line, or queue, is tried after this one: the next, unless what stops this one stops them all."""
        depth = turn.depth + 1
        if wait is None:
            depth = turn.depth
        elif wait.reason is Reason.RESERVED_FOR_OTHER and not self._by_queue:
            depth = self._shorter(turn.track, turn.depth)
        elif wait.reason not in FOR_ONE_JOB and not (self._by_queue and wait.reason in PASSED_BY):
            return
        if not self._by_job and depth < len(self._tracks.get(turn.track, ())):
            heappush(self._heap, self._at(turn.track, depth))

    def _shorter(self, key: LineKey, depth: int) -> int:
        """The next in the line that is over before the last of the reservations that this one would outlive."""
        line, jobs = self._state.lines[key], self._state.jobs
        ends = [r.at for r in self._reservations.outlived_by(jobs[line[depth][1]])]
        if not ends:  # it was not tried in this pass, which had tried enough: nor are those behind it
            return len(line)
        left = ((i, jobs[line[i][1]].left_s) for i in range(depth + 1, len(line)))
        return next((i for i, left_s in left if left_s is not None and self._now + left_s <= max(ends)), len(line))

    def _at(self, track: Any, depth: int) -> Turn:
        return self._turn(self._state.jobs[self._tracks[track][depth][-1]], track, depth)

    def _turn(self, row: JobRow, track: Any, depth: int) -> Turn:
        return Turn(place_in_order(self._state, self._profile, row, self._now), track, depth, self._starts())


def place_in_order(state: State, profile: Profile, row: JobRow, now: float) -> tuple[Any, ...]:
    """Place of a waiting job: opportunistic ones last, then the rank, queue time, and id (the last element)."""
    return (row.ask.opportunistic, *profile.order.rank(state, row, now), row.ask.queued_at, row.ask.id)


def wait_of(state: State, profile: Profile, job: JobId, now: float) -> Wait | None:
    """Reason of a waiting job by the last passes, or None: what holds for one that is tried before it holds for it.

    A pass tries no more of a line, or of a queue that is held up, than it must; the others keep their last reason.
    """
    row = state.jobs.get(job)
    if row is None or row.phase != "queued" or row.wait is None or row.begins_at > now:
        return None if row is None else row.wait
    if profile.order.by_job:
        return _as_of_now(state, profile, row, row.wait)
    by_queue = profile.block == "queue"
    for *_, other in state.asking[row.ask.queue] if by_queue else state.lines[line_key(row)]:
        if other == job:
            break
        wait = state.jobs[other].wait
        if wait is None or wait.reason is Reason.AWAITING_PREEMPTION or (by_queue and wait.reason in PASSED_BY):
            continue
        if wait.reason is Reason.RESERVED_FOR_OTHER and _is_shorter(row, wait, now):
            continue
        wait = _as_of_now(state, profile, state.jobs[other], wait)
        text = f"It is behind {other}: {wait.text or INFO[wait.reason].text}"
        reason = Reason.BEHIND_IN_ORDER if by_queue else wait.reason
        return replace(wait, reason=reason, text=text, fields={**wait.fields, "behind": other})
    return _as_of_now(state, profile, row, row.wait)


def _as_of_now(state: State, profile: Profile, row: JobRow, last: Wait) -> Wait:
    """What a job that finds no place waits for by now: more may be taken since it got its reason."""
    if last.reason not in BY_PLACE:
        return last
    return profile.division.verdict(state, row) or too_few_free(state, row.ask.shape) or last


def _is_shorter(row: JobRow, wait: Wait, now: float) -> bool:
    """Whether a job would be over before what another one has to wait for."""
    return row.left_s is not None and now + row.left_s <= float(wait.fields.get("until", inf))
