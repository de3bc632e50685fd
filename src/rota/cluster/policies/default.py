"""Default policy: priority, then fair share; borrow what is idle, take it back at least cost; backfill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from rota.cluster.core.capacity import GPU
from rota.cluster.core.jobs import LiveJob, Wait
from rota.cluster.core.preemption import choose_victims, lost_gpu_s
from rota.cluster.core.profile import Placer, Profile, Rank, Victim
from rota.cluster.core.promises import UNCOVERED, beyond, next_level, promise_level
from rota.cluster.core.state import State
from rota.cluster.core.txn import Txn
from rota.cluster.policies.basic import Fit, LimitsOnly
from rota.spec.ids import JobId
from rota.spec.reasons import Reason

_RanksAsOf = tuple[tuple[int, float], dict[JobId, tuple[int, float]]]
"""Writes and time as of which what a rule says of the jobs that speak for queues is known."""
_NO_RANKS = ((-1, 0.0), dict[JobId, tuple[int, float]]())


@dataclass(frozen=True, slots=True)
class PriorityThenShare:
    """What queues are promised first; then highest priority; then the queue that uses least of its guarantee."""

    by_job = False

    def rank(self, state: State, row: LiveJob, now: float) -> Rank:
        """Level of the promise, minus the priority, used over guaranteed of the queue."""
        level, share = of_queue(state, row, now, share_rank)
        return (level, -row.ask.priority, share)


def of_queue(
    state: State, row: LiveJob, now: float, rule: Callable[[State, LiveJob], tuple[int, float]]
) -> tuple[int, float]:
    """What a rule says of the queue of a job, by the job that speaks for the queue; kept while nothing changes.

    That is the first of its waiting jobs whose time has come, by priority, then by arrival. One as urgent speaks for
    itself where a promise covers it, and covers the first one less or not at all: that one may wait for ever.
    """
    txn = state.open_txn
    speaker = _speaker(state, row, now)
    if txn is None or row.phase != "queued" or row.begins_at > now:
        return rule(state, speaker)
    as_of = (txn.writes, now)
    last, known = cast("_RanksAsOf", txn.notes.get(("ranks", rule), _NO_RANKS))
    if last != as_of:
        known = dict[JobId, tuple[int, float]]()
        txn.notes["ranks", rule] = (as_of, known)
    found = known.get(speaker.ask.id)
    if found is None:
        found = known[speaker.ask.id] = rule(state, speaker)
    return found


def _speaker(state: State, row: LiveJob, now: float) -> LiveJob:
    waiting = (state.jobs[job] for _, _, job in state.waiting.get(row.ask.queue, ()))
    first = next((one for one in waiting if one.begins_at <= now), row)
    if first is row or row.ask.priority < first.ask.priority or not first.ask.shape.gpu_milli:
        return first
    level = next_level(state, first)
    return row if level and promise_level(state, row) < level else first


def share_rank(state: State, speaker: LiveJob) -> tuple[int, float]:
    """Which promise covers the job that speaks for a queue, and used over guaranteed devices of that.

    A queue that is promised nothing has 1 plus used over weight: after the others. Under a promise to a queue above,
    who was queued first comes first.
    """
    tree = state.queues
    queue = tree.row.get(speaker.ask.queue)
    if queue is None:
        return (0, 0.0)
    used, guaranteed = int(state.used[queue, GPU]), int(tree.guaranteed[queue, GPU])
    share = used / guaranteed if guaranteed else 1.0 + used / 1000 / max(tree.rows[queue].weight, 1e-9)
    if not speaker.ask.shape.gpu_milli:
        return (0, share)
    level = promise_level(state, speaker)
    return (level, speaker.ask.queued_at if 0 < level < UNCOVERED else share)


@dataclass(frozen=True, slots=True)
class LimitsAndGuarantee:
    """No queue passes its limit; work that may not be preempted must fit into the guarantee, where there is one."""

    def verdict(self, state: State, row: LiveJob) -> Wait | None:
        """As ``LimitsOnly``; then ``NON_PREEMPTIBLE_OVER_QUOTA`` where the guarantee of the queue is too small."""
        wait = LimitsOnly().verdict(state, row)
        if wait is not None or row.ask.preemptible:
            return wait
        tree = state.queues
        queue = tree.row[row.ask.queue]
        guaranteed, need = int(tree.guaranteed[queue, GPU]), int(tree.need(row.ask.shape)[GPU])
        if guaranteed and need and int(state.used[queue, GPU]) + need > guaranteed:
            return Wait(
                reason=Reason.NON_PREEMPTIBLE_OVER_QUOTA,
                text=f"{state.used[queue, GPU] / 1000:g} of {guaranteed / 1000:g} guaranteed gpus are in use.",
                fields={"queue": row.ask.queue},
            )
        return None


_Entry = tuple[bool, float, float, JobId]
"""Not to be spared, what stopping it loses, how new it is, and who."""

OPPORTUNISTIC, BORROWED, LOWER, LATER = range(4)
"""Kinds of victims in the order in which they are taken."""
_REASONS = (Reason.PREEMPTED_RECLAIM, Reason.PREEMPTED_RECLAIM, Reason.PREEMPTED_PRIORITY, Reason.PREEMPTED_RECLAIM)


@dataclass(frozen=True, slots=True)
class LeastCost:
    """Opportunistic work first, then borrowed, then of the same queue lower priority, then what overtook the job.

    What this pass started stays.
    A job that is covered by a promise may have the devices of all that none covers; what may not be preempted, and
    queues that are not preemptible, lose nothing. One that is not covered may only stop opportunistic work and lower
    priority of its queue. ``min_runtime_s`` protects new jobs, so that idle rounds change nothing.
    """

    restart_s: float = 60.0
    min_runtime_s: float = 0.0

    def victims(self, state: State, txn: Txn, row: LiveJob, placer: Placer, now: float) -> tuple[Victim, ...] | None:
        """The set of least cost in device-seconds, restarts of ``restart_s`` included; None if no set makes room."""
        if row.ask.opportunistic:
            return None
        over = beyond(state, row) if promise_level(state, row) < UNCOVERED else set[JobId]()
        found = [
            (kind, priority, *one)
            for (queue, priority), running in state.running.items()
            for kind, jobs in self._kinds(state, row, queue, priority, running, over)
            for one in self._able(state, txn, jobs, now)
        ]
        kept = [(state.jobs[entry[-1]], _REASONS[entry[0]]) for entry in sorted(found)]
        return choose_victims(state, txn, row, placer, kept, now, restart_s=self.restart_s) if kept else None

    def _able(self, state: State, txn: Txn, jobs: Iterable[JobId], now: float) -> Iterator[_Entry]:
        """Which of these may be stopped, with their places among victims; worked out once for a pass."""
        key = (self, now)
        known = cast("dict[JobId, _Entry | None]", txn.notes.setdefault(key, dict[JobId, "_Entry | None"]()))
        for job in jobs:
            if job not in known:
                row = state.jobs[job]
                able = row.ask.may_stop and now - row.started_at >= self.min_runtime_s
                lost = lost_gpu_s(state, job, now, self.restart_s) if able else 0.0
                known[job] = (not row.ask.spare, lost, -row.started_at, job) if able else None
            if (one := known[job]) is not None and job not in state.started:
                yield one

    def _kinds(
        self, state: State, row: LiveJob, queue: str, priority: int, running: Iterable[JobId], over: set[JobId]
    ) -> Iterator[tuple[int, Iterable[JobId]]]:
        """Kinds of victims among who runs in a queue at a priority; ``over`` are those beyond all promises."""
        own = queue == row.ask.queue
        if priority < 0:
            yield OPPORTUNISTIC, running
        elif own and priority < row.ask.priority:
            yield LOWER, running
        elif over and (own or state.queues.gives_back(queue)):
            yield LATER if own else BORROWED, over.intersection(running)


def stops(state: State, row: LiveJob) -> bool:
    """Whether ``LeastCost`` could find a victim: lower work of the own queue, opportunistic, or lent by a promise."""
    return promise_level(state, row) < UNCOVERED or any(
        jobs and (priority < 0 or (path == row.ask.queue and priority < row.ask.priority))
        for (path, priority), jobs in state.running.items()
    )


def default() -> Profile:
    """What a shared cluster wants: guarantees kept, idle devices lent, gangs not starved."""
    return Profile(
        name="default",
        order=PriorityThenShare(),
        division=LimitsAndGuarantee(),
        placer=Fit(),
        victims=LeastCost(),
        stops=stops,
        block="reserve",
        objective="finish",
        victim_sets_max=1,
        vain_max=4,
        starve_s=3600.0,
        promises=True,
    )
