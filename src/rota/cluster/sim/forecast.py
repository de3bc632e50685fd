"""Forecasts by simulation of a copy of the live state: when would a job run, and what would another policy do?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import TypedDict

from rota.cluster.core.admission import usable_milli
from rota.cluster.core.capacity import GPU
from rota.cluster.core.guarded import without_refused
from rota.cluster.core.jobs import JobAsk, LiveJob
from rota.cluster.core.profile import Profile
from rota.cluster.core.run_time import EVIDENCE, LIKELY, Book, Spread, times_of
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.sim.report import Percentiles, spread_of
from rota.cluster.sim.simulate import JobRun, SimJob, SimResult, Simulation
from rota.runtime.clock import Clock
from rota.runtime.random import RandomSource, SeededRandom
from rota.spec.ids import JobId
from rota.spec.resources import counted

HORIZON_S = 30 * 86400.0
PLAYS = 9
"""Plays of a forecast. The true start is one more draw of the same kind: by its rank it lies between the first and the
last of nine with 8/10."""
PESSIMISM = 2.0
"""By how much waits are longer, or shorter, without evidence."""
ARRIVALS_S = 86400.0
"""The jobs submitted in this time that are still here are the pattern of those to come. Short ones have ended by then,
and are missing, but ask little of the devices."""
ARRIVALS_MAX = 1000
"""Jobs that come in one play."""
PLAYED_ON = 3.0
"""They come for this multiple of the longest wait without them, and no shorter than the next. A job that never starts
prolongs no play."""
PLAYED_ON_MIN_S = 7 * 86400.0
WALL_MAX_S = 2.0
"""How long all plays may take; at least one is made."""


class StartEstimate(TypedDict):
    """JSON document of an estimate."""

    p10: float | None
    p50: float | None
    p90: float | None
    basis: str


class ProfileOutlook(TypedDict):
    """Figures of the live jobs under one profile."""

    jobs: int
    started: int
    finished: int
    wait_s: Percentiles
    jct_s: Percentiles
    makespan_s: float
    utilisation: float | None
    preemptions: int


class JobOutlook(TypedDict):
    """Start and end of a job under each profile in seconds from now; None beyond the horizon."""

    job: JobId
    queue: str
    gpus: float
    state: str
    starts_s: dict[str, float | None]
    ends_s: dict[str, float | None]
    preemptions: dict[str, int]


class OutlookDocument(TypedDict):
    """The live jobs under several profiles."""

    profiles: list[str]
    basis: str
    summary: dict[str, ProfileOutlook]
    items: list[JobOutlook]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Start of a job in seconds of the scheduler's clock; one in ten starts before ``p10``, one in ten after ``p90``.

    None: it never starts as it is, ``p90`` alone: not in one of ten. ``basis`` says what the durations rest on.
    """

    p10: float | None
    p50: float | None
    p90: float | None
    basis: str

    def to_json(self) -> StartEstimate:
        """The ``estimate`` of ``rota explain --json``."""
        return {"p10": self.p10, "p50": self.p50, "p90": self.p90, "basis": self.basis}


