"""Order in which a pass tries waiting jobs: the first of each line of equal jobs, or queue, then those behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from rota.cluster.core.admission import AWAITED, LIMITS, held_back, too_few_free, with_held_back
from rota.cluster.core.jobs import LineKey, LiveJob, Shape, Wait
from rota.cluster.core.preemption import BackfillReservations
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.spec.ids import JobId
from rota.spec.reasons import INFO, Reason

PASSED_BY = frozenset({Reason.NOT_BEFORE, Reason.DEPENDENCY, Reason.COOL_DOWN, Reason.USER_LIMIT})
"""Reasons that lie in the job or its user: those behind it in its queue need not wait with it."""

FOR_ONE_JOB = AWAITED | {Reason.RESERVED_FOR_OTHER}
"""Reasons that hold for one job of a line only: the next one may be shorter, or find victims of its own."""

BY_PLACE = {Reason.NO_FREE_DEVICES, Reason.FRAGMENTED, Reason.WRONG_TYPE, Reason.CPU_OR_MEMORY, Reason.TOPOLOGY}
"""Reasons of jobs whose queue might start them, and that find no place."""


class NextJob(NamedTuple):
    """A job that is to be tried: its place in the order, its line or queue, how far down, and the starts until then."""

    place: tuple[object, ...]
    job: JobId
    track: LineKey | str
    depth: int
    starts: int


@dataclass(frozen=True, slots=True)
class RememberedRefusal:
    """A "no" that was reached before: its numbers are found when a job gets it as its reason."""

    reason: Reason


class TryOrder:
    """The first job of every line of equal jobs, or of every queue, in the order of the policy; then those behind it.

    ``starts`` counts starts and claims so far: ranks stay as they are until there is one more. With ``until`` none that
    has a rank of its own and comes after that job.
    """

    def __init__(
        self,
        state: State,
        profile: Profile,
        now: float,
        reservations: BackfillReservations,
        starts: Callable[[], int],
        until: JobId | None = None,
    ) -> None:
        self._state, self._profile, self._now, self._starts = state, profile, now, starts
        self._reservations = reservations
        self._by_job, self._by_queue = profile.order.by_job, profile.block == "queue"
        tracks = state.waiting if self._by_queue else state.lines
        if self._by_job:
            last = None if until is None else self._place(state.jobs[until])
            self._heap = [
                NextJob(place, entry[-1], track, depth, 0)
                for track, entries in tracks.items()
                for depth, entry in enumerate(entries)
                if (place := self._place(state.jobs[entry[-1]])) and (last is None or place <= last)
            ]
        elif len(tracks) == 1:  # its place among others is not asked for: it is tried before any other is put in
            [(track, entries)] = tracks.items()
            self._heap = [NextJob((), entries[0][-1], track, 0, 0)]
        else:
            self._heap = [self._at(track, 0) for track in tracks]
        heapify(self._heap)

    def _place(self, row: LiveJob) -> tuple[object, ...]:
        """The place of a job that has a rank of its own: it stays while the row does."""
        places, order = self._state.memory.places, self._profile.order
        known = places.get(row.ask.id)
        if known is None or known[0] is not row or known[1] != order:
            known = places[row.ask.id] = (row, order, place_in_order(self._state, self._profile, row, self._now))
        return known[2]

    def next(self) -> tuple[NextJob, LiveJob, LineKey] | None:
        """The turn that comes first, with its job and the line of that."""
        heap = self._heap
        while heap:
            turn = heap[0]
            row = self._state.jobs[turn.job]
            if not self._by_job and turn.starts != self._starts():
                again = self._turn(row, turn.track, turn.depth)
                if again.place > turn.place:
                    heapreplace(heap, again)
                    continue
            heappop(heap)
            return turn, row, self._state.line_of(row) if isinstance(turn.track, str) else turn.track
        return None

    def after(self, turn: NextJob, wait: Wait | RememberedRefusal | None) -> None:
        """Who of the line, or queue, is tried after this one: the next, unless what stops this one stops them all."""
        if self._by_job:  # each job has a turn of its own
            return
        depth = turn.depth + 1
        if wait is None:
            depth = turn.depth
        elif wait.reason is Reason.RESERVED_FOR_OTHER and not isinstance(turn.track, str):
            depth = self._shorter(turn.track, turn.depth)
        elif wait.reason not in FOR_ONE_JOB and not (self._by_queue and wait.reason in PASSED_BY):
            return
        if depth < len(self._entries(turn.track)):
            heappush(self._heap, self._at(turn.track, depth))

    def again(self, turn: NextJob) -> None:
        """The job of a turn that was refused, and behind whom none is tried, is tried once more."""
        heappush(self._heap, turn if self._by_job else self._turn(self._state.jobs[turn.job], turn.track, turn.depth))

    def _shorter(self, key: LineKey, depth: int) -> int:
        """The next in the line that is over before the last of the reservations that this one would outlive."""
        line, jobs = self._state.lines[key], self._state.jobs
        ends = [r.at for r in self._reservations.outlived_by(jobs[line[depth][1]])]
        if not ends:  # it was not tried in this pass, which had tried enough: nor are those behind it
            return len(line)
        left = ((i, jobs[line[i][1]].left_late_s) for i in range(depth + 1, len(line)))
        return next((i for i, left_s in left if left_s is not None and self._now + left_s <= max(ends)), len(line))

    def _entries(self, track: LineKey | str) -> Sequence[tuple[float, JobId] | tuple[int, float, JobId]]:
        """The waiting jobs of a queue, or of a line, first to last."""
        return self._state.waiting.get(track, ()) if isinstance(track, str) else self._state.lines.get(track, ())

    def _at(self, track: LineKey | str, depth: int) -> NextJob:
        return self._turn(self._state.jobs[self._entries(track)[depth][-1]], track, depth)

    def _turn(self, row: LiveJob, track: LineKey | str, depth: int) -> NextJob:
        place = place_in_order(self._state, self._profile, row, self._now)
        return NextJob(place, row.ask.id, track, depth, self._starts())


def place_in_order(state: State, profile: Profile, row: LiveJob, now: float) -> tuple[object, ...]:
    """Place of a waiting job: opportunistic ones last, then the rank, queue time, and id (the last element)."""
    return (row.ask.opportunistic, *profile.order.rank(state, row, now), row.ask.queued_at, row.ask.id)


ShortOf = Callable[[State, Shape], Wait | None]


def waits_now(state: State, profile: Profile, now: float) -> Callable[[JobId], Wait | None]:
    """``wait_of`` for many jobs of one moment: what is short for several of one shape is counted once."""
    return partial(wait_of, state, profile, now=now, short_of=cache(too_few_free))


def wait_of(state: State, profile: Profile, job: JobId, now: float, short_of: ShortOf = too_few_free) -> Wait | None:
    """Reason of a waiting job by the last passes, or None: what holds for one that is tried before it holds for it.

    A pass tries no more of a line, or of a queue that is held up, than it must; the others keep their last reason.
    """
    row = state.jobs.get(job)
    if row is None or row.phase != "queued" or row.wait is None or row.begins_at > now:
        return None if row is None else row.wait
    if profile.order.by_job:
        return _as_of_now(state, profile, row, row.wait, now, short_of)
    by_queue = profile.block == "queue"
    for *_, other in state.waiting[row.ask.queue] if by_queue else state.lines[state.line_of(row)]:
        if other == job:
            break
        wait = state.jobs[other].wait
        if wait is None or wait.reason in AWAITED or (by_queue and wait.reason in PASSED_BY):
            continue
        if wait.reason is Reason.RESERVED_FOR_OTHER and _is_shorter(row, wait, now):
            continue
        wait = _as_of_now(state, profile, state.jobs[other], wait, now, short_of)
        text = f"It is behind {other}: {wait.text or INFO[wait.reason].text}"
        reason = Reason.BEHIND_IN_ORDER if by_queue else wait.reason
        return replace(wait, reason=reason, text=text, fields={**wait.fields, "behind": other})
    return _as_of_now(state, profile, row, row.wait, now, short_of)


def _as_of_now(state: State, profile: Profile, row: LiveJob, last: Wait, now: float, short_of: ShortOf) -> Wait:
    """What a job that finds no place waits for by now: more may be taken since it got its reason.

    Who held it back when it got its reason may do so no more, and another may by now.
    """
    if of_then := "held_back_by" in last.fields:
        last = Wait(reason=last.reason)
    if last.reason in BY_PLACE or of_then:
        last = profile.division.verdict(state, row) or short_of(state, row.ask.shape) or last
    others = state.memory.held_back.get(row.ask.id, ()) if last.reason in (*BY_PLACE, *LIMITS) else ()
    if not others or any(state.jobs[one].phase != "running" for one in others if one in state.jobs):
        return last
    found = held_back(state, row, others, profile.round_s, now)
    return with_held_back(last, found, until_round=profile.round_s > 0)


def _is_shorter(row: LiveJob, wait: Wait, now: float) -> bool:
    """Whether a job would be over before what another one has to wait for."""
    return row.left_late_s is not None and now + row.left_late_s <= wait.number("until")
