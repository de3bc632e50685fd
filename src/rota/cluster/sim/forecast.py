"""Forecasts by simulation of a copy of the live state: when would a job run, and what would another policy do?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from typing import TypedDict

from rota.cluster.core.guarded import without_refused
from rota.cluster.core.jobs import JobAsk, LiveJob
from rota.cluster.core.profile import Profile
from rota.cluster.core.state import State
from rota.cluster.policies import get_profile
from rota.cluster.sim.report import Percentiles, spread_of
from rota.cluster.sim.simulate import SimJob, SimResult, Simulation
from rota.runtime.clock import Clock
from rota.spec.ids import JobId

HORIZON_S = 30 * 86400.0
UNKNOWN_S = 3600.0
"""How long jobs are taken to run when none has an estimate."""
PESSIMISM = 2.0
"""How much longer than estimated jobs run in the pessimistic forecast."""
WALL_MAX_S = 1.0
"""How long one of the two plays may take; a start that lies beyond what was played in that time is not known."""


class StartEstimate(TypedDict):
    """JSON document of an estimate."""

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
    """Start of a job in seconds of the scheduler's clock: likely, and if jobs run longer; None: not known.

    ``basis`` says what the durations rest on.
    """

    p50: float | None
    p90: float | None
    basis: str

    def to_json(self) -> StartEstimate:
        """The ``estimate`` of ``rota explain --json``."""
        return {"p50": self.p50, "p90": self.p90, "basis": self.basis}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What one play says of every job that held nothing at its beginning."""

    starts: Mapping[JobId, tuple[float | None, float | None]]
    basis: str

    def of(self, job: JobId, now: float = -inf) -> Estimate:
        """The estimate of one job, not before ``now``; nothing is known of one that came later."""
        likely, late = (at if at is None else max(at, now) for at in self.starts.get(job, (None, None)))
        return Estimate(p50=likely, p90=late, basis=self.basis)


class Forecast:
    """When the waiting jobs would start if no other job came, by playing the live jobs on a copy.

    The copy is made at once, so ``play`` may run beside the scheduler; the live state is not touched. Durations are
    the declared estimates or time limits; a job without one takes the mean of those that have one. With ``until`` the
    play ends where that job starts. ``instead`` is what a job that waits asks in the play, in place of what it asks.
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
                state.put(txn, replace(state.jobs[instead.id], ask=instead, wait=None))
            self._fork(state)

    def _fork(self, state: State) -> None:
        self._jobs = [job for job, row in state.jobs.items() if not row.held]
        known = [row.ask.est_s for row in state.jobs.values() if row.ask.est_s is not None]
        blind = not known and bool(state.holders())
        self._mean = sum(known) / len(known) if known else 0.0
        self._basis = f"{len(known)} of {len(state.jobs)} jobs have an estimate or a time limit"
        if blind:
            self._basis = "no job has an estimate or a time limit"
        with without_refused(state):
            self._forks = () if blind else (state.copy(), state.copy())

    def play(self, clock: Clock, between_passes: Callable[[], None] = lambda: None) -> Estimates:
        """Play the copies: once with the durations as they are, once with longer ones.

        ``between_passes`` is called between two passes, for a thread that lets others go first.
        """
        if not self._forks:
            return Estimates(starts=dict.fromkeys(self._jobs, (None, None)), basis=self._basis)
        likely, late = (
            self._starts(fork, factor, clock, between_passes) for fork, factor in zip(self._forks, (1.0, PESSIMISM))
        )
        return Estimates(starts={job: (likely[job], late[job]) for job in self._jobs}, basis=self._basis)

    def _starts(
        self, fork: State, factor: float, clock: Clock, between_passes: Callable[[], None]
    ) -> dict[JobId, float | None]:
        jobs = [_sim_job(fork.jobs[job], self._now, self._mean, factor) for job in sorted(fork.jobs)]
        run = Simulation(
            fork,
            self._profile,
            jobs,
            clock,
            until_s=self._now + HORIZON_S,
            stop_when_started=self._until,
            now=self._now,
            wall_max_s=self._wall_max_s,
            between_passes=between_passes,
        )
        return {job: one.first_start_s for job, one in run.run().runs.items()}


def outlook(forks: Mapping[str, State], now: float, clock: Clock) -> OutlookDocument:
    """What becomes of the live jobs under each profile, if no other job comes: starts and ends in seconds from now.

    ``forks`` has for each profile a copy of the same state, which is used up. A job without an estimate or time limit
    takes the mean of those that have one, or ``UNKNOWN_S``. Raises UnknownName for a profile that does not exist.
    """
    rows = [row for _, row in sorted(next(iter(forks.values())).jobs.items())]
    known = [row.ask.est_s for row in rows if row.ask.est_s is not None]
    mean = sum(known) / len(known) if known else UNKNOWN_S
    gpus = sum(len(node.devices) for node in next(iter(forks.values())).nodes)
    runs = {name: _played(fork, name, mean, now, clock) for name, fork in forks.items()}
    return {
        "profiles": list(forks),
        "basis": f"{len(known)} of {len(rows)} jobs have an estimate or a time limit; the others count {mean:.0f} s",
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


def _played(fork: State, profile: str, mean: float, now: float, clock: Clock) -> SimResult:
    jobs = [_sim_job(row, now, mean, 1.0) for _, row in sorted(fork.jobs.items())]
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


def _sim_job(row: LiveJob, now: float, mean: float, factor: float) -> SimJob:
    return SimJob(ask=row.ask, submit_s=now, work_s=(mean if row.ask.est_s is None else row.ask.est_s) * factor)