Start = tuple[float | None, float | None, float | None]
"""Start of a job: p10, p50, p90."""
NEVER: Start = (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the plays say of every job that held nothing at their beginning."""

    starts: Mapping[JobId, Start]
    basis: str

    def of(self, job: JobId, now: float = -inf) -> Estimate:
        """The estimate of one job, not before ``now``; nothing is known of one that came later."""
        early, likely, late = (at if at is None else max(at, now) for at in self.starts.get(job, NEVER))
        return Estimate(p10=early, p50=likely, p90=late, basis=self.basis)


class Forecast:
    """When the waiting jobs would start, by playing the live jobs, and those to come, on copies.

    The first copy is made at once, so ``play`` may run beside the scheduler; the live state is not touched. Each of
    ``PLAYS`` plays draws the run times of all jobs anew, from what ended jobs took, or from the progress that a job
    reports, and has jobs come as in the last ``ARRIVALS_S``, each day as the one before, from a moment of it that is
    drawn: a circular block bootstrap (Politis, Romano, 1992). Where all run times are known one play without other
    jobs is made. With ``until`` a play ends where that job starts. ``instead`` is what a job that waits asks in
    the plays, in place of what it asks.
    """

    def __init__(
        self,
        state: State,
        profile: Profile,
        now: float,
        *,
        until: JobId | None = None,
        instead: JobAsk | None = None,
        wall_max_s: float = WALL_MAX_S,
    ) -> None:
        # What a profile keeps of a pass is of one state.
        self._until, self._profile, self._now, self._wall_max_s = until, deepcopy(profile), now, wall_max_s
        with state.txn() as txn:  # undone at its end
            if instead is not None:
                state.put(txn, state.jobs[instead.id]._replace(ask=instead, wait=None))
            with without_refused(state):
                self._state = state.copy()
        rows = self._state.jobs
        self._ended = sum(taken.ended for group, taken in state.taken.items() if len(group) == 1)
        self._basis = basis_of(rows.values(), self._ended)

    def play(self, clock: Clock, between_passes: Callable[[], None] = lambda: None) -> Estimates:
        """Play the copies, as many as there is time for. The durations are drawn by strata, the same for equal states.

        ``between_passes`` is called between two passes, for a thread that lets others go first.
        """
        began_s, found = clock.monotonic_s(), list[Mapping[JobId, float | None]]()
        rows = {job: row for job, row in self._state.jobs.items() if row.phase != "paused"}
        book = self._state.taken
        known = all(_spread_of(book, row, self._now).is_known for row in rows.values())
        strata, source = _strata(rows, 1 if known else PLAYS), SeededRandom(1 if known else PLAYS)
        alone: Mapping[JobId, float | None] = {}
        for k in range(1 if known else PLAYS):
            drawn = book if known else _redrawn(book, source)
            spreads = {job: _spread_of(drawn, row, self._now) for job, row in rows.items()}
            work_s = {job: one.at(strata[job][k], _ran_s(rows[job], self._now)) for job, one in spreads.items()}
            jobs = [SimJob(ask=rows[job].ask, submit_s=self._now, work_s=work_s[job]) for job in sorted(rows)]
            starts = partial(self._starts, clock=clock, between_passes=between_passes)
            if not k:
                alone = starts(jobs, self._waiting(), wall_max_s=self._wall_max_s)
            left_s = self._wall_max_s - (clock.monotonic_s() - began_s)
            able = {job: at for job in self._waiting() if (at := alone.get(job)) is not None}
            if known or not able or left_s <= 0:
                break
            until_s = max(PLAYED_ON_MIN_S, PLAYED_ON * (max(able.values()) - self._now))
            jobs += self._arrivals(rows.values(), drawn, SeededRandom(k), until_s)
            found.append({**alone, **starts(jobs, [*able], wall_max_s=left_s)})
        waiting = [job for job, row in self._state.jobs.items() if not row.held]
        made = {job: self._together([one.get(job) for one in found or [alone]]) for job in sorted(waiting)}
        return Estimates(starts=made, basis=f"{self._basis}; jobs come as in the last day" if found else self._basis)

    def _waiting(self) -> list[JobId]:
        """Whose start is asked for."""
        waiting = [job for job, row in self._state.jobs.items() if row.phase == "queued"]
        return waiting if self._until is None else [self._until]

    def _arrivals(self, rows: Iterable[LiveJob], book: Book, source: RandomSource, until_s: float) -> list[SimJob]:
        """The jobs that come in one play until ``until_s`` seconds from now, the soonest first."""
        rng = source.rng()
        asks = [row.ask.having(None) for row in rows if row.ask.part_of is None]
        ages = {ask.id: age_s for ask in asks if 0.0 <= (age_s := self._now - ask.queued_at) < ARRIVALS_S}
        begin_s = rng.random() * ARRIVALS_S
        day = sorted(((begin_s - ages[ask.id]) % ARRIVALS_S, ask.id, ask) for ask in asks if ask.id in ages)
        times = ((n * ARRIVALS_S + at_s, n, ask) for n in range(int(HORIZON_S / ARRIVALS_S)) for at_s, _, ask in day)
        found = list[SimJob]()
        for at_s, n, ask in takewhile(lambda one: one[0] <= until_s, islice(times, ARRIVALS_MAX)):
            at = self._now + at_s
            new = replace(ask, id=JobId(f"{ask.id}+{n}"), queued_at=at, after=(), not_before=0.0)
            found.append(SimJob(ask=new, submit_s=at, work_s=times_of(book, new).at(rng.random())))
        return found

    def _together(self, starts: Sequence[float | None]) -> Start:
        """Quantiles of the starts of one job; wide until enough jobs have ended to know how true durations are."""
        known = sorted(inf if at is None else at for at in starts)  # a play in which it never starts is the latest
        early, likely, late = known[0], known[len(known) // 2], known[-1]
        if self._ended < EVIDENCE and likely < inf:
            wait_s = likely - self._now
            early, late = min(early, self._now + wait_s / PESSIMISM), max(late, self._now + wait_s * PESSIMISM)
        early, likely, late = (None if at == inf else at for at in (early, likely, late))
        return (early, likely, late)

    def _starts(
        self,
        jobs: Sequence[SimJob],
        awaited: Sequence[JobId],
        *,
        clock: Clock,
        between_passes: Callable[[], None],
        wall_max_s: float,
    ) -> dict[JobId, float | None]:
        """When the jobs start in one play, which ends when those that are ``awaited`` have started."""
        run = Simulation(
            self._state.copy(),
            self._profile,
            jobs,
            clock,
            until_s=self._now + HORIZON_S,
            stop_when_started=awaited,
            now=self._now,
            wall_max_s=wall_max_s,
            between_passes=between_passes,
        )
        found = run.run().runs
        return {job: one.first_start_s for job, one in found.items()} | _beyond(run, found)


def basis_of(rows: Collection[LiveJob], ended: int) -> str:
    """What durations rest on, in a sentence."""
    asked = sum(row.ask.est_s is not None for row in rows)
    reported = sum(row.reported_s is not None for row in rows)
    text = f"{asked} of {len(rows)} jobs have a time limit"
    text += f", {counted(ended, 'job')} that ended say how true limits are" if ended else ""
    return f"{text}, {reported} report their progress" if reported else text


TOLD = (0.9, 1.0, 1.1)
"""Parts of the reported rest that a job may take."""


def _redrawn(book: Book, source: RandomSource) -> Book:
    """The book as it might be had other jobs of the same kind ended: what is known of all is not known exactly.

    The bootstrap of B. Efron (Annals of Statistics 7, 1979).
    """
    return {
        group: taken._replace(values=tuple(source.rng().choices(taken.values, k=len(taken.values))))
        for group, taken in sorted(book.items())
    }


def _spread_of(book: Book, row: LiveJob, now: float) -> Spread:
    if row.reported_s is None:
        return times_of(book, row.ask)
    ran_s = _ran_s(row, now)
    left_s = max(0.0, row.reported_s - ran_s)
    return Spread(tuple(ran_s + part * left_s for part in TOLD), tuple((i + 1) / len(TOLD) for i in range(len(TOLD))))


def _ran_s(row: LiveJob, now: float) -> float:
    return row.done_s + (now - row.started_at if row.held else 0.0)


def _strata(jobs: Iterable[JobId], plays: int) -> dict[JobId, list[float]]:
    """The quantile that each job takes in each play: one of each of as many equal parts, in an order of its own."""
    rng, found = SeededRandom(plays).rng(), dict[JobId, list[float]]()
    for job in sorted(jobs):
        found[job] = [(part + rng.random()) / plays for part in rng.sample(range(plays), plays)]
    return found


def _beyond(run: Simulation, runs: Mapping[JobId, JobRun]) -> dict[JobId, float]:
    """Starts of jobs that were not reached in time: when the work before them is done, with all devices in use.

    In a queue with a limit, and below it, also when the work of that queue is done on as many.
    """
    found, queues, gpus = dict[JobId, float](), run.state.queues, max(run.result.gpus, 1)
    devices = [gpus, *(min(gpus, limit / 1000) or gpus for limit in queues.limit[:, GPU].tolist())]
    work = [0.0] * len(devices)  # of all, then of each queue

    def add(job: SimJob, gpu_s: float) -> list[float]:
        rows = (0, *(row + 1 for row in queues.line_of(job.ask.queue)))
        before_s = [work[row] / devices[row] for row in rows]
        for row in rows:
            work[row] += max(0.0, gpu_s)
        return before_s

    for one in runs.values():
        if one.state == "RUNNING":
            add(one.job, (one.job.work_s - one.done_s - (run.now - one.work_from_s) * one.rate) * one.gpus)
    for *_, job in sorted(
        (row.ask.opportunistic, -row.ask.priority, row.ask.queued_at, job) for job, row in run.state.jobs.items()
    ):
        one = runs.get(job)
        if one is None or one.first_start_s is not None or one.state != "QUEUED":
            continue
        if usable_milli(run.state, one.job.ask.shape) < one.job.ask.shape.gpu_milli:
            continue  # with the nodes that take new work it never starts
        if run.state.queues.holds_back(one.job.ask.queue) is not None:
            continue  # nor does it until a person opens its queue
        if run.state.jobs[job].phase == "queued":
            found[job] = run.now + max(add(one.job, one.job.work_s * one.job.ask.shape.gpu_milli / 1000))
    return found


def outlook(forks: Mapping[str, State], now: float, clock: Clock) -> OutlookDocument:
    """What becomes of the live jobs under each profile, if no other job comes: starts and ends in seconds from now.

    ``forks`` has for each profile a copy of the same state, which is used up. A job takes what is likely by what ended
    jobs took. Raises UnknownName for a profile that does not exist.
    """
    rows = [row for _, row in sorted(next(iter(forks.values())).jobs.items())]
    ended = sum(taken.ended for group, taken in next(iter(forks.values())).taken.items() if len(group) == 1)
    gpus = sum(len(node.devices) for node in next(iter(forks.values())).nodes)
    runs = {name: _played(fork, name, now, clock) for name, fork in forks.items()}
    return {
        "profiles": list(forks),
        "basis": basis_of(rows, ended),
        "summary": {name: _figures(run, now, gpus) for name, run in runs.items()},
        "items": [
            {
                "job": row.ask.id,
                "queue": row.ask.queue,
                "gpus": row.ask.shape.gpu_milli / 1000,
                "state": row.phase.upper(),
                "starts_s": {name: _from_now(run.runs[row.ask.id].first_start_s, now) for name, run in runs.items()},
                "ends_s": {name: _from_now(run.runs[row.ask.id].end_s, now) for name, run in runs.items()},
                "preemptions": {name: run.runs[row.ask.id].preemptions for name, run in runs.items()},
            }
            for row in rows
        ],
    }


def _played(fork: State, profile: str, now: float, clock: Clock) -> SimResult:
    jobs = [
        SimJob(ask=row.ask, submit_s=now, work_s=_spread_of(fork.taken, row, now).at(LIKELY, _ran_s(row, now)))
        for _, row in sorted(fork.jobs.items())
    ]
    return Simulation(fork, get_profile(profile), jobs, clock, until_s=now + HORIZON_S, now=now).run()


def _figures(run: SimResult, now: float, gpus: int) -> ProfileOutlook:
    starts = [one.first_start_s for one in run.runs.values()]
    ends = [one.end_s for one in run.runs.values()]
    span = run.last_s - now
    return {
        "jobs": len(run.runs),
        "started": sum(at is not None for at in starts),
        "finished": sum(at is not None for at in ends),
        "wait_s": spread_of([at - now for at in starts if at is not None]),
        "jct_s": spread_of([at - now for at in ends if at is not None]),
        "makespan_s": span,
        "utilisation": run.used_gpu_s / (gpus * span) if gpus and span > 0 else None,
        "preemptions": run.preemptions,
    }


def _from_now(at: float | None, now: float) -> float | None:
    return None if at is None else round(max(0.0, at - now), 3)
